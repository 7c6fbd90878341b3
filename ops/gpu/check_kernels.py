"""Compiles every shipped CUDA kernel with NVRTC, without a GPU, and holds it to its budget of registers and to no spills.

    python ops/gpu/check_kernels.py [--architectures sm_90] [--only d128] [--report kernels.json]

Needs the packages in `PACKAGES`. The instructions that the design rests on (16-byte loads,
cp.async, ldmatrix, tensor cores) must be in the machine code. Exits with 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from backends.kernels.launch import attention_shape
from backends.kernels.variants import SHIPPED, Variant

PACKAGES = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

# Registers a thread may use. 128 threads of 255 leave two blocks on a multiprocessor (65,536 registers), as does the ring in shared memory;
# ptxas must get there without spilling. Merging and the cache must not limit occupancy at all.
BUDGETS = {
    "attention_mma": 255,
    "attention_simt": 168,
    "attention_simt 8-bit": 248,
    "merge_parts": 64,
    "store_kv": 64,
    "copy_blocks": 40,
}
REGISTERS, SHARED_BYTES, MAX_BLOCKS, MAX_THREADS = (
    65536,
    {"sm_75": 65536, "sm_80": 167936, "sm_90": 233472, "sm_100": 233472},
    32,
    2048,
)

# Instructions that must appear: a pattern of the disassembly, and what it proves.
MIX = {
    "16-byte loads": r"\bLDG\.E[\w.]*\.128",
    "cp.async": r"\bLDGSTS\.[\w.]*128",
    "ldmatrix": r"\bLDSM\.",
    "mma": r"\bHMMA\.16816",
    "local memory": r"\b(LDL|STL)\b",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel needs on one architecture."""

    variant: str
    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    blocks_per_multiprocessor: int
    compile_s: float
    mix: dict[str, int]


