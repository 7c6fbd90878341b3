"""Worker threads of our own for compiled bodies: a launch never waits for a thread that has not come. Knows nothing of what is computed.

A barrier over a fixed team costs a scheduler's time slice (milliseconds) whenever one core of the team is taken by somebody else, and a
decode step has some two hundred launches. Here the launching thread publishes a job, draws items like any worker, and then waits only for
workers that are inside the job. Whoever is late finds the job closed.

The word STATE carries the whole protocol:

    | generation of the job (47 bits) | open (1) | workers inside (16) |

    publish  generation + 1, open, nobody inside
    join     compare-and-set to one more inside: fails if the job was closed or replaced since the worker looked, so what a worker reads
             of a job after joining (function, arguments) cannot be another job's, nor freed
    leave    one less inside
    close    clear "open"; then wait until nobody is inside

Waiting is short by spinning, then sleeps in a futex: an idle pool costs nothing, and a worker that lost its core in the middle of an item
can have the core of the thread that waits for it. Linux on x86-64 and ARM64 only.

Invariant: a worker touches a job's memory only while it is counted inside, and a launch returns only when nobody is.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from numba import njit, types

from backends.numba_kernels.atomics import (
    add,
    call,
    compare_and_set,
    current_processor,
    keep_bits,
    load,
    monotonic_ns,
    pause,
    store,
    system_call,
)
from backends.numba_kernels.compiling import compile_body, source_key
from backends.numba_kernels.vectors import read_int64, write_int64

# Longer than Python needs from one launch of a step to the next, shorter than anything that a person or a bill would notice.
SPIN_NS = 50_000
# Workers are inside for the rest of one item, which takes microseconds unless a worker lost its core: then the sooner ours is free, the better.
WAIT_NS = 20_000
JOIN_S = 5.0  # at exit; a worker leaves after the item under way
MAX_THREADS = 1 << 10

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # both with FUTEX_PRIVATE_FLAG
_GENERATION, _OPEN, _INSIDE = 17, 1 << 16, (1 << 16) - 1

# Byte offsets into the shared block. What is written at different times by different threads stands 128 bytes apart: two cache lines,
# because processors fetch lines in pairs.
_STATE = 0
_JOB_FUNCTION, _JOB_ARGUMENT, _JOB_WORKERS, _JOB_PROCESSOR = 128, 136, 144, 152
_WAKE = 256  # counts publications; workers sleep on its low half
_SLEEPERS = 384
_IS_WAITED = 512  # whether the launching thread sleeps on STATE
_OWNER = 640  # 1 while a launch is under way
_STOPS, _SYSCALL, _CLOCK, _PROCESSOR, _FUTEX, _SPIN = 768, 776, 784, 792, 800, 808  # hardly ever written
_BLOCK_BYTES = 896


@njit(nogil=True)
def _sleep(block: int, word: int, expected: int) -> None:
    system_call(load(block + _SYSCALL), load(block + _FUTEX), word, _FUTEX_WAIT, expected & 0xFFFFFFFF)


@njit(nogil=True)
def _wake(block: int, word: int, count: int) -> None:
    system_call(load(block + _SYSCALL), load(block + _FUTEX), word, _FUTEX_WAKE, count)


@njit(nogil=True)
def _has_place(block: int, state: int, last: int) -> bool:
    """Say whether `state` shows an open job other than `last`, with room for another worker."""
    return bool(state & _OPEN) and state >> _GENERATION != last and (state & _INSIDE) < load(block + _JOB_WORKERS)


@njit(nogil=True)
def _work(block: int) -> None:
    """Be a worker until the pool stops."""
    clock, processor, spin = load(block + _CLOCK), load(block + _PROCESSOR), load(block + _SPIN)
    last = 0  # the job that this worker was in
    until = monotonic_ns(clock) + spin
    turns = 0
    while load(block + _STOPS) == 0:
        state = load(block + _STATE)
        if _has_place(block, state, last):
            if compare_and_set(block + _STATE, state, state + 1):
                last = state >> _GENERATION
                call(load(block + _JOB_FUNCTION), load(block + _JOB_ARGUMENT))
                left = add(block + _STATE, -1) - 1
                if left & (_OPEN | _INSIDE) == 0 and load(block + _IS_WAITED):
                    _wake(block, block + _STATE, 1)
                until = monotonic_ns(clock) + spin
            continue
        pause()
        turns += 1
        if turns % 16:
            continue
        # With every core busy, the scheduler often wakes a worker where its waker runs: spinning there would only keep the launching thread.
        is_in_the_way = current_processor(processor) == load(block + _JOB_PROCESSOR)
        if is_in_the_way or monotonic_ns(clock) > until:
            # Read before looking at the job: one that is published after the look changes it, and the sleep does not begin.
            wake = load(block + _WAKE)
            add(block + _SLEEPERS, 1)
            if not _has_place(block, load(block + _STATE), last) and load(block + _STOPS) == 0:
                _sleep(block, block + _WAKE, wake)
            add(block + _SLEEPERS, -1)
            until = monotonic_ns(clock) + spin


@njit(nogil=True)
def _launch(block: int, function: int, argument: int, workers: int) -> None:
    """Run a job with the help of at most `workers` workers; alone if another launch has them."""
    if not compare_and_set(block + _OWNER, 0, 1):
        call(function, argument)
        return
    _share(block, function, argument, workers)
    store(block + _OWNER, 0)


@njit(nogil=True)
def _share(block: int, function: int, argument: int, workers: int) -> None:
    """Run a job with the workers that come; for the owner of the pool."""
    store(block + _JOB_FUNCTION, function)
    store(block + _JOB_ARGUMENT, argument)
    store(block + _JOB_WORKERS, workers)
    store(block + _JOB_PROCESSOR, current_processor(load(block + _PROCESSOR)))
    generation = (load(block + _STATE) >> _GENERATION) + 1
    store(block + _STATE, generation << _GENERATION | _OPEN)
    add(block + _WAKE, 1)
    if load(block + _SLEEPERS) > 0:
        _wake(block, block + _WAKE, workers)
    call(function, argument)
    state = keep_bits(block + _STATE, ~_OPEN) & ~_OPEN
    if state & _INSIDE:
        _wait(block)


@njit(nogil=True)
def _replay(block: int, operations: int, num_operations: int, patches: int, num_patches: int, rows: int) -> None:
    """Run a program of `recording` for `rows` rows: one job after the other, each as `_launch` would run it."""
    for index in range(num_patches):
        patch = patches + index * 24
        write_int64(read_int64(patch), rows * read_int64(patch + 8) + read_int64(patch + 16))
    is_owner = compare_and_set(block + _OWNER, 0, 1)
    for index in range(num_operations):
        operation = operations + index * 32
        function, arguments, threads = read_int64(operation), read_int64(operation + 8), read_int64(operation + 16)
        write_int64(arguments, 0)  # the counter that items are drawn from
        if threads > 1 and is_owner and rows >= read_int64(operation + 24):
            _share(block, function, arguments, threads - 1)
        else:
            call(function, arguments)
    if is_owner:
        store(block + _OWNER, 0)


@njit(nogil=True)
def _wait(block: int) -> None:
    """Wait until nobody is inside the closed job."""
    clock = load(block + _CLOCK)
    until = monotonic_ns(clock) + WAIT_NS
    turns = 0
    while load(block + _STATE) & _INSIDE:
        pause()
        turns += 1
        if turns % 16 == 0 and monotonic_ns(clock) > until:
            store(block + _IS_WAITED, 1)
            state = load(block + _STATE)  # after the flag: a worker that leaves from now on sees it
            if state & _INSIDE:
                _sleep(block, block + _STATE, state)
            store(block + _IS_WAITED, 0)


@njit(nogil=True)
def _stop(block: int) -> None:
    """Make the workers leave their loop."""
    store(block + _STOPS, 1)
    add(block + _WAKE, 1)
    _wake(block, block + _WAKE, MAX_THREADS)


@lru_cache(maxsize=1)
def _compiled() -> tuple[Any, Any, Any, Any]:
    """Compile the parts of the worker, of the launching thread (two) and of whoever stops them, or load them from the cache."""
    key = source_key()

    def pool_worker(block: int) -> None:
        if key:
            _work(block)

    def pool_launch(block: int, function: int, argument: int, workers: int) -> None:
        if key:
            _launch(block, function, argument, workers)

    def pool_replay(
        block: int, operations: int, num_operations: int, patches: int, num_patches: int, rows: int
    ) -> None:
        if key:
            _replay(block, operations, num_operations, patches, num_patches, rows)

    def pool_stop(block: int) -> None:
        if key:
            _stop(block)

    return (
        compile_body(pool_worker),
        compile_body(pool_launch, types.void(*[types.int64] * 4)),
        compile_body(pool_replay, types.void(*[types.int64] * 6)),
        compile_body(pool_stop),
    )


class WorkerPool:
    """Daemon threads that sleep until a launch, of this process only. Grows to the largest launch; safe to use from any thread."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._code = _compiled()  # owns the machine code
        self._processors: tuple[int, ...] = ()
        worker, launch, replay, stop = self._code
        self._work = ctypes.CFUNCTYPE(None, ctypes.c_int64)(worker.address)
        self._launch = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(launch.address)
        self._replay = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(replay.address)
        self._stop = ctypes.CFUNCTYPE(None, ctypes.c_int64)(stop.address)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the threads: a forked child has none of them, and a block in whatever state they were leaving it in."""
        self._memory = ctypes.create_string_buffer(_BLOCK_BYTES + 127)
        self._block = (ctypes.addressof(self._memory) + 127) // 128 * 128
        libc = ctypes.CDLL(None)
        for offset, value in (
            (_SYSCALL, ctypes.cast(libc.syscall, ctypes.c_void_p).value),
            (_CLOCK, ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value),
            (_PROCESSOR, ctypes.cast(libc.sched_getcpu, ctypes.c_void_p).value),
            (_FUTEX, _FUTEX_NUMBERS[platform.machine()]),
            (_SPIN, SPIN_NS),
        ):
            assert value is not None
            ctypes.c_int64.from_address(self._block + offset).value = value
        self._growing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    @property
    def num_workers(self) -> int:
        """How many threads there are beside the launching one."""
        return len(self._threads)

    def launch(self, function: int, argument: int, num_threads: int) -> None:
        """Call the function at address `function` with `argument` on this thread and at most `num_threads` - 1 others at a time; return when all have.

        The GIL is released meanwhile. A function that shares its work out by an atomic counter has then done all of it, however many came.
        """
        if num_threads > len(self._threads) + 1:
            self._grow(num_threads)
        self._launch(self._block, function, argument, num_threads - 1)

    def replay(
        self, operations: int, num_operations: int, patches: int, num_patches: int, rows: int, num_threads: int
    ) -> None:
        """Run a program of `recording` (its arrays by address) for `rows` rows, on at most `num_threads` threads, and return when it is done."""
        if num_threads > len(self._threads) + 1:
            self._grow(num_threads)
        self._replay(self._block, operations, num_operations, patches, num_patches, rows)

    def stop(self) -> None:
        """End the workers and wait for them; later launches run alone."""
        with self._growing:
            self._is_stopped = True
            self._stop(self._block)
            for thread in self._threads:
                thread.join(JOIN_S)

    def pin(self, processors: Sequence[int]) -> None:
        """Bind the workers, present and future ones, to these processors in turn; none leaves them where they are."""
        with self._growing:
            if self._is_stopped:
                return
            self._processors = tuple(processors)
            for index in range(len(self._threads)):
                self._bind(index)

    def _bind(self, index: int) -> None:
        thread = self._threads[index].native_id
        if self._processors and thread is not None:
            os.sched_setaffinity(thread, {self._processors[index % len(self._processors)]})

    def _grow(self, num_threads: int) -> None:
        with self._growing:
            if self._is_stopped:
                return
            for index in range(len(self._threads) + 1, min(num_threads, MAX_THREADS)):
                thread = threading.Thread(target=self._be_worker, name=f"looseleaf-kernel-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
                self._bind(index - 1)

    def _be_worker(self) -> None:
        """Keep this pool, and with it the block and the code, for as long as the thread uses them."""
        self._work(self._block)


@lru_cache(maxsize=1)
def worker_pool() -> WorkerPool | None:
    """Return the pool that all kernels of this process share; None where the system has no futex that we know."""
    if sys.platform != "linux" or platform.machine() not in _FUTEX_NUMBERS:
        return None
    pool = WorkerPool()
    os.register_at_fork(after_in_child=pool.begin_anew)
    # Before the interpreter takes the machine code away from under a spinning worker.
    atexit.register(pool.stop)
    return pool
