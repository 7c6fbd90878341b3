"""Compiles what the CUDA backends dispatch to, without a GPU: the shipped variants to machine code, held to their registers and to no
spills, and Numba's kernels to PTX.

    python ops/gpu/check_kernels.py [--architectures sm_90] [--only d128] [--report kernels.json] [--fresh]

Needs the packages in `PACKAGES` (the extra `kernels`). The instructions that the design rests on (16-byte loads, cp.async, ldmatrix, tensor
cores) must be in the machine code. What was found is kept in build/kernels by source, options, architecture and versions, so that a second
run compiles only what changed. Exits with 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import numba_ptx

from backends.kernels.dispatch import attention_shape, dispatched
from backends.kernels.variants import STAGES, Variant

PACKAGES = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100")
OTHERS = ("sm_89", "sm_120")
# Of sm_86 only what it alone is served with: modules with a short ring, for devices with little shared memory.
SHORT_RINGS_ONLY = ("sm_86",)
PTX_CAPABILITIES = ((7, 5), (9, 0), (10, 0))
KEPT = Path(__file__).parents[2] / "build" / "kernels"

# Registers a thread may use. 128 threads of 255 leave two blocks on a multiprocessor (65,536 registers), as does the ring in shared memory;
# ptxas must get there without spilling. Merging and the cache must not limit occupancy at all.
BUDGETS = {
    "attention_mma": 255,
    "attention_simt": 168,
    "merge_parts": 64,
    "store_": 64,
    "norm_": 64,
    "rotate_": 64,
    "gate_": 64,
}
REGISTERS, MAX_BLOCKS = 65536, 32
# Of a multiprocessor (CUDA C++ Programming Guide, technical specifications by compute capability).
SHARED_BYTES = {"sm_75": 64, "sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}  # KB
MAX_THREADS = {
    "sm_75": 1024,
    "sm_80": 2048,
    "sm_86": 1536,
    "sm_89": 1536,
    "sm_90": 2048,
    "sm_100": 2048,
    "sm_120": 1536,
}

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
    threads: int
    shared_bytes: int
    blocks_per_multiprocessor: int
    compile_s: float
    mix: dict[str, int]


def main() -> int:
    """Compile, print a line per kernel, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--architectures", nargs="+", choices=(*ARCHITECTURES, *OTHERS))
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true", help="compile what is known as well")
    parser.add_argument("--report", type=Path, help="write what was measured as JSON")
    parser.add_argument("--table", type=Path, help="write it as Markdown into the marked place of this file")
    arguments = parser.parse_args()
    if not _is_installed("cuda.bindings") or _tools() is None:
        print(f"cannot compile here: not all of {', '.join(PACKAGES)} are installed", file=sys.stderr)
        return 1
    begin = time.monotonic()
    if arguments.fresh:
        for file in KEPT.glob("*.json"):
            file.unlink()
    tasks = [
        (variant, architecture)
        for architecture in arguments.architectures or ARCHITECTURES
        for variant in chosen(architecture, whole=bool(arguments.architectures) or architecture not in SHORT_RINGS_ONLY)
        if arguments.only in variant.name
    ]
    faults: list[str] = []
    usages: list[Usage] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        examined = [pool.submit(examine, *task) for task in tasks]
        translated = []
        if not arguments.only:
            translated = [
                (carriers, number, pool.submit(_translate, carriers, number))
                for number in PTX_CAPABILITIES
                for carriers in numba_ptx.CARRIERS
            ]
        for (variant, architecture), job in zip(tasks, examined, strict=True):
            outcome = job.result()
            if isinstance(outcome, str):
                faults.append(f"{variant.name} {architecture}: {outcome}")
                continue
            for usage in outcome:
                usages.append(usage)
                print(line(usage), flush=True)
                faults += [f"{variant.name} {usage.kernel} {architecture}: {fault}" for fault in judge(usage)]
        for carriers, number, translation in translated:
            faults += [
                f"numba {'-'.join(carriers)} sm_{number[0]}{number[1]}: {fault}" for fault in translation.result()
            ]
    if arguments.report:
        arguments.report.write_text(json.dumps([asdict(usage) for usage in usages], indent=1))
    if arguments.table:
        write_table(arguments.table, usages)
    names = {variant.name for variant, _ in tasks}
    print(
        f"{len(usages)} kernels in {len(tasks)} modules of {len(names)} variants, {len(translated)} translations to PTX by Numba, "
        f"{len(faults)} faults, {time.monotonic() - begin:.0f} s"
    )
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults or not usages else 0


def capability(architecture: str) -> tuple[int, int]:
    """Return sm_90 as (9, 0)."""
    number = int(architecture.removeprefix("sm_"))
    return number // 10, number % 10


