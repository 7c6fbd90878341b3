"""A step's tensors against the definitions they vectorise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.batch import StepEntry
from service.model.packing import pack, shared_slot
from tests.model.steps import make_entry


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[StepEntry]]:
    block_size = draw(st.sampled_from([8, 16, 32]))
    entries = []
    free = iter(range(1, 10_000))
    for number in range(draw(st.integers(1, 6))):
        start, count = draw(st.integers(0, 100)), draw(st.integers(1, 40))
        held = -(-(start + count) // block_size) + draw(st.integers(0, 2))  # the allocator may be ahead
        blocks = sorted((next(free) for _ in range(held)), key=lambda block: (block * 7919) % 10_007)
        tokens = draw(st.lists(st.integers(0, 50_000), min_size=count, max_size=count))
        entries.append(make_entry(tokens, start=start, block_ids=blocks, sequence_id=number))
    return block_size, entries


@given(steps())
def test_tokens_positions_and_slots_are_those_of_each_sequence_in_turn(step: tuple[int, list[StepEntry]]) -> None:
    block_size, entries = step
    packed = pack(entries, block_size)
    tokens, positions, slots, starts = [], [], [], [0]
    for entry in entries:
        for p, token_id in enumerate(entry.token_ids, entry.start):
            tokens.append(token_id)
            positions.append(p)
            slots.append(entry.block_ids[p // block_size] * block_size + p % block_size)
        starts.append(len(tokens))
    assert packed.token_ids.tolist() == tokens
    assert packed.positions.tolist() == positions
    assert packed.meta.slot_mapping.tolist() == slots
    assert packed.meta.query_start_loc.tolist() == starts == packed.row_starts
    assert packed.meta.seq_lens.tolist() == [entry.seq_len for entry in entries]
    assert packed.meta.max_query_len == max(len(entry.token_ids) for entry in entries)
    assert packed.meta.max_seq_len == max(entry.seq_len for entry in entries)
    for row, entry in zip(packed.meta.block_tables.tolist(), entries, strict=True):
        needed = -(-entry.seq_len // block_size)
        assert row[:needed] == list(entry.block_ids[:needed])


def test_tensors_have_the_types_that_backends_are_promised() -> None:
    packed = pack([make_entry((1, 2)), make_entry((3,), start=20)], 16)
    meta = packed.meta
    assert meta.query_start_loc.dtype == meta.seq_lens.dtype == meta.block_tables.dtype == torch.int32
    assert meta.slot_mapping.dtype == packed.token_ids.dtype == packed.positions.dtype == torch.int64


@pytest.mark.parametrize(("seq_len", "width"), [(63, 4), (64, 4), (65, 5)])
@pytest.mark.parametrize("with_short", [False, True])
def test_the_block_table_is_wide_enough_for_the_last_token(seq_len: int, width: int, with_short: bool) -> None:
    """BLK-11: one token less than, exactly and one more than whole blocks, alone and beside a short sequence."""
    entries = [make_entry((9,), start=seq_len - 1, block_ids=range(10, 10 + width))]
    if with_short:
        entries.append(make_entry((9,), block_ids=(3,)))
    packed = pack(entries, 16)
    assert packed.meta.block_tables.shape == (len(entries), width)
    assert packed.meta.slot_mapping[0] == (10 + (seq_len - 1) // 16) * 16 + (seq_len - 1) % 16


def test_a_block_table_that_is_one_short_is_refused() -> None:
    """BLK-11: never read or written beyond its end."""
    with pytest.raises(ValueError, match="sequence 5: 4 blocks of 16 tokens do not cover its 65 tokens"):
        pack([make_entry((9,), start=64, block_ids=(1, 2, 3, 4), sequence_id=5)], 16)
    with pytest.raises(ValueError, match="1 blocks of 16 tokens do not cover its 17"):
        pack([make_entry((9,), start=16, block_ids=(1,))], 16)


def test_slots_of_a_pool_beyond_32_bits_do_not_wrap_around() -> None:
    packed = pack([make_entry((1,), block_ids=(2**30,))], 128)
    assert packed.meta.slot_mapping.tolist() == [2**37]


def test_two_tokens_in_one_slot_are_found() -> None:
    good = pack([make_entry((1, 2), block_ids=(3,)), make_entry((1,), block_ids=(4,))], 16)
    assert shared_slot(good.meta.slot_mapping) is None
    bad = pack([make_entry((1, 2), block_ids=(3,)), make_entry((1,), start=1, block_ids=(3,))], 16)
    assert shared_slot(bad.meta.slot_mapping) == 3 * 16 + 1
