"""What the parity matrix cannot see: other processors, other thread pools, and the cache of compiled code."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from backends import numba_cpu
from backends.kv_cache import KVCacheSpec
from backends.numba_cpu import NumbaCpuBackend
from backends.numba_kernels.attention import DIRECT_ROWS, attend_kernel
from backends.numba_kernels.matrix_tiles import has_matrix_tiles
from backends.numba_kernels.parts import PART_KEYS
from backends.numba_kernels.vectors import HAS_WIDE, keep
from backends.numba_plan import TILE_ROWS, make_plan
from tests.backends.steps import LSE_TOLERANCE, TOLERANCE, Shape, Step, assert_rows_agree, attend, expected, make_step

SHAPE = Shape(6, 2, 64, 16)

OTHER_PROCESSOR = """
import torch
from backends.numba_kernels import vectors
assert not vectors.HAS_WIDE and not vectors.HAS_BF16_DOT and vectors.HAS_FMA and vectors.MAX_ROWS == 3
from backends.numba_cpu import NumbaCpuBackend
from backends.numba_linear import PackedLinear
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


@pytest.mark.parametrize("quantised", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("window", [None, 300])
def test_a_prompt_in_chunks_and_decodes_gives_the_bits_of_the_prompt_as_a_whole(
    window: int | None, has_tiles: bool, quantised: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On matrix tiles and on vectors: what a row gets does not depend on how many rows are computed with it, nor on how keys are split."""
    if has_tiles and not has_matrix_tiles():
        pytest.skip("this processor has no matrix tiles")
    monkeypatch.setattr(numba_cpu, "has_matrix_tiles", lambda: has_tiles)
    backend = NumbaCpuBackend()
    whole = make_step(SHAPE, [(700, 700)], torch.bfloat16, quantised=quantised)
    layer = whole.layer(window=window)
    wanted, wanted_lse = attend(backend, whole, layer)
    for sizes in ([600, 40, 3, 1, 1, 1, 54], [1, 2, 5, 9, 256, 240, 180, 1, 6]):
        done = 0
        for size in sizes:
            rows = slice(done, done + size)
            done += size
            meta = replace(
                whole.meta,
                query_start_loc=torch.tensor([0, size], dtype=torch.int32),
                seq_lens=torch.tensor([done], dtype=torch.int32),
                slot_mapping=whole.meta.slot_mapping[rows],
                max_query_len=size,
                max_seq_len=done,
            )
            chunk = replace(whole, meta=meta, q=whole.q[rows], k=whole.k[rows], v=whole.v[rows])
            out, lse = attend(backend, chunk, layer)
            assert torch.equal(out, wanted[rows])
            assert torch.equal(lse, wanted_lse[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_size", "block_size"), [(16, 16), (48, 4), (64, 7), (80, 16), (128, 32), (176, 16)])
def test_rows_that_read_keys_where_they_lie_get_the_bits_of_those_that_lay_them_out(
    head_size: int, block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query alone has few rows, a prompt has many: neither odd head sizes nor blocks of any size make a difference."""
    monkeypatch.setattr(numba_cpu, "has_matrix_tiles", lambda: False)
    backend = NumbaCpuBackend()
    prompt = make_step(Shape(2 * 5, 2, head_size, block_size), [(70, 330)], dtype)
    for options in ({}, {"window": 61}, {"soft_cap": 3.0}):
        layer = prompt.layer(**options)
        wanted, wanted_lse = attend(backend, prompt, layer)
        assert 5 * len(prompt.q) > DIRECT_ROWS
        for row, count in ((0, 1), (33, 2), (66, 3), (69, 1)):
            rows = slice(row, row + count)
            meta = replace(
                prompt.meta,
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([260 + row + count], dtype=torch.int32),
                slot_mapping=prompt.meta.slot_mapping[rows],
                max_query_len=count,
                max_seq_len=260 + row + count,
            )
            chunk = replace(prompt, meta=meta, q=prompt.q[rows], k=prompt.k[rows], v=prompt.v[rows])
            assert 5 * count <= DIRECT_ROWS or not HAS_WIDE
            out, lse = attend(backend, chunk, layer)
            assert torch.equal(out, wanted[rows])
            assert torch.equal(lse, wanted_lse[rows])


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 9, 16])
def test_vectors_and_matrix_tiles_agree_for_every_number_of_query_heads(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes are shared by 4, 2 or 1 groups of keys, and a tile may have rows that nobody asked for."""
    backend = NumbaCpuBackend()
    shape = Shape(2 * group, 2, 96, 32)
    step = make_step(shape, [(1, 500), (2, 70), (5, 37), (1, 1), (23, 23)], torch.bfloat16)
    for has_tiles in {has_matrix_tiles(), False}:
        monkeypatch.setattr(numba_cpu, "has_matrix_tiles", lambda has_tiles=has_tiles: has_tiles)
        for options in ({}, {"soft_cap": 4.0}, {"window": 19, "scale": 0.5}):
            layer = step.layer(**options)
            out, lse = attend(backend, step, layer)
            wanted, wanted_lse = expected(step, layer)
            assert_rows_agree(out, wanted, TOLERANCE[torch.bfloat16])
            assert ((lse - wanted_lse).abs() <= LSE_TOLERANCE * (1 + wanted_lse.abs())).all()


def share_blocks(step: Step, groups: Sequence[tuple[Sequence[int], int]]) -> Step:
    """Let the members of each group begin with the first so many blocks of the first of them."""
    tables = step.meta.block_tables.clone()
    for members, num_blocks in groups:
        tables[list(members), :num_blocks] = tables[members[0], :num_blocks].clone()
    return replace(step, meta=replace(step.meta, block_tables=tables))


@pytest.mark.parametrize("quantised", [None, torch.int8], ids=str)
@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("options", [{}, {"window": 280, "soft_cap": 6.0}])
def test_sequences_that_share_blocks_get_the_bits_they_get_alone(
    options: dict[str, Any], has_tiles: bool, quantised: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared beginnings are read once for all; windows leave some of them unseen, other sequences stand between, one has its group alone."""
    if has_tiles and not has_matrix_tiles():
        pytest.skip("this processor has no matrix tiles")
    monkeypatch.setattr(numba_cpu, "has_matrix_tiles", lambda: has_tiles)
    backend = NumbaCpuBackend()
    kinds = [(1, 600), (1, 40), (2, 530), (1, 513), (1, 900), (1, 515), (1, 777), (3, 260), (1, 300), (20, 560)]
    first = make_step(SHAPE, kinds, torch.bfloat16, quantised=quantised)
    step = share_blocks(first, [((0, 2, 3, 5, 9), 32), ((4, 6, 8), 16), ((7, 1), 1)])
    layer = step.layer(**options)
    plan = backend.plan(step.meta, [layer])
    firsts = [(tile[1], tile[3]) for tile in plan.tiles.tolist() if tile[0] >= len(step.q)]
    assert firsts == [(5, 512), (3, 256)]
    out, lse = attend(backend, step, layer)
    start = 0
    for s, (count, length) in enumerate(kinds):
        rows = slice(start, start + count)
        start += count
        meta = replace(
            step.meta,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_tables=step.meta.block_tables[s : s + 1],
            slot_mapping=step.meta.slot_mapping[rows],
        )
        alone, alone_lse = attend(
            backend, replace(step, meta=meta, q=step.q[rows], k=step.k[rows], v=step.v[rows]), layer
        )
        assert torch.equal(out[rows], alone), f"sequence {s}"
        assert torch.equal(lse[rows], alone_lse), f"sequence {s}"


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_a_plan_covers_every_key_of_every_row_once(num_threads: int) -> None:
    """In blocks of its own table; and only the first tile of a row may hold more than one part, because parts are folded from the first on."""
    chooser = random.Random(num_threads)
    num_shared = 0
    for _ in range(60):
        sequences = []
        for _ in range(chooser.randrange(1, 20)):
            length = chooser.choice([1, 15, 255, 256, 257, 384, 385, 1000, 3000])
            sequences.append((min(length, chooser.choice([0, 1, 1, 1, 3, 5, 16, 17, 200])), length))
        step = make_step(SHAPE, sequences, torch.bfloat16, spare_rows=chooser.randrange(3))
        long = [s for s, (_, length) in enumerate(sequences) if length >= 384]
        halves = [half for half in (long[::2], long[1::2]) if half]
        step = share_blocks(step, [(half, chooser.choice([15, 16, 24])) for half in halves])
        plan = make_plan(step.meta, [step.layer()], num_threads)
        tables = step.meta.block_tables
        owners = [s for s, (count, _) in enumerate(sequences) for _ in range(count)]
        seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(len(step.q))}
        for first_query, count, first, last, table, part in plan.tiles.tolist():
            num_shared += first_query >= len(step.q)
            assert count * 3 <= TILE_ROWS
            for row, position, place, parts in plan.queries[first_query : first_query + count].tolist():
                end = min(last, position + 1)
                seen[row].append((first, end, part))
                assert part <= parts
                assert part == 0 or place + part <= len(plan.part_sums)
                if first < end:
                    used = slice(first // 16, (end + 15) // 16)
                    assert torch.equal(tables[table // (4 * tables.stride(0)), used], tables[owners[row], used])
        ends = [length - count + i + 1 for count, length in sequences for i in range(count)]
        for row, spans in seen.items():
            spans.sort()
            assert spans[0][0] == 0
            assert spans[-1][1] == (ends[row] if row < len(ends) else 0)
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
            assert all(first % PART_KEYS == 0 and last - first <= PART_KEYS for first, last, _ in spans[1:])
            assert len(spans) == max(1, plan.queries[row, 3])
            assert [part for *_, part in spans] == (list(range(1, len(spans) + 1)) if plan.queries[row, 3] else [0])
        places = [place + i for _, _, place, parts in plan.queries[: len(step.q)].tolist() for i in range(parts)]
        assert sorted(places) == list(range(len(plan.part_sums)))
    assert num_shared > 10


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