def main() -> int:
    """Compile, print a line per kernel, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", type=Path, help="write what was measured as JSON")
    parser.add_argument("--table", type=Path, help="write it as Markdown into the marked place of this file")
    arguments = parser.parse_args()
    if not _is_installed("cuda.bindings") or _tools() is None:
        print(f"cannot compile here: not all of {', '.join(PACKAGES)} are installed", file=sys.stderr)
        return 1
    tasks = [
        (variant, architecture)
        for variant in SHIPPED
        for architecture in arguments.architectures
        if arguments.only in variant.name and capability(architecture) >= variant.minimum_capability
    ]
    faults: list[str] = []
    usages: list[Usage] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for (variant, architecture), outcome in zip(tasks, pool.map(_examine, *zip(*tasks, strict=True)), strict=True):
            if isinstance(outcome, str):
                faults.append(f"{variant.name} {architecture}: {outcome}")
                continue
            for usage in outcome:
                usages.append(usage)
                print(line(usage), flush=True)
                faults += [f"{variant.name} {usage.kernel} {architecture}: {fault}" for fault in judge(usage)]
    if arguments.report:
        arguments.report.write_text(json.dumps([asdict(usage) for usage in usages], indent=1))
    if arguments.table:
        write_table(arguments.table, usages)
    print(f"{len(usages)} kernels in {len(tasks)} modules, {len(faults)} faults")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults or not usages else 0


def capability(architecture: str) -> tuple[int, int]:
    """Return sm_90 as (9, 0)."""
    number = int(architecture.removeprefix("sm_"))
    return number // 10, number % 10


def judge(usage: Usage) -> list[str]:
    """Return what is wrong with a kernel."""
    faults = []
    name = next(name for name in BUDGETS if usage.kernel.startswith(name))
    budget = BUDGETS[f"{name} 8-bit" if name == "attention_simt" and re.search("int8|fp8", usage.variant) else name]
    if usage.registers > budget:
        faults.append(f"{usage.registers} registers, {budget} allowed")
    if usage.stack_bytes or usage.mix["local memory"]:
        faults.append(
            f"{usage.stack_bytes} bytes of stack, {usage.mix['local memory']} accesses to local memory; none allowed"
        )
    if usage.blocks_per_multiprocessor < 1:
        faults.append(f"no block fits: {usage.registers} registers, {usage.shared_bytes} bytes of shared memory")
    wanted = []
    if usage.kernel.startswith("attention_mma"):
        wanted = ["cp.async", "ldmatrix", "mma"]
    elif usage.kernel.startswith(("attention_simt", "store_kv", "copy_blocks")):
        wanted = ["16-byte loads"]
    return faults + [f"no {name} in the machine code" for name in wanted if not usage.mix[name]]


def line(usage: Usage) -> str:
    """Return a line for a person."""
    mix = " ".join(f"{name} {count}" for name, count in usage.mix.items() if count)
    return (
        f"{usage.variant:32} {usage.kernel:22} {usage.architecture:7} {usage.registers:4} registers "
        f"{usage.shared_bytes:7} B shared {usage.blocks_per_multiprocessor:3} blocks/SM {usage.compile_s:5.1f} s  {mix}"
    )


def write_table(file: Path, usages: list[Usage]) -> None:
    """Replace what stands between the two marks of a Markdown file by a table of these kernels. Raises `ValueError` if a mark is missing."""
    begin, end = "<!-- kernels: begin -->\n", "<!-- kernels: end -->\n"
    text = file.read_text()
    head, tail = text.index(begin) + len(begin), text.index(end)
    columns = (
        "variant",
        "kernel",
        "architecture",
        "registers",
        "shared bytes",
        "blocks/SM",
        "warps/SM",
        *list(MIX)[:-1],
    )
    rows = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    merge = next((usage for usage in usages if usage.kernel == "merge_parts"), None)
    for usage in usages:
        if usage.kernel == "merge_parts" and usage is not merge:  # it hardly differs between variants: one row will do
            continue
        variant = next(variant for variant in SHIPPED if variant.name == usage.variant)
        warps = usage.blocks_per_multiprocessor * _launch_shape(variant, usage.kernel)[0] // 32
        cells = (usage.variant, usage.kernel, usage.architecture, usage.registers, usage.shared_bytes)
        mix = [usage.mix[name] for name in list(MIX)[:-1]]
        rows.append("| " + " | ".join(map(str, (*cells, usage.blocks_per_multiprocessor, warps, *mix))) + " |")
    file.write_text(text[:head] + "\n".join(rows) + "\n" + text[tail:])


def compile_cubin(variant: Variant, architecture: str) -> bytes:
    """Return the machine code. Raises `RuntimeError` with the compiler's words; a warning is one as well."""
    from cuda.bindings import nvrtc

    def checked(result: tuple[object, ...]) -> object:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(variant.text.encode(), variant.source.encode(), 0, [], []))
    options = [option.encode() for option in (f"-arch={architecture}", *variant.options)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    log = bytearray(int(str(checked(nvrtc.nvrtcGetProgramLogSize(program)))))
    text = _filled(nvrtc.nvrtcGetProgramLog, program, len(log)).decode().strip("\0\n ")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS or text:
        raise RuntimeError(text or str(status))
    return _filled(nvrtc.nvrtcGetCUBIN, program, int(str(checked(nvrtc.nvrtcGetCUBINSize(program)))))


def _filled(getter: object, program: object, size: int) -> bytes:
    buffer = b" " * size  # the binding writes into it
    assert callable(getter)
    getter(program, buffer)
    return buffer


def _examine(variant: Variant, architecture: str) -> list[Usage] | str:
    started = time.perf_counter()
    try:
        cubin = compile_cubin(variant, architecture)
    except RuntimeError as error:
        return str(error)
    seconds = time.perf_counter() - started
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _dump("-res-usage", file.name)
        code = _dump("-sass", file.name)
    found = []
    for kernel, registers, stack in re.findall(r"Function (\w+):\s*REG:(\d+) STACK:(\d+)", usage):
        body = re.search(rf"Function : {kernel}\n(.*?)(?=\n\s*Function : |\Z)", code, re.DOTALL)
        assert body is not None
        mix = Counter({name: len(re.findall(pattern, body[1])) for name, pattern in MIX.items()})
        threads, shared = _launch_shape(variant, kernel)
        per_block = -(-int(registers) // 8) * 8 * threads
        blocks = min(
            MAX_BLOCKS, MAX_THREADS // threads, REGISTERS // per_block, SHARED_BYTES[architecture] // (shared + 1024)
        )
        found.append(
            Usage(
                variant.name,
                kernel,
                architecture,
                int(registers),
                int(stack),
                shared,
                blocks,
                round(seconds, 2),
                dict(mix),
            )
        )
    return found or "cuobjdump names no kernel"


def _launch_shape(variant: Variant, kernel: str) -> tuple[int, int]:
    """Threads and bytes of shared memory of a block."""
    for group, is_decode in ((1, True), (4, True), (4, False)):
        if variant.head_size is not None:
            shape = attention_shape(variant, group, is_decode)
            if shape.kernel == kernel:
                return shape.threads, shape.shared_bytes
    return (256, 0) if kernel == "copy_blocks" else (128, 0)


def _dump(option: str, file: str) -> str:
    folder = _tools()
    assert folder is not None
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"  # cuobjdump looks for nvdisasm there
    command = [str(folder / "cuobjdump"), option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}).stdout


def _tools() -> Path | None:
    """Return the folder of the wheels' cuobjdump and nvdisasm."""
    spec = importlib.util.find_spec("nvidia.cu13") if _is_installed("nvidia.cu13") else None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if all((Path(folder) / "bin" / name).exists() for name in ("cuobjdump", "nvdisasm")):
            return Path(folder) / "bin"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
