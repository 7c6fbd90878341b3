"""The worker pool: every item once, whoever comes; nobody inside when a launch returns; asleep when idle; whole after a fork, gone at exit."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from numba import njit

from backends.numba_kernels.atomics import add, load, monotonic_ns, pause
from backends.numba_kernels.compiling import compile_body
from backends.numba_kernels.pool import WorkerPool, worker_pool
from backends.numba_kernels.threads import describe_threads
from backends.numba_kernels.vectors import take_next
from backends.numba_linear import PackedLinear
from backends.torch_threads import calling_thread_only

pytestmark = pytest.mark.skipif(worker_pool() is None, reason="the pool is for Linux on x86-64 and ARM64")

ITEMS = 40
Words = ctypes.Array[ctypes.c_int64]


@njit(nogil=True)
def _count_items(arguments: int) -> None:
    """Add one to the word of each item. Arguments: counter, number of items, address of their words."""
    while True:
        item = take_next(arguments)
        if item >= load(arguments + 8):
            break
        add(load(arguments + 16) + item * 8, 1)


@njit(nogil=True)
def _meet(arguments: int) -> None:
    """Come in, wait until `wanted` are in or the time is over, stay a little, go. Arguments: counter (of who came), gone, wanted, clock."""
    take_next(arguments)
    clock = load(arguments + 24)
    until = monotonic_ns(clock) + 1_000_000
    while load(arguments) < load(arguments + 16) and monotonic_ns(clock) < until:
        pause()
    for _ in range(100):
        pause()
    add(arguments + 8, 1)


@njit(nogil=True)
def _stay(arguments: int) -> None:
    """Say that one is in, and stay until told to go. Arguments: counter (of who came), whether to go."""
    take_next(arguments)
    while load(arguments + 8) == 0:
        pause()


class Bodies:
    """The compiled bodies, by address."""

    def __init__(self) -> None:
        def count_items(arguments: int) -> None:
            _count_items(arguments)

        def meet(arguments: int) -> None:
            _meet(arguments)

        def stay(arguments: int) -> None:
            _stay(arguments)

        self._compiled = [compile_body(body) for body in (count_items, meet, stay)]
        self.count_items, self.meet, self.stay = (int(body.address) for body in self._compiled)


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    return Bodies()


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.stop()


def words(*values: int) -> Words:
    return (ctypes.c_int64 * len(values))(*values)


def count_launches(pool: WorkerPool, bodies: Bodies, launches: int, most_threads: int) -> None:
    """Launch with random numbers of threads; check that each item was done once per launch, and that nothing touched a past launch.

    After a launch its arguments are rewritten so that whoever came too late would find items to do, in words that must stay zero.
    """
    chance = random.Random(launches)
    done, forbidden = words(*[0] * ITEMS), words(*[0] * ITEMS)
    blocks = [words(0, 0, 0) for _ in range(16)]
    for number in range(launches):
        block = blocks[number % len(blocks)]
        block[:] = [0, ITEMS, ctypes.addressof(done)]
        pool.launch(bodies.count_items, ctypes.addressof(block), chance.randint(2, most_threads))
        block[:] = [0, ITEMS, ctypes.addressof(forbidden)]
    assert list(done) == [launches] * ITEMS
    assert list(forbidden) == [0] * ITEMS


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_item_is_done_once_however_many_threads_come(pool: WorkerPool, bodies: Bodies) -> None:
    count_launches(pool, bodies, launches=10_000, most_threads=2)
    assert pool.num_workers == 1


def test_more_threads_than_cores_do_every_item_once(pool: WorkerPool, bodies: Bodies) -> None:
    count_launches(pool, bodies, launches=5_000, most_threads=8)
    assert pool.num_workers == 7


@pytest.mark.slow
def test_two_hundred_thousand_launches_do_every_item_once(pool: WorkerPool, bodies: Bodies) -> None:
    count_launches(pool, bodies, launches=200_000, most_threads=8)


def test_nobody_is_inside_when_a_launch_returns(pool: WorkerPool, bodies: Bodies) -> None:
    """Workers that came are waited for, by spinning or asleep; those that did not come are not."""
    clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
    assert clock is not None
    met = 0
    for _ in range(300):
        block = words(0, 0, 3, clock)
        pool.launch(bodies.meet, ctypes.addressof(block), 3)
        came, gone = block[0], block[1]
        assert came == gone
        assert 1 <= came <= 3
        met += came > 1
    assert met > 0  # else this has seen no worker at all


def test_a_launch_takes_no_more_workers_at_a_time_than_it_asked_for(pool: WorkerPool, bodies: Bodies) -> None:
    count_launches(pool, bodies, launches=100, most_threads=6)
    assert pool.num_workers > 2
    held = words(0, 0)
    with ThreadPoolExecutor(1) as caller:
        future = caller.submit(pool.launch, bodies.stay, ctypes.addressof(held), 2)
        try:
            deadline = time.monotonic() + 60
            while held[0] < 2:
                assert time.monotonic() < deadline, "no worker came"
            sum(range(1_000_000))  # time for the others
            assert held[0] == 2
        finally:
            held[1] = 1
        future.result()


def test_launches_from_two_threads_do_not_mix(pool: WorkerPool, bodies: Bodies) -> None:
    with ThreadPoolExecutor(2) as callers:
        for future in [callers.submit(count_launches, pool, bodies, 5_000 + i, 4) for i in range(2)]:
            future.result()


def test_a_launch_beside_another_one_does_not_wait_for_it(pool: WorkerPool, bodies: Bodies) -> None:
    held = words(0, 0)
    with ThreadPoolExecutor(1) as caller:
        future = caller.submit(pool.launch, bodies.stay, ctypes.addressof(held), 2)
        try:
            while held[0] == 0:
                assert not future.done()
            count_launches(pool, bodies, launches=100, most_threads=4)
            assert not future.done()
        finally:
            held[1] = 1
        future.result()


def test_an_idle_worker_sleeps_and_uses_no_processor_time(pool: WorkerPool, bodies: Bodies) -> None:
    count_launches(pool, bodies, launches=10, most_threads=3)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("looseleaf-kernel")]
    deadline = time.monotonic() + 60
    while any(state_of(thread) != "S" for thread in workers):
        assert time.monotonic() < deadline, "a worker does not fall asleep"
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in workers if thread.ident is not None]
    before = [time.clock_gettime(clock) for clock in clocks]
    sum(range(1_000_000))  # longer than any wait by spinning
    assert [time.clock_gettime(clock) for clock in clocks] == before


def state_of(thread: threading.Thread) -> str:
    """Return Linux's letter for what a thread does."""
    status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return status.rsplit(")", 1)[1].split()[0]


