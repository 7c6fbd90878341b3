"""The CUDA kernels under ThreadSanitizer and AddressSanitizer, for what no schedule of the ordinary tests happens to show.

    python -m tests.cuda_emulation.sanitizers

To ThreadSanitizer every CUDA thread is a thread of its own, and only __syncthreads and __syncwarp order memory; shuffles, ldmatrix and mma
do not. AddressSanitizer sees every access beside a tensor, stores included. First a planted fault must be reported by each, then the shipped
kernels must be clean. Takes a few minutes, so it is no part of `make test`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from backends.kernels.variants import SOURCES
from tests.backends.steps import Shape, make_step
from tests.cuda_emulation.step import check, load, make_quantised_step

F32, F16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
STEPS = [(1, 37), (1, 300), (30, 270), (1, 330)]
CASES = {
    "bf16": (BF16, BF16, Shape(6, 2, 64, 16)),
    "f16-int8": (F16, INT8, Shape(2, 1, 128, 16)),
    "bf16-fp8-wide": (BF16, FP8, Shape(2, 1, 256, 8)),
    "bf16-wide": (BF16, BF16, Shape(2, 1, 256, 8)),
    "f32": (F32, F32, Shape(3, 1, 64, 16)),
}
FAULT_CASE = "bf16"
REPORT_STATUS = 66


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """A sanitizer of g++, its options, and a fault that it must report."""

    name: str
    runtime_name: str
    variable: str
    options: str
    source: str
    old: str
    new: str


SANITIZERS = (
    # Without this barrier the result is right in most schedules.
    Sanitizer(
        "thread",
        "libtsan.so",
        "TSAN_OPTIONS",
        "halt_on_error=1 report_signal_unsafe=0",
        "attention_mma.cu",
        "__syncthreads();  // the ring is read no more",
        "",
    ),
    # The last token's log-sum-exps lie past the tensor then. The fibers' stacks are not the process's: that check must be off.
    Sanitizer(
        "address",
        "libasan.so",
        "ASAN_OPTIONS",
        "halt_on_error=1 detect_leaks=0 detect_stack_use_after_return=0",
        "attention.cuh",
        "lse[token * heads * group + h] =",
        "lse[(token + 1) * heads * group + h] =",
    ),
)


def main() -> int:
    """Run each case in a process that has the sanitizer loaded, and return the exit status."""
    failed = False
    for sanitizer in SANITIZERS:
        with tempfile.TemporaryDirectory() as folder:
            faulty = Path(folder) / "kernels"
            shutil.copytree(SOURCES, faulty)
            text = (faulty / sanitizer.source).read_text()
            assert text.count(sanitizer.old) == 1
            (faulty / sanitizer.source).write_text(text.replace(sanitizer.old, sanitizer.new))
            status, output = _run(sanitizer, FAULT_CASE, faulty)
        print(f"{sanitizer.name}: a planted fault is {'reported' if status == REPORT_STATUS else 'MISSED'}", flush=True)
        if status != REPORT_STATUS:
            failed = True
            print(f"exit status {status}\n{output}")
        for name in CASES:
            status, output = _run(sanitizer, name, SOURCES)
            print(f"{sanitizer.name}: {name} is {'clean' if status == 0 else 'FAULTY'}", flush=True)
            if status != 0:
                failed = True
                print(output)
    return int(failed)


def _run(sanitizer: Sanitizer, name: str, sources: Path) -> tuple[int, str]:
    found = subprocess.run(
        ["g++", f"-print-file-name={sanitizer.runtime_name}"], capture_output=True, text=True, check=True
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": found.stdout.strip(),
        sanitizer.variable: f"{sanitizer.options} exitcode={REPORT_STATUS}",
        "OMP_NUM_THREADS": "1",
    }
    # Their shadow memory wants the addresses of a process that is not randomised.
    command = [
        "setarch",
        platform.machine(),
        "-R",
        sys.executable,
        "-m",
        __spec__.name,
        sanitizer.name,
        name,
        str(sources),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, (result.stdout + result.stderr)[-6000:]


def _check(sanitizer: str, name: str, sources: Path) -> None:
    q_dtype, kv_dtype, shape = CASES[name]
    kernels = load(q_dtype, kv_dtype, shape.head_size, sources=sources, sanitizer=sanitizer)
    if kv_dtype == q_dtype:
        step, scales = make_step(shape, STEPS, q_dtype), None
    else:
        step, scales = make_quantised_step(shape, STEPS, q_dtype, kv_dtype)
    check(kernels, step, step.layer(), scales, seeds=[0])
    check(kernels, step, step.layer(window=101), scales, seeds=[2])


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _check(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
