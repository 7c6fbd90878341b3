"""Runs compiled kernel bodies on threads, as many as torch uses. Knows nothing of what a kernel computes.

Why not somebody else's threads: every launch on torch's pool (GNU OpenMP) waits for the whole team, so that one other busy process turns
10 µs into a time slice; Numba's workqueue takes 70 to 150 µs per launch on two cores. `pool` has the answer for Linux; elsewhere Numba's
prange runs the same bodies.

Invariant: a launch owns its argument array, so overlapping launches from different threads cannot mix.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from numba import njit, prange

from backends.numba_kernels.atomics import call
from backends.numba_kernels.compiling import compile_body
from backends.numba_kernels.pool import worker_pool
from backends.numba_kernels.vectors import numba_config

_C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_C_SHORT_BODY = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@njit(parallel=True, nogil=True, cache=True)
def _run_on_numba_threads(body: int, arguments: int, num_threads: int) -> None:
    for _ in prange(num_threads):
        call(body, arguments)


def describe_threads() -> dict[str, str]:
    """Name the pool that launches use, its size, and where compiled code is kept."""
    return {
        "threading_layer": "own workers, asleep when idle"
        if worker_pool() is not None
        else f"numba ({numba_config.THREADING_LAYER})",
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
        self._pool = worker_pool()

    def launch(self, num_threads: int, *arguments: int) -> None:
        """Run on `num_threads` threads (the caller is one of them) and wait; the GIL is released meanwhile."""
        block = self._arguments(0, *arguments)
        if num_threads <= 1:
            self._alone(ctypes.addressof(block))
        elif self._pool is not None:
            self._pool.launch(self._address, ctypes.addressof(block), num_threads)
        else:
            _run_on_numba_threads(self._address, ctypes.addressof(block), num_threads)

    def run(self, *arguments: int) -> None:
        """Run on the calling thread and keep the GIL: for work of a few microseconds, where giving it away may cost milliseconds."""
        block = self._arguments(0, *arguments)
        self._short(ctypes.addressof(block))
