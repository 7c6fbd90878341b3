"""Compiles kernel bodies and runs them on the threads that torch already has. Knows nothing of what a kernel computes.

Why not Numba's own pools: a step alternates torch operations and kernels every few tens of microseconds, on as many threads as there are
cores. A second pool then either sleeps (Numba's workqueue: 70 to 150 µs per launch on two cores) or spins against torch's pool (its omp
layer loads another copy of libgomp, where one is installed at all). torch's own libgomp has an entry point for any function, so kernels
share torch's pool: 2 µs per launch, one set of threads, one `OMP_NUM_THREADS`. Where torch is built without GNU OpenMP, Numba's prange
runs the same bodies.

Invariant: a launch owns its argument array, so overlapping launches from different threads cannot mix.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, njit, prange, types

from backends.numba_kernels.vectors import intrinsic, numba_config

BODY = types.void(types.int64)
_C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_C_SHORT_BODY = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

Body = Callable[[int], None]


@lru_cache(maxsize=1)
def source_key() -> int:
    """Return a number that changes with any source file of the kernels.

    Numba's disk cache looks at the time stamp of one file only, and wheels may carry constant time stamps; a body that captures this
    number is compiled anew when any of the files that it calls has changed.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:6], "big")


def compile_body(body: Any) -> Any:
    """Compile a body for one int64 argument, or load it from Numba's cache (`NUMBA_CACHE_DIR`, or beside the source)."""
    return cfunc(BODY, cache=True, nogil=True)(body)


@lru_cache(maxsize=1)
def _gnu_parallel() -> Any:
    """Return GOMP_parallel of the libgomp that torch has loaded; None without one."""
    folder = Path(torch.__file__).parent
    bundled = [*(folder / "lib").glob("libgomp*.so*"), *(folder.parent / "torch.libs").glob("libgomp*.so*")]
    for path in [*map(str, bundled), None]:
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


@intrinsic
def _call(typing_context: Any, body: Any, arguments: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        b.call(b.inttoptr(values[0], function.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(parallel=True, nogil=True, cache=True)
def _run_on_numba_threads(body: int, arguments: int, num_threads: int) -> None:
    for _ in prange(num_threads):
        _call(body, arguments)


def describe_threads() -> dict[str, str]:
    """Name the pool that launches use, its size, and where compiled code is kept."""
    shared = _gnu_parallel() is not None
    return {
        "threading_layer": "torch's GNU OpenMP pool" if shared else f"numba ({numba_config.THREADING_LAYER})",
        "threads": str(torch.get_num_threads()),
        "kernel_cache": numba_config.CACHE_DIR or "beside the sources, else in the user's cache folder",
    }


class Kernel:
    """A compiled body with its launchers. Arguments are int64; the item counter that bodies draw from is put before them."""

    def __init__(self, body: Any, num_arguments: int) -> None:
        """Compile `body`; it takes `num_arguments` numbers after the counter."""
        self._compiled = compile_body(body)  # owns the machine code that the address points to
        self._address = int(self._compiled.address)
        self._arguments = ctypes.c_int64 * (num_arguments + 1)
        self._alone = _C_BODY(self._address)
        self._short = _C_SHORT_BODY(self._address)
        self._parallel = _gnu_parallel()

    def launch(self, num_threads: int, *arguments: int) -> None:
        """Run on `num_threads` threads (the caller is one of them) and wait; the GIL is released meanwhile."""
        block = self._arguments(0, *arguments)
        if num_threads <= 1:
            self._alone(ctypes.addressof(block))
        elif self._parallel is not None:
            self._parallel(self._address, ctypes.addressof(block), num_threads, 0)
        else:
            _run_on_numba_threads(self._address, ctypes.addressof(block), num_threads)

    def run(self, *arguments: int) -> None:
        """Run on the calling thread and keep the GIL: for work of a few microseconds, where giving it away may cost milliseconds."""
        block = self._arguments(0, *arguments)
        self._short(ctypes.addressof(block))
