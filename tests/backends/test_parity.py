"""The parity matrix: every registered backend against a dense float64 computation. A new line in BACKENDS is tested without a change here."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.interface import AttentionBackend, DeviceInfo
from backends.kv_cache import KVCacheSpec
from backends.registry import BACKENDS, open_backend, probe
from tests.backends.steps import LSE_TOLERANCE, TOLERANCE, Shape, Step, assert_rows_agree, attend, expected, make_step

DTYPES = [torch.float32, torch.bfloat16]

# NUM-07's head counts, each with another head size and block size, so that every value of every column stands with several others.
SHAPES = [
    Shape(1, 1, 64, 16),
    Shape(4, 4, 80, 8),
    Shape(8, 1, 128, 32),
    Shape(14, 2, 64, 64),
    Shape(28, 4, 96, 16),
    Shape(24, 8, 128, 8),
    Shape(12, 3, 80, 128),
    Shape(6, 2, 256, 32),
    Shape(5, 5, 96, 64),
    Shape(9, 3, 64, 16),
    Shape(4, 2, 16, 16),
    Shape(4, 1, 32, 8),
    Shape(2, 1, 256, 128),
    Shape(3, 1, 64, 20),
]
SMALL = Shape(6, 2, 64, 16)


def specification(shape: Shape, dtype: torch.dtype) -> KVCacheSpec:
    return KVCacheSpec(1, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size, dtype)


def opened(name: str, shape: Shape, dtype: torch.dtype) -> tuple[AttentionBackend[Any], torch.device]:
    """Open a backend on the first device where it runs, or skip with its reasons."""
    spec = specification(shape, dtype)
    reasons: list[str] = []
    for device in (DeviceInfo("cpu"), DeviceInfo("cuda")):
        if device.kind == "cuda" and not torch.cuda.is_available():
            continue
        reasons = probe(spec, device)[name]
        if not reasons:
            return open_backend(name, spec, device), device.torch_device
    pytest.skip(f"{name}: {'; '.join(reasons)}")


def mixed(block_size: int) -> list[tuple[int, int]]:
    """Decodes, whole prompts, chunks, and sequences without queries or keys; every length around a block's edge."""
    B = block_size
    lengths = [1, B - 1, B, B + 1, 5 * B + 3]
    decodes = [(1, length) for length in lengths]
    prompts = [(length, length) for length in lengths[1:4]]
    if B <= 20:  # the dense answer to a long prompt of wide blocks would take most of the matrix's time
        prompts.append((5 * B + 3, 5 * B + 3))
    chunks = [(min(B, 40) + 1, 5 * B + 3), (7, B + 7), (2, 3)]
    return [*prompts[:2], *decodes, (0, 0), *chunks, (0, B + 2), *prompts[2:]]


