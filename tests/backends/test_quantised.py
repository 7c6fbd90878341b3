"""Pools of int8 and float8 elements with a scale per token and head: the parity matrix again, read back through decodes and chunks.

The dense answer is computed from what the definition of `backends.kv_cache` keeps of each row, so the tolerances are those of the unquantised
matrix; how much the quantisation itself costs is measured on a real model in `tests/golden/test_quantised_smollm2.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.interface import AttentionBackend, DeviceInfo
from backends.kv_cache import KVCache, KVCacheSpec, dequantise, quantise
from backends.registry import BACKENDS, open_backend, probe
from service.config import CacheConfig
from service.model.pool_size import size_pool
from tests.backends.steps import (
    LSE_TOLERANCE,
    TOLERANCE,
    Shape,
    Step,
    assert_rows_agree,
    attend,
    expected,
    make_step,
)
from tests.backends.test_parity import mixed

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [torch.int8, torch.float8_e4m3fn]
SHAPES = [Shape(9, 3, 64, 16), Shape(8, 1, 128, 32), Shape(4, 4, 80, 8), Shape(6, 2, 256, 64), Shape(14, 2, 96, 16)]
SMALL = Shape(6, 2, 64, 16)

pytestmark = [
    pytest.mark.parametrize("kind", KINDS, ids=str),
]
every_backend = pytest.mark.parametrize("name", BACKENDS)


def opened(
    name: str, shape: Shape, dtype: torch.dtype, kind: torch.dtype
) -> tuple[AttentionBackend[Any], torch.device]:
    spec = KVCacheSpec(1, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size, dtype, kind)
    reasons: list[str] = []
    for device in (DeviceInfo("cpu"), DeviceInfo("cuda")):
        if device.kind == "cuda" and not torch.cuda.is_available():
            continue
        reasons = probe(spec, device)[name]
        if not reasons:
            return open_backend(name, spec, device), device.torch_device
    pytest.skip(f"{name}: {'; '.join(reasons)}")


def check(backend: AttentionBackend[Any], step: Step, dtype: torch.dtype, **options: Any) -> None:
    layer = step.layer(**options)
    out, lse = attend(backend, step, layer)
    wanted, wanted_lse = expected(step, layer)
    assert_rows_agree(out, wanted, TOLERANCE[dtype])
    assert ((lse - wanted_lse).abs() <= LSE_TOLERANCE * (1 + wanted_lse.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_backend
def test_every_row_equals_the_dense_computation_over_what_was_kept(
    name: str, shape: Shape, dtype: torch.dtype, kind: torch.dtype
) -> None:
    backend, device = opened(name, shape, dtype, kind)
    sequences = mixed(shape.block_size)
    random.Random(str(shape)).shuffle(sequences)
    step = make_step(shape, sequences, dtype, device=device, quantised=kind)
    check(backend, step, dtype)
    check(backend, step, dtype, window=shape.block_size + 1, soft_cap=5.0, scale=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_backend
def test_long_contexts_equal_the_dense_computation(name: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    backend, device = opened(name, SMALL, dtype, kind)
    step = make_step(SMALL, [(1, 2100), (3, 1030), (100, 700)], dtype, device=device, quantised=kind)
    for window in (None, 100):
        check(backend, step, dtype, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_backend
def test_stored_rows_are_the_definitions_bits_and_nothing_else_changes(
    name: str, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """Rows over 40 orders of magnitude, zeros, single spikes and denormal numbers of the element type."""
    backend, device = opened(name, SMALL, dtype, kind)
    step = make_step(SMALL, mixed(16), dtype, device=device, quantised=kind)
    magnitude = torch.logspace(-20, 20, step.k.shape[0], device=device).view(-1, 1, 1)
    k, v = (step.k.float() * magnitude).to(dtype), step.v * torch.rand_like(step.v).pow(8)
    k[3], v[5, 0] = 0, 0
    v[7, :, 1:] = 0
    layer = step.layer()
    assert layer.scales is not None
    elements, scales = layer.cache.view(torch.uint8).clone(), layer.scales.clone()
    for token, slot in enumerate(step.meta.slot_mapping.tolist()):
        for side, rows in enumerate((k, v)):
            kept, factors = quantise(rows[token], kind)
            elements[slot // 16, side, :, slot % 16] = kept.view(torch.uint8)
            scales[slot // 16, side, :, slot % 16] = factors
    backend.store_kv(k, v, layer, backend.plan(step.meta, [layer]))
    assert torch.equal(layer.scales.view(torch.int32), scales.view(torch.int32))
    # The sign of a zero is free.
    stored, wanted = (x.view(kind).float() for x in (layer.cache.view(torch.uint8), elements))
    assert torch.equal(stored, wanted)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@every_backend
def test_a_number_that_is_not_finite_comes_out_of_every_later_row(name: str, bad: float, kind: torch.dtype) -> None:
    """NUM-06: quantising must not hide it, or a request would stream nonsense instead of failing."""
    backend, device = opened(name, SMALL, torch.float32, kind)
    step = make_step(SMALL, [(20, 20), (1, 9)], torch.float32, device=device, quantised=kind)
    clean, _ = attend(backend, step, step.layer())
    v = step.v.clone()
    v[11, 1, 5] = bad
    out, _ = attend(backend, replace(step, v=v), step.layer())
    assert not out[11:20, 3:].isfinite().any()
    # Earlier rows of the same prompt may see it too, with a weight of zero; other heads and other sequences may not.
    assert torch.equal(out[:, :3], clean[:, :3])
    assert torch.equal(out[20:], clean[20:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 17])
@every_backend
def test_a_prompt_in_chunks_and_decodes_equals_the_prompt_as_a_whole(
    name: str, window: int | None, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """What earlier steps stored is read back by later ones; a whole prompt alone would read only what it stored itself."""
    backend, device = opened(name, SMALL, dtype, kind)
    whole = make_step(SMALL, [(70, 70)], dtype, device=device, quantised=kind)
    wanted, _ = expected(whole, whole.layer(window=window))
    for sizes in ([1] * 70, [64, 6], [16, 1, 53], [33, 37]):
        step = make_step(SMALL, [(70, 70)], dtype, device=device, quantised=kind)  # an empty pool again
        done = 0
        for size in sizes:
            rows = slice(done, done + size)
            meta = replace(
                step.meta,
                query_start_loc=torch.tensor([0, size], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([done + size], dtype=torch.int32, device=device),
                slot_mapping=step.meta.slot_mapping[rows],
                max_query_len=size,
                max_seq_len=done + size,
            )
            chunk = replace(step, meta=meta, q=step.q[rows], k=step.k[rows], v=step.v[rows])
            part, _ = attend(backend, chunk, chunk.layer(window=window))
            assert_rows_agree(part, wanted[rows], TOLERANCE[dtype])
            done += size


@every_backend
def test_a_sequence_in_a_batch_gives_the_same_bits_as_alone(name: str, kind: torch.dtype) -> None:
    """NUM-09."""
    backend, device = opened(name, SMALL, torch.bfloat16, kind)
    kinds = [(1, 1), (1, 17), (17, 17), (1, 1500), (5, 21), (60, 83)]
    batch = make_step(SMALL, kinds, torch.bfloat16, device=device, quantised=kind)
    out, lse = attend(backend, batch, batch.layer())
    start = 0
    for sequence in kinds:
        alone = make_step(SMALL, [sequence], torch.bfloat16, device=device, quantised=kind)
        alone_out, alone_lse = attend(backend, alone, alone.layer())
        rows = slice(start, start + sequence[0])
        assert torch.equal(out[rows], alone_out)
        assert torch.equal(lse[rows], alone_lse)
        start += sequence[0]


@every_backend
def test_a_copied_block_reads_as_its_source(name: str, kind: torch.dtype) -> None:
    """A copy that left the scales behind would read as zeros."""
    spec = KVCacheSpec(2, 6, 2, 64, 16, torch.bfloat16, kind)
    backend, device = opened(name, SMALL, torch.bfloat16, kind)
    pool = KVCache(spec, 9, device)
    step = make_step(SMALL, [(16, 16)], torch.bfloat16, device=device, quantised=kind)
    meta = replace(
        step.meta,
        block_tables=torch.tensor([[3]], dtype=torch.int32, device=device),
        slot_mapping=torch.arange(16, device=device) + 3 * 16,
    )
    for index in range(2):
        layer = replace(step.layer(), cache=pool.layer(index), scales=pool.scales(index))
        first, _ = attend(backend, replace(step, meta=meta), layer)
        pool.copy_blocks([(3, 7), (5, 3)])  # the source is overwritten as well
        moved = replace(meta, block_tables=torch.tensor([[7]], dtype=torch.int32, device=device))
        out = torch.full_like(step.q, torch.nan)
        backend.run(step.q, layer, backend.plan(moved, [layer]), out)
        assert torch.equal(out.cpu(), first)


def test_quantising_keeps_each_number_within_half_a_step_of_its_row(kind: torch.dtype) -> None:
    rows = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(4)) * torch.logspace(-6, 6, 200).view(
        -1, 1, 1
    )
    elements, scales = quantise(rows, kind)
    error = (dequantise(elements, scales) - rows).abs()
    largest = rows.abs().amax(-1, keepdim=True)
    if kind == torch.int8:
        assert (error <= largest * (0.5 / 127) * 1.001).all()
    else:  # three bits of mantissa, and steps of 2**-9 of a scale near zero
        assert (error <= torch.maximum(rows.abs() / 16, largest / 448 * 2**-10) * 1.001).all()


def test_a_fixed_pool_holds_nearly_twice_the_sessions_of_a_16_bit_one(kind: torch.dtype) -> None:
    """Per token and head: 64 elements of 2 bytes are 128, 64 of 1 and a scale of 4 are 68; with head size 128, 256 and 132."""
    for head_size, ratio in ((64, 128 / 68), (128, 256 / 132)):
        sessions: list[int] = []
        for quantised in (None, kind):
            spec = KVCacheSpec(30, 9, 3, head_size, 16, torch.bfloat16, quantised)
            size = size_pool(
                CacheConfig(size="1GiB"),
                spec,
                free_memory_bytes=2**34,
                declared_len=1024,
                requested_len=1024,
                max_num_seqs=64,
            )
            sessions.append((size.num_blocks - 1) // (1024 // 16))
        assert sessions[0] > 15
        assert sessions[1] / sessions[0] == pytest.approx(ratio, rel=0.05)  # whole sessions only


def test_the_pool_takes_the_bytes_that_the_specification_says(kind: torch.dtype) -> None:
    spec = KVCacheSpec(3, 4, 2, 32, 8, torch.bfloat16, kind)
    pool = KVCache(spec, 5, torch.device("cpu"))
    scales = [pool.scales(index) for index in range(3)]
    held = sum(layer.nbytes for layer in [*map(pool.layer, range(3)), *scales] if layer is not None)
    assert held == 5 * spec.bytes_per_block == 5 * 3 * 2 * 2 * 8 * (32 + 4)
    assert all(pool.layer(index).dtype == kind for index in range(3))