def chosen(architecture: str, whole: bool = True) -> list[Variant]:
    """Return what a device of `architecture` is served with; unless `whole`, only the modules with a short ring."""
    return [
        variant
        for variant in dispatched(capability(architecture))
        if whole or (variant.stages is not None and variant.stages < STAGES)
    ]


def judge(usage: Usage) -> list[str]:
    """Return what is wrong with a kernel."""
    faults = []
    name = next(name for name in BUDGETS if usage.kernel.startswith(name))
    if usage.registers > BUDGETS[name]:
        faults.append(f"{usage.registers} registers, {BUDGETS[name]} allowed")
    if usage.stack_bytes or usage.mix["local memory"]:
        faults.append(
            f"{usage.stack_bytes} bytes of stack, {usage.mix['local memory']} accesses to local memory; none allowed"
        )
    if usage.blocks_per_multiprocessor < 1:
        faults.append(f"no block fits: {usage.registers} registers, {usage.shared_bytes} bytes of shared memory")
    wanted = []
    if usage.kernel.startswith("attention_mma"):
        wanted = ["cp.async", "ldmatrix", "mma"]
    elif usage.kernel.startswith(("attention_simt", "store_", "norm_", "gate_")):
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
        warps = usage.blocks_per_multiprocessor * usage.threads // 32
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
    log_size = int(str(checked(nvrtc.nvrtcGetProgramLogSize(program))))
    text = filled(nvrtc.nvrtcGetProgramLog, program, log_size).decode().strip("\0\n ")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS or text:
        raise RuntimeError(text or str(status))
    return filled(nvrtc.nvrtcGetCUBIN, program, int(str(checked(nvrtc.nvrtcGetCUBINSize(program)))))


def filled(getter: Callable[[object, bytes], object], program: object, size: int) -> bytes:
    """Return the `size` bytes that `getter` writes into the bytes object it is given, as the binding wants it.

    The object has room for more: Python shares one object among all bytes objects of length one, and an empty log has that length.
    """
    buffer = b" " * (size + 1)
    getter(program, buffer)
    return buffer[:size]


def examine(variant: Variant, architecture: str) -> list[Usage] | str:
    """Return what each kernel of a module needs, or what the compiler said against it."""
    versions = [metadata.version(package) for package in PACKAGES]
    key = hashlib.sha256("\0".join((variant.digest, *versions, Path(__file__).read_text())).encode()).hexdigest()[:16]
    kept = KEPT / f"{variant.name}-{architecture}-{key}.json"
    if kept.exists():
        return [Usage(**row) for row in json.loads(kept.read_text())]
    started = time.perf_counter()
    try:
        cubin = compile_cubin(variant, architecture)
    except RuntimeError as error:
        return str(error)
    found = _usages(variant, architecture, cubin, time.perf_counter() - started)
    if not found:
        return "cuobjdump names no kernel"
    KEPT.mkdir(parents=True, exist_ok=True)
    scratch = kept.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps([asdict(usage) for usage in found]))
    scratch.replace(kept)  # whole or not at all, whoever else writes it
    return found


def _usages(variant: Variant, architecture: str, cubin: bytes, seconds: float) -> list[Usage]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _dump("-res-usage", file.name)
        code = _dump("-sass", file.name)
    bodies = {body.split("\n", 1)[0].strip(): body for body in code.split("Function : ")[1:]}
    found = []
    for kernel, registers, stack in re.findall(r"Function (\w+):\s*REG:(\d+) STACK:(\d+)", usage):
        mix = {name: len(re.findall(pattern, bodies[kernel])) for name, pattern in MIX.items()}
        threads, shared = _launch_shape(variant, kernel)
        per_block = -(-int(registers) // 8) * 8 * threads
        blocks = min(
            MAX_BLOCKS,
            MAX_THREADS[architecture] // threads,
            REGISTERS // per_block,
            SHARED_BYTES[architecture] * 1024 // (shared + 1024),
        )
        cost = (int(registers), int(stack), threads, shared, blocks, round(seconds, 2))
        found.append(Usage(variant.name, kernel, architecture, *cost, mix))
    return found


def _translate(carriers: tuple[str, str], number: tuple[int, int]) -> list[str]:
    """Compile Numba's kernels to PTX and return what is wrong with them."""
    absent = numba_ptx.missing()
    if absent is not None:
        return [absent]
    try:
        return numba_ptx.faults(numba_ptx.compile_all(carriers, number), number)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:400]]


def _launch_shape(variant: Variant, kernel: str) -> tuple[int, int]:
    """Threads and bytes of shared memory of a block."""
    for group, is_decode in ((1, True), (4, True), (4, False)):
        if variant.head_size is not None:
            shape = attention_shape(variant, group, is_decode)
            if shape.kernel == kernel:
                return shape.threads, shape.shared_bytes
    return {"norm": 1024, "gate": 256}.get(kernel.rsplit("_", 1)[0], 128), 0


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
