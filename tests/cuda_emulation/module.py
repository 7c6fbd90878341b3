"""`EmulatedModule`: what CuPy's `RawModule` is on a GPU, for a kernel source compiled by g++ and run thread by thread on the CPU.

Not fast, and blind to speed, bank conflicts and memory ordering between blocks. What it finds is listed in runtime.cpp.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from backends.kernels.launch import Launch
from backends.kernels.variants import SOURCES, Variant, expand

HERE = Path(__file__).parent
_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(')


class EmulationError(RuntimeError):
    """A kernel did something that a GPU forbids, or that only works there by luck."""


def missing() -> str | None:
    """Return why kernels cannot be emulated on this machine, or None."""
    if os.uname().machine != "x86_64":
        return f"the emulation switches stacks in x86-64 assembly, this is {os.uname().machine}"
    return None if shutil.which("g++") else "g++ is not installed"


def cache_folder() -> Path:
    """Return where compiled kernels are kept between runs, by content."""
    return Path(
        os.environ.get("LOOSELEAF_EMULATION_CACHE", Path(tempfile.gettempdir()) / f"looseleaf-emulation-{os.getuid()}")
    )


class EmulatedModule:
    """The kernels of one variant. `sources` is another folder of sources, for seeded faults; `sanitizer` "thread" or "address"."""

    def __init__(self, variant: Variant, sources: Path = SOURCES, sanitizer: str | None = None) -> None:
        """Compile, or load what an earlier run compiled from the same text. Raises `EmulationError` with g++'s words."""
        self.variant = variant
        text = expand(variant.source, sources)
        self.names = _KERNEL.findall(text)
        self._library = ctypes.CDLL(str(_compiled(variant, sources, text, self.names, sanitizer)))

    def get_function(self, name: str) -> EmulatedFunction:
        """Return a kernel by name, callable as CuPy's are."""
        if name not in self.names:
            raise EmulationError(f"no kernel {name} in {self.variant.source}; it has {', '.join(self.names)}")
        return EmulatedFunction(self._library, name)

    def run(self, launch: Launch, seed: int = 0, memory: Sequence[Tensor] = ()) -> None:
        """Run a described launch. With `memory`, 16-byte and `__ldg` loads outside these tensors are errors."""
        self.get_function(launch.kernel)(launch.grid, launch.block, launch.arguments, launch.shared_bytes, seed, memory)


class EmulatedFunction:
    """One kernel."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        """Find the kernel's entry and the sizes of its parameters."""
        self.name = name
        self._library = library
        self._entry = getattr(library, f"entry_{name}")
        self._entry.restype = ctypes.c_char_p
        sizes = (ctypes.c_uint * 64)()
        count = getattr(library, f"sizes_{name}")(sizes)
        self._sizes = list(sizes[:count])

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[np.generic],
        shared_mem: int = 0,
        seed: int = 0,
        memory: Sequence[Tensor] = (),
    ) -> None:
        """Run the grid. Raises `EmulationError` for wrong arguments and for what the runtime reports."""
        sizes = [argument.dtype.itemsize for argument in args]
        if sizes != self._sizes:
            raise EmulationError(f"{self.name}: arguments of {sizes} bytes, the kernel's parameters have {self._sizes}")
        values = [np.array(argument) for argument in args]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in values))
        extents = [(ctypes.c_uint * 3)(*(*shape, 1, 1)[:3]) for shape in (grid, block)]
        self._library.forget_regions()
        for tensor in memory:
            storage = tensor.untyped_storage()
            self._library.allow_region(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))
        error = self._entry(*extents, ctypes.c_size_t(shared_mem), ctypes.c_uint(seed), pointers)
        if error is not None:
            raise EmulationError(f"{self.name}: {error.decode()}")


def _compiled(variant: Variant, sources: Path, text: str, names: Sequence[str], sanitizer: str | None) -> Path:
    signature = "const unsigned* g, const unsigned* b, size_t s, unsigned seed, void** a"
    entries = [
        f'extern "C" const char* entry_{name}({signature}) {{ return emulated::run({name}, g, b, s, seed, a); }}\n'
        f'extern "C" unsigned sizes_{name}(unsigned* out) {{ return emulated::sizes({name}, out); }}'
        for name in names
    ]
    runtime = _runtime(sanitizer)
    flags = ["-O1", "-std=c++17", "-g1", "-fPIC", "-w", "-shared", "-DEMULATION", *variant.defines]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    header = (HERE / "emulation.h").read_text()
    source = "\n".join([f'#include "{sources / variant.source}"', *entries, ""])

    def build(target: Path) -> None:
        unit = target.with_suffix(".cpp")
        unit.write_text(source)
        _compile([*flags, f"-I{HERE}", f"-I{sources}", str(unit), str(runtime), "-o", str(target)])

    return _cached(f"{variant.name}.so", (text, header, runtime.name, *entries, *flags), build)


def _runtime(sanitizer: str | None) -> Path:
    """Return the runtime's object file; it is the same for every kernel, and never instrumented."""
    source = HERE / "runtime.cpp"
    flags = ["-DEMULATION_TSAN"] if sanitizer == "thread" else []
    parts = (source.read_text(), (HERE / "emulation.h").read_text(), *flags)
    command = ["-O2", "-std=c++17", "-fPIC", "-w", "-c", f"-I{HERE}", str(source)]
    return _cached("runtime.o", parts, lambda target: _compile([*command, *flags, "-o", str(target)]))


def _cached(name: str, parts: Sequence[str], build: Callable[[Path], None]) -> Path:
    """Return the file that was built from `parts`, building it if this is the first time."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    file = folder / f"{key}-{name}"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            build(built)
            built.rename(file)  # another process may have been faster; the content is the same
    return file


def _compile(arguments: Sequence[str]) -> None:
    result = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise EmulationError(f"g++ failed:\n{result.stderr[:4000]}")
