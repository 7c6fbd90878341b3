"""Processors in the order in which threads take them, and what binding does to the threads of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.numba_kernels.pool import worker_pool
from backends.processors import by_core

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("siblings", "wanted"),
    [
        ({0: "0", 1: "1", 2: "2"}, [0, 1, 2]),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, [0, 2, 1, 3]),
        ({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, [0, 1, 4, 5]),
        ({3: "1,3", 2: "0,2"}, [2, 3]),  # the process may not use the others
    ],
)
def test_the_first_processors_share_no_core(siblings: dict[int, str], wanted: list[int]) -> None:
    assert by_core(siblings, siblings.__getitem__) == wanted


def test_a_machine_that_does_not_tell_its_cores_is_taken_as_it_is() -> None:
    assert by_core([1 << 20, 1 << 19]) == [1 << 19, 1 << 20]


@pytest.mark.skipif(worker_pool() is None, reason="the pool is for Linux on x86-64 and ARM64")
def test_binding_takes_the_calling_thread_and_the_workers_and_no_other() -> None:
    code = """
import os, threading, torch
from backends.numba_kernels.pool import worker_pool
from backends.numba_linear import PackedLinear
from backends.processors import by_core, pin_compute_threads
torch.set_num_threads(3)
allowed = os.sched_getaffinity(0)
linear, x = PackedLinear(torch.randn(640, 64).bfloat16()), torch.randn(3, 64).bfloat16()
wanted = linear(x)
result = []
def step():
    result.extend(pin_compute_threads())
    for _ in range(50):
        assert torch.equal(linear(x), wanted)
    result.append(os.sched_getaffinity(0))
thread = threading.Thread(target=step)
thread.start()
thread.join()
order = by_core(allowed)
assert result == [*order, {order[0]}], result
turns = [*order[1:], order[0]]
for index, worker in enumerate(worker_pool()._threads):
    assert os.sched_getaffinity(worker.native_id) == {turns[index % len(turns)]}
assert os.sched_getaffinity(0) == allowed
print("right")
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.strip() == "right", result.stderr
