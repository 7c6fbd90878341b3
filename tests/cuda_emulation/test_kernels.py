"""The CUDA kernels, run thread by thread on the CPU, against dense float64 arithmetic. Every module is a shipped variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.kernels import launch
from backends.kernels.backend import KernelBackend
from backends.kernels.dispatch import attention_shape, attention_variant, dispatched, shared_bytes_limit
from backends.kernels.variants import CACHE, QUANTISED, ROWS, SHIPPED, STAGES, TYPE_NAMES, store_kernel
from backends.kv_cache import KVCacheSpec, quantise
from tests.backends.steps import Shape, make_step
from tests.cuda_emulation.module import EmulatedModule, missing
from tests.cuda_emulation.step import ADA, AMPERE, TURING, check, load, make_quantised_step, run_step

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

F32, F16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn

# (model type, cache type, compute capability, shape): every type, head size, block size and group once or more.
CASES = [
    (F32, F32, AMPERE, Shape(9, 3, 64, 16)),
    (F32, F32, AMPERE, Shape(2, 2, 16, 8)),
    (F32, F32, AMPERE, Shape(2, 1, 80, 32)),
    (F32, F32, AMPERE, Shape(2, 1, 256, 16)),
    (F16, F16, TURING, Shape(3, 1, 96, 16)),
    (BF16, BF16, AMPERE, Shape(9, 3, 64, 16)),
    (BF16, BF16, AMPERE, Shape(4, 1, 96, 128)),
    (BF16, BF16, AMPERE, Shape(8, 1, 128, 32)),
    (F16, F16, AMPERE, Shape(4, 2, 80, 8)),
    (F16, F16, AMPERE, Shape(2, 1, 256, 16)),
    (BF16, BF16, ADA, Shape(8, 2, 128, 16)),
    (F16, F16, ADA, Shape(2, 1, 256, 32)),
    (BF16, INT8, AMPERE, Shape(6, 2, 64, 16)),
    (BF16, INT8, AMPERE, Shape(2, 1, 80, 8)),
    (BF16, FP8, AMPERE, Shape(4, 1, 96, 64)),
    (BF16, FP8, AMPERE, Shape(2, 1, 256, 16)),
    (F16, INT8, AMPERE, Shape(2, 2, 128, 16)),
    (F16, FP8, AMPERE, Shape(5, 1, 64, 8)),
]


def name(case: tuple[torch.dtype, torch.dtype, tuple[int, int], Shape]) -> str:
    return f"{TYPE_NAMES[case[0]]}-{TYPE_NAMES[case[1]]}-sm{case[2][0]}{case[2][1]}-{case[3]}"


def sequences(shape: Shape) -> list[tuple[int, int]]:
    """Decodes around the edges of blocks and tiles, one split in three; prompts and chunks of more tiles than pipeline stages."""
    B = shape.block_size
    decodes = [(1, 1), (1, B - 1), (1, B), (1, B + 1), (1, 64), (1, 65), (1, 525), (2, 333)]
    return [*decodes, (0, 0), (5, 5), (B + 3, 3 * B + 7), (70, 270), (0, 9)]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_row_equals_the_dense_float64_computation(
    case: tuple[torch.dtype, torch.dtype, tuple[int, int], Shape],
) -> None:
    """NUM-03, NUM-07: decode and prefill, whole and split, plain and with a window and a soft cap, in three schedules with equal bits."""
    q_dtype, kv_dtype, capability, shape = case
    kernels = load(q_dtype, kv_dtype, shape.head_size, capability)
    steps = sequences(shape)
    if kv_dtype in QUANTISED:
        step, scales = make_quantised_step(shape, steps, q_dtype, kv_dtype)
    else:
        step, scales = make_step(shape, steps, q_dtype), None
    check(kernels, step, step.layer(), scales)
    check(kernels, step, step.layer(window=37, soft_cap=5.0, scale=0.3), scales, seeds=[3])


@pytest.mark.parametrize("kv_dtype", [BF16, INT8], ids=str)
def test_windows_narrower_than_a_tile_and_wider_than_a_split_see_the_right_keys(kv_dtype: torch.dtype) -> None:
    """NUM-03: windows of one key, of a block, and of more than a split."""
    shape = Shape(6, 2, 64, 16)
    kernels = load(BF16, kv_dtype, 64)
    steps = [(1, 600), (1, 20), (30, 300), (40, 40)]
    if kv_dtype in QUANTISED:
        step, scales = make_quantised_step(shape, steps, BF16, kv_dtype)
    else:
        step, scales = make_step(shape, steps, BF16), None
    for window in (1, 16, 300):
        check(kernels, step, step.layer(window=window), scales, seeds=[0, 5])


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(BF16, BF16), (F32, F32), (BF16, FP8)], ids=str)
def test_a_sequence_in_a_batch_gives_the_same_bits_as_alone(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """NUM-09: neighbours change neither how a sequence is cut nor which kernel serves it."""
    shape = Shape(6, 2, 64, 16)
    kernels = load(q_dtype, kv_dtype, 64)

    def rows(steps: list[tuple[int, int]]) -> list[torch.Tensor]:
        if kv_dtype in QUANTISED:
            step, scales = make_quantised_step(shape, steps, q_dtype, kv_dtype)
        else:
            step, scales = make_step(shape, steps, q_dtype), None
        out, _ = run_step(kernels, step, step.layer(), scales)
        return list(torch.split(out, [count for count, _ in steps]))

    steps = [(1, 300), (33, 64), (1, 17), (4, 600), (1, 1)]
    together = rows(steps)
    for index, kind in enumerate(steps):
        assert torch.equal(rows([kind])[0], together[index]), kind


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [(F32, F32), *((q_dtype, kv_dtype) for q_dtype in (F16, BF16) for kv_dtype in (q_dtype, INT8, FP8))],
    ids=str,
)
def test_storing_writes_exactly_the_defined_elements_and_scales_and_nothing_else(
    q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Rows of every magnitude, of zeros, with NaN and infinity, from strided views; slots of other tokens keep their bytes."""
    is_quantised = kv_dtype in QUANTISED
    T, Hkv, D, B, num_blocks = 7, 3, 80, 8, 5
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(T, 2, Hkv, 96, generator=generator) * torch.logspace(-6, 4, T).view(T, 1, 1, 1)
    fused[2, 0, 1] = 0.0
    fused[3, 1, 2, 5] = torch.nan
    fused[4, 1, 0, 7] = torch.inf
    fused[5, 0, 0, :8] = torch.tensor([0.5, 1.5, 2.5, 127.0, -127.0, -0.5, 3.5, -2.5])  # ties
    fused = fused.to(q_dtype)
    k, v = fused[:, 0, :, :D], fused[:, 1, :, :D]
    slots = torch.randperm(num_blocks * B, generator=generator)[:T]
    cache = torch.full((num_blocks, 2, Hkv, B, D), 0x5A, dtype=torch.uint8).repeat(1, 1, 1, 1, kv_dtype.itemsize)
    cache = cache.view(kv_dtype)
    wanted = cache.clone()
    scales = torch.full((num_blocks, 2, Hkv, B), 7.0) if is_quantised else None
    wanted_scales = torch.full((num_blocks, 2, Hkv, B), 7.0)
    for token, slot in enumerate(slots.tolist()):
        for side, rows in enumerate((k[token], v[token])):
            elements, factors = quantise(rows, kv_dtype) if is_quantised else (rows, torch.zeros(Hkv))
            wanted[slot // B, side, :, slot % B] = elements
            wanted_scales[slot // B, side, :, slot % B] = factors
    described = launch.store_kv(k, v, slots, cache, scales)
    EmulatedModule(CACHE).run(described, seed=2, memory=[fused, slots])
    as_bytes = cache.view(torch.uint8)
    differs = (as_bytes != wanted.view(torch.uint8)).nonzero()
    assert len(differs) == 0, f"first difference at {differs[0].tolist()}"
    if scales is not None:
        torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(BF16, BF16), (F32, F32), (BF16, INT8)], ids=str)
