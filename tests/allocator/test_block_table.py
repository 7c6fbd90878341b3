"""Tables: positions to slots, growth, forks, truncation and copy-on-write."""

from collections.abc import Callable

import pytest

from allocator import (
    NO_GROWTH,
    BlockPool,
    BlockTable,
    Match,
    OutOfBlocks,
    OutOfRange,
    PrefixCache,
    StaleBlock,
    TableNotEmpty,
)

StateOf = Callable[[BlockPool], object]
Fill = Callable[..., BlockTable]


def table_of(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    table.append(num_tokens)
    return table


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_has_exactly_the_blocks_its_tokens_need(num_tokens: int, num_blocks: int) -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = BlockTable(pool)
    assert table.blocks_needed(num_tokens) == num_blocks
    growth = table.append(num_tokens)
    assert growth.new_blocks == table.snapshot()
    assert len(table.block_ids) == pool.num_used == num_blocks
    assert (table.num_tokens, table.num_tail_slots) == (num_tokens, num_blocks * 4 - num_tokens)


def test_appending_token_by_token_ends_where_appending_at_once_does() -> None:
    pool = BlockPool(num_blocks=16, block_size=4)
    table = BlockTable(pool)
    growths = [table.append(1) for _ in range(11)]
    assert [len(growth.new_blocks) for growth in growths] == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert growths[1] is NO_GROWTH
    assert tuple(block for growth in growths for block in growth.new_blocks) == table.snapshot()
    assert table_of(pool, 11).num_tail_slots == table.num_tail_slots


def test_a_slot_is_the_block_times_its_size_plus_the_offset() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.take(2)
    table = table_of(pool, 6)
    first, second = table.block_ids
    assert [table.slot(position) for position in range(6)] == [
        *range(first * 4, first * 4 + 4),
        *range(second * 4, second * 4 + 2),
    ]
    for position in (-1, 6):
        with pytest.raises(OutOfRange, match="position"):
            table.slot(position)


def test_append_that_does_not_fit_changes_nothing(state_of: StateOf) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    table = table_of(pool, 6)
    before, blocks = state_of(pool), table.snapshot()
    with pytest.raises(OutOfBlocks) as error:
        table.append(8)
    assert (error.value.needed, error.value.free) == (2, 1)
    with pytest.raises(OutOfRange):
        table.append(-1)
    assert (state_of(pool), table.snapshot(), table.num_tokens) == (before, blocks, 6)
    table.append(6)
    assert table.num_tokens == 12


def test_fork_moves_no_block_and_adds_one_holder_to_each() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    parent = table_of(pool, 6)
    child = parent.fork()
    assert (child.snapshot(), child.num_tokens) == (parent.snapshot(), 6)
    assert [pool.ref_count(block) for block in parent.block_ids] == [2, 2]
    assert pool.num_used == pool.num_shared == 2
    child.release()
    pool.check([parent.block_ids])


def test_append_after_fork_copies_only_the_shared_tail() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    parent = table_of(pool, 6)
    child = parent.fork()
    full, tail = parent.block_ids
    assert (child.blocks_needed(1), child.blocks_needed(3)) == (1, 2)
    growth = child.append(3)
    assert growth.copies == ((tail, child.block_ids[1]),)
    assert growth.new_blocks == (child.block_ids[2],)
    assert child.block_ids[0] == full
    assert parent.append(1) == NO_GROWTH  # the last table left on the block writes in place
    pool.finish_copies(growth.copies)
    pool.check([parent.block_ids, child.block_ids])


def test_a_full_shared_tail_is_never_copied() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    parent = table_of(pool, 8)
    child = parent.fork()
    growth = child.append(1)
    assert growth.copies == ()
    assert child.snapshot()[:2] == parent.snapshot()


def test_the_copy_of_a_shared_tail_counts_as_a_needed_block(state_of: StateOf) -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    parent = table_of(pool, 6)
    child = parent.fork()
    before = state_of(pool)
    with pytest.raises(OutOfBlocks) as error:
        child.append(1)
    assert (error.value.needed, error.value.free) == (1, 0)
    assert state_of(pool) == before
    assert child.snapshot() == parent.snapshot()
    parent.release()
    assert child.append(1) == NO_GROWTH


def test_the_owner_of_a_copy_in_flight_appends_without_copying_again() -> None:
    pool = BlockPool(num_blocks=8, block_size=8)
    parent = table_of(pool, 3)
    child = parent.fork()
    growth = child.append(1)
    assert child.append(1) == NO_GROWTH
    assert parent.append(1) == NO_GROWTH
    pool.finish_copies(growth.copies)
    assert child.append(1) == NO_GROWTH


def test_blocks_of_an_aborted_table_stay_held_while_their_copy_is_in_flight() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    parent = table_of(pool, 2)
    child = parent.fork()
    growth = child.append(1)
    child.release()
    parent.release()
    assert pool.num_used == 2
    with pytest.raises(OutOfBlocks):
        pool.take(2)
    pool.finish_copies(growth.copies)
    assert pool.num_free == 3
    pool.check([])


def test_a_published_tail_is_copied_even_by_its_only_holder() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    cache = PrefixCache(pool)
    table = table_of(pool, 4)
    (published,) = table.block_ids
    cache.publish(published, cache.block_hashes([1, 2, 3, 4])[0])
    table.truncate(2)
    assert (table.blocks_needed(0), table.blocks_needed(1)) == (0, 1)
    growth = table.append(1)
    assert growth.copies == ((published, table.block_ids[0]),)
    pool.finish_copies(growth.copies)
    assert pool.ref_count(published) == 0
    assert cache.match(cache.block_hashes([1, 2, 3, 4]), 4).block_ids == (published,)


def test_truncate_releases_only_the_blocks_past_the_end() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = table_of(pool, 14)
    blocks = table.snapshot()
    table.truncate(13)
    assert table.snapshot() == blocks
    table.truncate(8)
    assert (table.snapshot(), table.num_tokens) == (blocks[:2], 8)
    for num_tokens in (-1, 9):
        with pytest.raises(OutOfRange, match="num_tokens"):
            table.truncate(num_tokens)
    table.truncate(0)
    assert (table.snapshot(), pool.num_used) == ((), 0)


def test_truncating_one_fork_leaves_the_other_whole() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    parent = table_of(pool, 10)
    child = parent.fork()
    child.truncate(5)
    assert [pool.ref_count(block) for block in parent.block_ids] == [2, 2, 1]
    growth = child.append(1)
    assert growth.copies == ((parent.block_ids[1], child.block_ids[1]),)
    pool.finish_copies(growth.copies)


def test_releasing_twice_gives_blocks_back_once_and_the_table_can_be_used_again() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = table_of(pool, 10)
    child = table.fork()
    table.release()
    table.release()
    assert [pool.ref_count(block) for block in child.block_ids] == [1, 1, 1]
    assert (table.num_tokens, table.snapshot(), table.num_tail_slots) == (0, (), 0)
    table.append(1)
    pool.check([table.block_ids, child.block_ids])


def test_only_blocks_without_another_holder_are_reclaimable() -> None:
    pool = BlockPool(num_blocks=16, block_size=4)
    parent = table_of(pool, 10)
    assert parent.num_reclaimable == 3
    child = parent.fork()
    assert (parent.num_reclaimable, child.num_reclaimable) == (0, 0)
    growth = child.append(3)  # a copy of the tail, in flight, and a block of its own
    assert (parent.num_reclaimable, child.num_reclaimable) == (0, 1)
    pool.finish_copies(growth.copies)
    assert (parent.num_reclaimable, child.num_reclaimable) == (1, 2)
    for table, freed in ((parent, 1), (child, 4)):
        assert table.num_reclaimable == freed
        before = pool.num_free
        table.release()
        assert pool.num_free - before == freed


def test_a_snapshot_does_not_see_later_changes() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = table_of(pool, 4)
    snapshot = table.snapshot()
    table.append(1)
    assert len(snapshot) == 1


def test_adopting_a_match_whose_block_was_reused_is_refused(fill: Fill, state_of: StateOf) -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    cache = PrefixCache(pool)
    prompt = list(range(9))
    fill(pool, cache, prompt).release()
    match = cache.match(cache.block_hashes(prompt), len(prompt) - 1)
    assert match.num_free_hits == 2
    other = table_of(pool, 12)  # evicts the tail of the match
    before = state_of(pool)
    table = BlockTable(pool)
    with pytest.raises(StaleBlock, match="reused"):
        table.adopt(match, 1)
    assert state_of(pool) == before
    assert table.snapshot() == ()
    other.release()
    pool.check([])


def test_only_an_empty_table_adopts_a_match(state_of: StateOf) -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    table = table_of(pool, 1)
    before = state_of(pool)
    with pytest.raises(TableNotEmpty):
        table.adopt(Match((), 0, 0), 1)
    assert state_of(pool) == before


def test_adopting_nothing_is_an_append() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    table = BlockTable(pool)
    growth = table.adopt(Match((), 0, 0), 6)
    assert growth.new_blocks == table.snapshot()
    assert table.num_tokens == 6