def check(backend: AttentionBackend[Any], step: Step, dtype: torch.dtype, **options: Any) -> None:
    layer = step.layer(**options)
    out, lse = attend(backend, step, layer)
    wanted, wanted_lse = expected(step, layer)
    assert_rows_agree(out, wanted, TOLERANCE[dtype])
    assert ((lse - wanted_lse).abs() <= LSE_TOLERANCE * (1 + wanted_lse.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_row_equals_the_dense_float64_computation(name: str, shape: Shape, dtype: torch.dtype) -> None:
    """NUM-03, NUM-07: windows, soft caps, head ratios, head and block sizes, in batches that mix decodes, prompts and chunks."""
    backend, device = opened(name, shape, dtype)
    sequences = mixed(shape.block_size)
    random.Random(str(shape)).shuffle(sequences)
    step = make_step(shape, sequences, dtype, device=device)
    B = shape.block_size
    check(backend, step, dtype)
    check(backend, step, dtype, window=B + 1, soft_cap=5.0, scale=0.3)
    if dtype == torch.float32:
        check(backend, step, dtype, soft_cap=2.0)
        for window in (1, 4, B):
            check(backend, step, dtype, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_long_contexts_equal_the_dense_computation(name: str, dtype: torch.dtype) -> None:
    """Contexts that a backend may split among threads, with and without a window that leaves whole splits empty."""
    backend, device = opened(name, SMALL, dtype)
    step = make_step(SMALL, [(1, 3000), (1, 40), (3, 1030), (200, 1500), (1, 1024), (1, 1025)], dtype, device=device)
    for window in (None, 100, 1100):
        check(backend, step, dtype, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_in_a_batch_gives_the_same_bits_as_alone(name: str, dtype: torch.dtype) -> None:
    """NUM-09: batches of 1, 2, 3 and 17 sequences with lengths around the block size, decodes and prompts, in many orders."""
    backend, device = opened(name, SMALL, dtype)
    B = SMALL.block_size
    lengths = [1, B - 1, B, B + 1, 5 * B + 3]
    kinds = [(1, length) for length in lengths] + [(length, length) for length in lengths[1:]] + [(1, 1500), (5, B + 5)]
    alone = {}
    for kind in kinds:
        step = make_step(SMALL, [kind], dtype, device=device)
        alone[kind] = attend(backend, step, step.layer())
    chooser = random.Random(9)
    batches = [list(order) for order in itertools.islice(itertools.permutations(kinds[:5]), 0, 120, 20)]
    batches += [
        chooser.sample(kinds, 2),
        chooser.sample(kinds, 3),
        chooser.choices(kinds, k=17),
        chooser.choices(kinds, k=17),
    ]
    for batch in batches:
        step = make_step(SMALL, batch, dtype, device=device)
        out, lse = attend(backend, step, step.layer())
        start = 0
        for kind in batch:
            rows = slice(start, start + kind[0])
            assert torch.equal(out[rows], alone[kind][0]), f"{kind} in {batch}"
            assert torch.equal(lse[rows], alone[kind][1]), f"{kind} in {batch}"
            start += kind[0]


@pytest.mark.parametrize("window", [None, 4, 17])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_prompt_in_chunks_equals_the_prompt_as_a_whole(name: str, window: int | None) -> None:
    """NUM-03: prefill only, decode only and chunks of any size see the same keys."""
    backend, device = opened(name, SMALL, torch.float32)
    whole = make_step(SMALL, [(70, 70)], torch.float32, device=device)
    out, _ = attend(backend, whole, whole.layer(window=window))
    for sizes in ([1] * 70, [64, 6], [16, 1, 53], [33, 37]):
        done = 0
        for size in sizes:
            rows = slice(done, done + size)
            meta = replace(
                whole.meta,
                query_start_loc=torch.tensor([0, size], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([done + size], dtype=torch.int32, device=device),
                slot_mapping=whole.meta.slot_mapping[rows],
                max_query_len=size,
                max_seq_len=done + size,
            )
            chunk = replace(whole, meta=meta, q=whole.q[rows], k=whole.k[rows], v=whole.v[rows])
            part, _ = attend(backend, chunk, chunk.layer(window=window))
            assert_rows_agree(part, out[rows].double(), 1e-5)
            done += size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_slices_of_a_fused_projection_are_read_and_written_in_place(name: str, dtype: torch.dtype) -> None:
    """NUM-08: q, k, v as views of one tensor, and an output whose rows lie further apart than their width."""
    backend, device = opened(name, SMALL, dtype)
    step = make_step(SMALL, mixed(16), dtype, device=device)
    layer = step.layer()
    T, H, D = step.q.shape
    Hkv = SMALL.num_kv_heads
    fused = torch.cat([x.reshape(T, -1) for x in (step.q, step.k, step.v)], dim=1)
    q, k, v = (x.view(T, -1, D) for x in fused.split([H * D, Hkv * D, Hkv * D], dim=1))
    assert not q.is_contiguous()
    assert not k.is_contiguous()
    wide = torch.full((T, H + 3, D), torch.nan, dtype=dtype, device=device)
    plan = backend.plan(step.meta, [layer])
    backend.store_kv(k, v, layer, plan)
    backend.run(q, layer, plan, wide[:, 1 : H + 1])
    assert_rows_agree(wide[:, 1 : H + 1].cpu(), expected(step, layer)[0], TOLERANCE[dtype])
    assert wide[:, 0].isnan().all()
    assert wide[:, H + 1 :].isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_cache_of_any_supported_dtype_serves_queries_of_another(name: str, dtype: torch.dtype) -> None:
    """NUM-08: float32 queries over a 16-bit pool and the reverse agree with the dense answer within the coarser type's rounding."""
    backend, device = opened(name, SMALL, dtype)
    step = make_step(SMALL, mixed(16), dtype, device=device)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    crossed = replace(step, q=step.q.to(other), k=step.k.to(other), v=step.v.to(other))
    out, _ = attend(backend, crossed, crossed.layer())
    coarse = dtype if dtype != torch.float32 else torch.bfloat16
    assert out.dtype == other
    assert_rows_agree(out, expected(step, step.layer())[0], 2 * TOLERANCE[coarse])


@pytest.mark.parametrize("name", BACKENDS)
def test_an_empty_step_writes_nothing_and_fails_nothing(name: str) -> None:
    """NUM-08: no sequences; sequences without queries."""
    backend, device = opened(name, SMALL, torch.float32)
    for sequences in ([], [(0, 0)], [(0, 40), (0, 0)]):
        step = make_step(SMALL, sequences, torch.float32, device=device)
        before = step.cache.clone()
        out, lse = attend(backend, step, step.layer())
        assert out.shape[0] == 0
        assert lse.shape[0] == 0
        assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_without_keys_and_rows_of_padding_become_zeros(name: str) -> None:
    backend, device = opened(name, SMALL, torch.float32)
    step = make_step(SMALL, [(1, 20), (3, 19)], torch.float32, spare_rows=3, device=device)
    meta = replace(step.meta, seq_lens=torch.tensor([20, 0], dtype=torch.int32, device=device))
    out, lse = attend(backend, replace(step, meta=meta), step.layer())
    wanted, _ = expected(replace(step, sequences=((1, 20),), dense=step.dense[:1]), step.layer())
    assert_rows_agree(out[:1], wanted, 1e-5)
    assert (out[1:] == 0).all()
    assert (lse[1:] == -torch.inf).all()


@pytest.mark.parametrize("num_keys", [63, 64, 65])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_table_that_is_exactly_wide_enough_serves_as_a_wider_one(name: str, num_keys: int) -> None:
    """BLK-11: the last token of the longest sequence, alone and beside a short one; nothing past the table's last entry is read."""
    backend, device = opened(name, SMALL, torch.float32)
    for sequences in ([(1, num_keys)], [(num_keys, num_keys)], [(1, 3), (1, num_keys)]):
        tight, wide = (make_step(SMALL, sequences, torch.float32, spare_columns=n, device=device) for n in (0, 5))
        assert tight.meta.block_tables.shape[1] == (num_keys + 15) // 16
        assert torch.equal(attend(backend, tight, tight.layer())[0], attend(backend, wide, wide.layer())[0])
        check(backend, tight, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_keys", [1, 2000])
@pytest.mark.parametrize("name", BACKENDS)
def test_products_of_1e5_stay_finite_and_right(name: str, num_keys: int, dtype: torch.dtype) -> None:
    """NUM-06: q · k beyond what float16 holds; sums and softmax are float32, so the answer is that of float64."""
    shape = Shape(4, 2, 128, 16)
    backend, device = opened(name, shape, dtype)
    step = make_step(shape, [(1, num_keys), (min(20, num_keys), num_keys)], dtype, magnitude=60.0, device=device)
    products = torch.einsum("hd,lhd->hl", step.q[0].cpu().float(), step.dense[0][0].float().repeat_interleave(2, dim=1))
    assert num_keys == 1 or products.abs().max() > 1e5
    check(backend, step, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_nan_in_a_query_is_seen_in_its_own_row_only(name: str, dtype: torch.dtype) -> None:
    """NUM-06: non-finite numbers must come out, or a request would stream nonsense instead of failing."""
    backend, device = opened(name, SMALL, dtype)
    step = make_step(SMALL, [(1, 40), (30, 30), (1, 2000)], dtype, device=device)
    clean, _ = attend(backend, step, step.layer())
    for row in (0, 7, 31):
        q = step.q.clone()
        q[row, 3, 5] = torch.nan
        out, _ = attend(backend, replace(step, q=q), step.layer())
        assert out[row, 3].isnan().all()
        out[row, 3] = clean[row, 3]
        assert torch.equal(out, clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_blocks_whose_offsets_pass_two_to_the_31_are_read_and_written_right(name: str, dtype: torch.dtype) -> None:
    """NUM-04: a pool of more than 2**31 elements, its memory committed only where the last blocks are touched."""
    backend, device = opened(name, SMALL, dtype)
    per_block = 2 * SMALL.num_kv_heads * SMALL.block_size * SMALL.head_size
    step = make_step(SMALL, [(1, 30), (20, 45), (33, 33)], dtype, device=device)
    low, _ = attend(backend, step, step.layer())
    num_low = step.cache.shape[0]
    num_blocks = (1 << 31) // per_block + num_low + 7
    try:
        pool = torch.empty((num_blocks, *step.cache.shape[1:]), dtype=dtype, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(
            f"the machine does not lend {num_blocks * per_block * dtype.itemsize / 2**30:.0f} GiB of address space: {error}"
        )
    shift = num_blocks - num_low
    assert shift * per_block >= 1 << 31
    pool[shift:] = make_step(SMALL, step.sequences, dtype, device=device).cache
    meta = replace(
        step.meta,
        block_tables=step.meta.block_tables + shift,
        slot_mapping=step.meta.slot_mapping + shift * SMALL.block_size,
    )
    high, _ = attend(backend, replace(step, cache=pool, meta=meta), replace(step.layer(), cache=pool))
    assert torch.equal(high, low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_storing_changes_the_slots_of_the_step_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    backend, device = opened(name, SMALL, dtype)
    step = make_step(SMALL, mixed(16), dtype, device=device)
    layer = step.layer()
    wanted = step.cache.clone()
    for token, slot in enumerate(step.meta.slot_mapping.tolist()):
        wanted[slot // 16, 0, :, slot % 16] = step.k[token]
        wanted[slot // 16, 1, :, slot % 16] = step.v[token]
    backend.store_kv(step.k, step.v, layer, backend.plan(step.meta, [layer]))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(step.cache.view(bits), wanted.view(bits))


@pytest.mark.parametrize("name", BACKENDS)
def test_plans_of_two_steps_may_be_used_in_turn(name: str) -> None:
    """A plan is a value: overlapping steps must not disturb each other."""
    backend, device = opened(name, SMALL, torch.float32)
    steps = [
        make_step(SMALL, sequences, torch.float32, device=device) for sequences in ([(1, 1500), (5, 9)], [(30, 30)])
    ]
    layers = [step.layer() for step in steps]
    plans = [backend.plan(step.meta, [layer]) for step, layer in zip(steps, layers, strict=True)]
    for step, layer, plan in zip(steps, layers, plans, strict=True):
        backend.store_kv(step.k, step.v, layer, plan)
    for step, layer, plan in [*zip(steps, layers, plans, strict=True)][::-1]:
        out = torch.full_like(step.q, torch.nan)
        backend.run(step.q, layer, plan, out)
        assert_rows_agree(out.cpu(), expected(step, layer)[0], 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_one_plan_serves_local_and_global_layers(name: str) -> None:
    """NUM-03: layers with full attention are not affected by those with a window."""
    backend, device = opened(name, SMALL, torch.float32)
    step = make_step(SMALL, [(1, 1400), (50, 60), (1, 17)], torch.float32, device=device)
    layers = [step.layer(), step.layer(window=4)]
    plan = backend.plan(step.meta, layers)
    for layer in (*layers, layers[0]):
        backend.store_kv(step.k, step.v, layer, plan)
        out = torch.full_like(step.q, torch.nan)
        backend.run(step.q, layer, plan, out)
        assert_rows_agree(out.cpu(), expected(step, layer)[0], 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    backend, device = opened(name, SMALL, torch.float32)
    step = make_step(SMALL, [(1, 2100), (150, 150), (1, 17), (40, 700)], torch.float32, device=device)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attend(backend, step, step.layer())[0])
    finally:
        torch.set_num_threads(before)
    if name == "reference":  # torch's own products may split sums by threads
        assert_rows_agree(results[1], results[0].double(), 1e-5)
        return
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", BACKENDS)
def test_head_counts_that_do_not_divide_are_refused(name: str) -> None:
    """NUM-07: 3 heads over 2 kv heads have no grouping."""
    reasons = probe(KVCacheSpec(1, 3, 2, 64, 16, torch.float32), DeviceInfo("cpu"))[name]
    assert any("3" in reason and "2" in reason and "num_kv_heads" in reason for reason in reasons)