def test_a_query_without_keys_gives_zeros_and_minus_infinity(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """The padding of a captured batch: one query, no key, and a slot in the null block."""
    shape = Shape(6, 2, 64, 16)
    kernels = load(q_dtype, kv_dtype, 64)
    step, scales = make_step(shape, [(1, 40), (1, 1), (1, 300)], q_dtype), None
    if kv_dtype in QUANTISED:
        step, scales = make_quantised_step(shape, [(1, 40), (1, 1), (1, 300)], q_dtype, kv_dtype)
    meta = replace(step.meta, seq_lens=step.meta.seq_lens.clone(), slot_mapping=step.meta.slot_mapping.clone())
    meta.seq_lens[1] = 0
    meta.slot_mapping[1] = 0
    out, lse = run_step(kernels, replace(step, meta=meta), step.layer(), scales)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    assert out[[0, 2]].isfinite().all()


def test_a_missing_log_sum_exp_is_not_written() -> None:
    """The pointer may be null: most layers have no use for it."""
    kernels = load(BF16, BF16, 64)
    step = make_step(Shape(6, 2, 64, 16), [(1, 600), (40, 40)], BF16)
    out, _ = run_step(kernels, step, step.layer())
    silent, lse = run_step(kernels, step, step.layer(), wants_lse=False)
    assert torch.equal(out, silent)
    assert lse.isnan().all()


def test_offsets_past_two_gigabytes_are_computed_in_64_bits() -> None:
    """A pool of a few blocks that lie 600 million elements apart: only the touched pages are ever committed."""
    kernels = load(BF16, BF16, 64)
    shape = Shape(2, 1, 64, 16)
    step = make_step(shape, [(1, 40)], BF16)
    stride = 600_000_000
    backing = torch.empty(stride * (step.cache.shape[0] - 1) + step.cache[0].numel(), dtype=BF16)
    far = backing.as_strided(step.cache.shape, (stride, *step.cache.stride()[1:]))
    far.copy_(step.cache)
    near_out, near_lse = run_step(kernels, step, step.layer())
    far_out, far_lse = run_step(kernels, step, replace(step.layer(), cache=far))
    assert torch.equal(near_out, far_out)
    assert torch.equal(near_lse, far_lse)


def test_only_shipped_variants_can_be_asked_for() -> None:
    """An unshipped combination is None and not a module that nobody has compiled."""
    assert attention_variant(BF16, BF16, 72, AMPERE) is None
    assert attention_variant(BF16, BF16, 64, TURING) is None
    turing = attention_variant(F16, F16, 64, TURING)
    assert turing is not None
    assert turing.source == "attention_simt.cu"
    ampere = attention_variant(F16, F16, 64, AMPERE)
    assert ampere is not None
    assert ampere.source == "attention_mma.cu"
    assert len({variant.name for variant in SHIPPED}) == len(SHIPPED)
    assert store_kernel(F32, INT8) is None
    assert store_kernel(BF16, F16) is None


def test_every_kernel_that_can_be_dispatched_to_is_in_its_module() -> None:
    """A name that only Python knows would fail at the first launch."""
    pairs = [(q_dtype, kv_dtype) for q_dtype in (F32, F16, BF16) for kv_dtype in (F32, F16, BF16, INT8, FP8)]
    stores = {kernel for pair in pairs if (kernel := store_kernel(*pair)) is not None}
    assert stores == set(EmulatedModule(CACHE).names)
    for capability in (AMPERE, ADA, TURING):
        for variant in dispatched(capability):
            if variant.q_dtype is not None and variant.kv_dtype is not None:
                assert store_kernel(variant.q_dtype, variant.kv_dtype) in stores


def test_every_shipped_variant_serves_some_device_and_none_more_than_its_memory() -> None:
    """The list is what is dispatched to and nothing else."""
    capabilities = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
    assert {variant for capability in capabilities for variant in dispatched(capability)} == set(SHIPPED)
    assert 20 <= len(SHIPPED) <= 40
    for capability in capabilities:
        for variant in dispatched(capability):
            assert capability >= variant.minimum_capability
            if variant not in (CACHE, ROWS):
                needed = max(attention_shape(variant, 4, is_decode).shared_bytes for is_decode in (True, False))
                assert needed <= shared_bytes_limit(capability)


def test_a_device_with_little_shared_memory_gets_a_shorter_ring() -> None:
    """Compute capability 8.6, 8.9 and 12.0 have 99 KB a block: too little for three stages of 16-bit keys of 128."""
    for capability in ((8, 0), (9, 0), (10, 0)):
        assert {variant.stages for variant in dispatched(capability)} == {STAGES, None}
    for capability in ((8, 6), (8, 9), (12, 0)):
        for head_size, stages in ((64, STAGES), (96, STAGES), (128, 2), (256, 2)):
            variant = attention_variant(BF16, BF16, head_size, capability)
            assert variant is not None
            assert variant.stages == stages
        eight_bits = attention_variant(BF16, INT8, 128, capability)
        assert eight_bits is not None
        assert eight_bits.stages == STAGES
    reasons = KernelBackend(EmulatedModule, TURING).refusals(KVCacheSpec(1, 8, 2, 256, 16, F16))
    assert all(word in reasons[0] for word in ("head_size 256", "7.5", "64 KB", "64, 96, 128"))
