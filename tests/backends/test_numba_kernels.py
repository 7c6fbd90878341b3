"""What the parity matrix cannot see: other processors, other thread pools, and the cache of compiled code."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from backends.kv_cache import KVCacheSpec
from backends.numba_cpu import NumbaCpuBackend
from backends.numba_kernels.attention import attend_kernel
from backends.numba_kernels.vectors import keep
from tests.backends.steps import Shape, attend, make_step

SHAPE = Shape(6, 2, 64, 16)

OTHER_PROCESSOR = """
import torch
from backends.numba_kernels import vectors
assert not vectors.HAS_WIDE and not vectors.HAS_BF16_DOT and vectors.HAS_FMA and vectors.MAX_ROWS == 3
from backends.numba_cpu import NumbaCpuBackend
from backends.numba_ops import PackedLinear
from tests.backends.steps import TOLERANCE, Shape, assert_rows_agree, attend, expected, make_step
torch.manual_seed(0)
step = make_step(Shape(6, 2, 64, 16), [(1, 40), (33, 50), (1, 1), (1, 1500)], torch.bfloat16)
layer = step.layer(window=30)
out, _ = attend(NumbaCpuBackend(), step, layer)
assert_rows_agree(out, expected(step, layer)[0], TOLERANCE[torch.bfloat16])
weight, x = torch.randn(80, 64).bfloat16(), torch.randn(7, 64).bfloat16()
assert_rows_agree(PackedLinear(weight)(x), x.double() @ weight.double().T, TOLERANCE[torch.bfloat16])
print("right")
"""


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_a_processor_without_wide_vectors_computes_the_same(tmp_path: Path) -> None:
    """Kernels follow feature flags: with AVX2 alone, 16 lanes are two registers and bfloat16 is widened to float32."""
    flags = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
    assert run_python(OTHER_PROCESSOR, NUMBA_CACHE_DIR=str(tmp_path), **flags) == "right"


def test_without_the_worker_pool_numbas_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(SHAPE, [(1, 700), (90, 90)], torch.float32)
    backend = NumbaCpuBackend()
    wanted, _ = attend(backend, step, step.layer())
    before = torch.get_num_threads()
    monkeypatch.setattr(attend_kernel(False), "_pool", None)
    try:
        torch.set_num_threads(2)
        assert torch.equal(attend(backend, step, step.layer())[0], wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_of_one_step_serve_another_whose_header_is_copied_into_its_own(dtype: torch.dtype) -> None:
    """What changes from step to step reaches the kernels through the header alone: counts, tables, slots, splits and padding."""
    backend = NumbaCpuBackend()
    recorded = make_step(SHAPE, [(1, 20)], dtype)
    plan = backend.plan(recorded.meta, [recorded.layer()])
    for sequences, spare_rows in (([(1, 3000)], 0), ([(1, 40), (70, 300), (1, 700)], 5), ([(1, 20)], 0), ([], 2)):
        step = make_step(SHAPE, sequences, dtype, spare_rows=spare_rows)
        wanted, wanted_lse = attend(backend, step, step.layer())
        step = make_step(SHAPE, sequences, dtype, spare_rows=spare_rows)  # its own keys are not stored yet
        later = backend.plan(step.meta, [step.layer()])
        plan.header[:] = later.header
        out, lse = torch.full_like(wanted, torch.nan), torch.full_like(wanted_lse, torch.nan)
        backend.store_kv(step.k, step.v, step.layer(), plan)
        backend.run(step.q, step.layer(), plan, out, lse)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)


def test_preparing_names_what_is_compiled() -> None:
    said: list[str] = []
    NumbaCpuBackend().prepare(KVCacheSpec(1, 6, 2, 64, 16, torch.float32), said.append)
    assert [line.partition(": ")[2] for line in said] == [
        "attention",
        "key and value writes",
    ]


def test_the_thread_pool_and_the_vectors_are_reported() -> None:
    facts = NumbaCpuBackend().describe()
    assert {"threading_layer", "threads", "vectors", "bfloat16", "kernel_cache"} <= facts.keys()
    assert "workers" in facts["threading_layer"] or "numba" in facts["threading_layer"]


def test_compiled_code_is_kept_where_the_environment_says(tmp_path: Path) -> None:
    code = "from backends.numba_kernels.storing import store_kernel; store_kernel()"
    run_python(code, NUMBA_CACHE_DIR=str(tmp_path))
    kept = {path.name for path in tmp_path.rglob("*.nb[ci]")}
    assert any("store_rows" in name for name in kept)
    run_python(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert {path.name for path in tmp_path.rglob("*.nb[ci]")} == kept  # the second process loaded it


def test_launches_from_two_threads_at_once_do_not_mix() -> None:
    """A launch owns its item counter and arguments; nothing of it is shared through the kernel."""
    backend = NumbaCpuBackend()
    steps = [make_step(SHAPE, sequences, torch.float32) for sequences in ([(1, 300)] * 8, [(40, 90), (1, 1300)])]
    layers = [step.layer() for step in steps]
    alone = [attend(backend, step, layer)[0] for step, layer in zip(steps, layers, strict=True)]

    def repeat(which: int) -> bool:
        return all(torch.equal(attend(backend, steps[which], layers[which])[0], alone[which]) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(repeat, [0, 1]))


def test_a_kept_array_is_not_freed_while_its_address_is_in_use() -> None:
    """Compiled code frees an array after the block of its last use: without `keep`, an array of a later block lies where it was."""

    @njit
    def overlaps(rounds: int) -> bool:
        first = np.empty(4096, np.uint8)
        address = first.ctypes.data
        result = False
        for _ in range(rounds):
            second = np.empty(4096, np.uint8)
            result = result or address == second.ctypes.data
        keep(first)
        return result

    assert not overlaps(3)
