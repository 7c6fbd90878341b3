"""A race check of the CUDA kernels: ThreadSanitizer over the emulation, where every CUDA thread is a thread of its own to it.

    python -m tests.cuda_emulation.races

Only __syncthreads and __syncwarp order memory; shuffles, ldmatrix and mma do not. Finds races that no schedule of the ordinary tests
happens to show. First a planted fault must be reported, then the shipped kernels must be clean. Takes a minute or two, so it is no part of
`make test`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from backends.kernels.variants import SOURCES
from tests.backends.steps import Shape, make_step
from tests.cuda_emulation.step import check, load, make_quantised_step

F32, F16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
STEPS = [(1, 37), (1, 300), (30, 270)]
CASES = {
    "bf16": (BF16, BF16, Shape(6, 2, 64, 16)),
    "f16-int8": (F16, INT8, Shape(2, 1, 128, 16)),
    "bf16-fp8-wide": (BF16, FP8, Shape(2, 1, 256, 8)),
    "bf16-wide": (BF16, BF16, Shape(2, 1, 256, 8)),
    "f32": (F32, F32, Shape(3, 1, 64, 16)),
}
# The launches stay correct in most schedules without this barrier, so that only a race check is sure to see it.
FAULT = ("attention_mma.cu", "__syncthreads();  // the ring is read no more", "")
RACE_STATUS = 66


def main() -> int:
    """Run each case in a process that has ThreadSanitizer loaded, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        faulty = Path(folder) / "kernels"
        shutil.copytree(SOURCES, faulty)
        source, old, new = FAULT
        text = (faulty / source).read_text()
        assert text.count(old) == 1
        (faulty / source).write_text(text.replace(old, new))
        status, output = _run("bf16", faulty)
        if status != RACE_STATUS:
            print(f"the planted race was not reported (exit status {status}):\n{output}")
            return 1
        print("a barrier left out: reported as a race")
    failed = False
    for name in CASES:
        status, output = _run(name, SOURCES)
        print(f"{name}: {'clean' if status == 0 else 'FAILED'}", flush=True)
        if status != 0:
            failed = True
            print(output)
    return int(failed)


def _run(name: str, sources: Path) -> tuple[int, str]:
    library = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    options = f"exitcode={RACE_STATUS} halt_on_error=1 report_signal_unsafe=0"
    environment = {**os.environ, "LD_PRELOAD": library.stdout.strip(), "TSAN_OPTIONS": options, "OMP_NUM_THREADS": "1"}
    # ThreadSanitizer's shadow memory wants the addresses of a process that is not randomised.
    command = ["setarch", platform.machine(), "-R", sys.executable, "-m", __spec__.name, name, str(sources)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, (result.stdout + result.stderr)[-6000:]


def _check(name: str, sources: Path) -> None:
    q_dtype, kv_dtype, shape = CASES[name]
    kernels = load(q_dtype, kv_dtype, shape.head_size, sources=sources, sanitizer="thread")
    if kv_dtype == q_dtype:
        step, scales = make_step(shape, STEPS, q_dtype), None
    else:
        step, scales = make_quantised_step(shape, STEPS, q_dtype, kv_dtype)
    check(kernels, step, step.layer(window=101), scales, seeds=[0, 2])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _check(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