def test_a_stopped_pool_has_no_threads_and_launches_run_alone(bodies: Bodies) -> None:
    pool = WorkerPool()
    count_launches(pool, bodies, launches=100, most_threads=4)
    before = threading.active_count()
    pool.stop()
    assert threading.active_count() == before - 3
    count_launches(pool, bodies, launches=100, most_threads=8)
    assert threading.active_count() == before - 3


WORK = """
import os, sys, threading
import torch
from backends.numba_kernels.pool import worker_pool
from backends.numba_linear import PackedLinear
torch.set_num_threads(2)
torch.manual_seed(0)
linear, x = PackedLinear(torch.randn(640, 64).bfloat16()), torch.randn(3, 64).bfloat16()
y = linear(x)
def check(times):
    for _ in range(times):
        assert torch.equal(linear(x), y)
    assert worker_pool().num_workers == 1
check(50)
"""


def test_a_forked_child_gets_workers_of_its_own() -> None:
    code = """
    child = os.fork()
    check(50)
    if child == 0:
        sys.exit(7)  # by way of everything that runs at exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check(50)
    print("right")
    """
    assert run_python(WORK + textwrap.dedent(code)) == "right"


def test_the_interpreter_ends_cleanly_while_workers_spin_and_launches_run() -> None:
    """The thread launches without torch, whose own operations may not outlive the interpreter."""
    code = """
    from backends.numba_kernels.linear import linear_kernel
    def launch():
        while True:
            linear_kernel(False).launch(2, 0, 0, 0, 0, 0, 0, 0, 32, 1, 2, 0)  # no rows
    threading.Thread(target=launch, daemon=True).start()
    check(50)
    print("right")
    """
    for _ in range(3):
        assert run_python(WORK + textwrap.dedent(code)) == "right"


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_linear_gives_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    linear, x = PackedLinear(torch.randn(1040, 128).bfloat16()), torch.randn(20, 128).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x)
        torch.set_num_threads(threads)
        assert all(torch.equal(linear(x), alone) for _ in range(50))
    finally:
        torch.set_num_threads(before)


def test_the_pool_and_its_size_are_reported() -> None:
    facts = describe_threads()
    assert "workers" in facts["threading_layer"]
    assert facts["threads"] == str(torch.get_num_threads())


def test_torch_gets_its_threads_back_after_work_on_the_calling_thread() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with calling_thread_only():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError), calling_thread_only():
            _ = 1 // 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_pool_binds_its_present_and_future_workers(pool: WorkerPool, bodies: Bodies) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    count_launches(pool, bodies, launches=10, most_threads=2)
    pool.pin([allowed[-1], allowed[0]])
    count_launches(pool, bodies, launches=50, most_threads=4)
    workers = [thread for thread in pool._threads if thread.native_id is not None]
    assert len(workers) > 1
    bound = [os.sched_getaffinity(thread.native_id) for thread in workers if thread.native_id is not None]
    assert bound == [{(allowed[-1], allowed[0])[index % 2]} for index in range(len(workers))]
    assert sorted(os.sched_getaffinity(0)) == allowed
