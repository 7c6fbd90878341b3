"""Runs compiled kernel bodies on threads, as many as torch uses. Knows nothing of what a kernel computes.

Why not somebody else's threads: every launch on torch's pool (GNU OpenMP) waits for the whole team, so that one other busy process turns
10 µs into a time slice; Numba's workqueue takes 70 to 150 µs per launch on two cores. `pool` has the answer for Linux; elsewhere Numba's
prange runs the same bodies.

Invariant: a launch owns its argument array, so overlapping launches from different threads cannot mix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from numba import njit, prange
from torch import Tensor

from backends.numba_kernels.atomics import call
from backends.numba_kernels.compiling import compile_body
from backends.numba_kernels.pool import worker_pool
from backends.numba_kernels.recording import Launch, Program, record, recorded_launches
from backends.numba_kernels.vectors import numba_config

# Elements under which a second thread costs more than it saves.
PARALLEL_WORK = 1 << 15
# The same in a replay, where a launch that no worker comes to costs 0.15 us: a few microseconds of work.
REPLAYED_PARALLEL_WORK = 1 << 13

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
        self.name = body.__name__
        self._arguments = ctypes.c_int64 * (num_arguments + 1)
        self._alone = _C_BODY(self._address)
        self._short = _C_SHORT_BODY(self._address)
        self._pool = worker_pool()

    def start(self, work: int, *arguments: int) -> None:
        """Run here and at once for a little work, counted in elements, and on as many threads as torch uses for more."""
        launches = recorded_launches()
        if launches is not None:
            launches.append(Launch(self.name, self._address, arguments, torch.get_num_threads(), work))
        elif work < PARALLEL_WORK:
            self.run(*arguments)
        else:
            self.launch(torch.get_num_threads(), *arguments)

    def launch(self, num_threads: int, *arguments: int) -> None:
        """Run on `num_threads` threads (the caller is one of them) and wait; the GIL is released meanwhile."""
        launches = recorded_launches()
        if launches is not None:
            launches.append(Launch(self.name, self._address, arguments, num_threads, None))
            return
        block = self._arguments(0, *arguments)
        if num_threads <= 1:
            self._alone(ctypes.addressof(block))
        elif self._pool is not None:
            self._pool.launch(self._address, ctypes.addressof(block), num_threads)
        else:
            _run_on_numba_threads(self._address, ctypes.addressof(block), num_threads)

    def run(self, *arguments: int) -> None:
        """Run on the calling thread and keep the GIL: for work of a few microseconds, where giving it away may cost milliseconds."""
        launches = recorded_launches()
        if launches is not None:
            launches.append(Launch(self.name, self._address, arguments, 1, None))
            return
        block = self._arguments(0, *arguments)
        self._short(ctypes.addressof(block))


class RecordedKernels:
    """A function recorded once (see `recording`) and replayed for any number of rows up to `max_rows`. One replay at a time."""

    def __init__(self, function: Callable[[int], Tensor], max_rows: int) -> None:
        """Record `function`; raises `NotReplayable`."""
        self.num_threads = torch.get_num_threads()  # a recording is for so many
        self._program = record(function, max_rows, REPLAYED_PARALLEL_WORK)
        self._pool = worker_pool()

    @property
    def program(self) -> Program:
        """What was recorded."""
        return self._program

    def replay(self, rows: int) -> Tensor:
        """Do what the function did, for its first `rows` rows; the result is valid until the next replay."""
        program = self._program
        if not 1 <= rows <= program.max_rows:
            raise ValueError(f"{rows} rows; the recording is for 1 to {program.max_rows}")
        if self._pool is not None:
            operations, patches = program.operations, program.patches
            self._pool.replay(
                operations.ctypes.data, len(operations), patches.ctypes.data, len(patches), rows, self.num_threads
            )
        else:
            _replay_on_numba_threads(program, rows)
        return program.output[:rows]


def _replay_on_numba_threads(program: Program, rows: int) -> None:
    """Walk the program in Python: where there is no pool of ours."""
    for place, slope, base in program.patches.tolist():
        ctypes.c_int64.from_address(place).value = rows * slope + base
    for function, arguments, threads, from_rows in program.operations.tolist():
        ctypes.c_int64.from_address(arguments).value = 0
        if threads > 1 and rows >= from_rows:
            _run_on_numba_threads(function, arguments, threads)
        else:
            _C_BODY(function)(arguments)
