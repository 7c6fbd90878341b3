"""The pool alone: counts, the order of reuse, and errors that change nothing."""

from collections.abc import Callable

import pytest

from allocator import (
    NULL_BLOCK,
    AllocatorError,
    BlockPool,
    InvariantBroken,
    OutOfBlocks,
    OutOfRange,
    PublishConflict,
    RefCountError,
    StaleBlock,
)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_every_block_but_the_null_block_is_handed_out_once() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    taken = pool.take(3) + pool.take(5)
    assert sorted(taken) == list(range(1, 9))
    assert NULL_BLOCK not in taken
    assert (pool.num_free, pool.num_used, pool.num_usable) == (0, 8, 8)
    pool.check([taken])


def test_take_is_all_or_nothing(state_of: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    pool.take(2)
    before = state_of(pool)
    with pytest.raises(OutOfBlocks) as error:
        pool.take(3)
    assert (error.value.needed, error.value.free) == (3, 2)
    assert state_of(pool) == before
    assert pool.take(0) == []
    assert len(pool.take(2)) == 2


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "field"), [(1, 4, "num_blocks"), (0, 4, "num_blocks"), (4, 0, "block_size")]
)
def test_a_pool_without_usable_slots_is_refused_by_name(num_blocks: int, block_size: int, field: str) -> None:
    with pytest.raises(OutOfRange, match=field) as error:
        BlockPool(num_blocks, block_size)
    assert error.value.field == field


def test_a_shared_block_is_free_only_after_its_last_holder_gave_it_back() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    (block,) = pool.take(1)
    pool.share(block)
    assert (pool.ref_count(block), pool.num_shared) == (2, 1)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_shared, pool.num_free) == (1, 0, 1)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_a_double_free_is_refused_and_no_block_of_the_batch_is_freed(
    state_of: Callable[[BlockPool], object],
) -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    first, second, third = pool.take(3)
    pool.release([third])
    before = state_of(pool)
    with pytest.raises(RefCountError) as error:
        pool.release([first, second, third])
    assert (error.value.block_id, error.value.held) == (third, 0)
    assert state_of(pool) == before


def test_releasing_a_block_twice_in_one_batch_needs_two_references(
    state_of: Callable[[BlockPool], object],
) -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    once, twice = pool.take(2)
    pool.share(twice)
    before = state_of(pool)
    with pytest.raises(RefCountError) as error:
        pool.release([twice, once, twice, once])
    assert (error.value.block_id, error.value.held, error.value.released) == (once, 1, 2)
    assert state_of(pool) == before
    pool.release([twice, once, twice])
    pool.check([])


@pytest.mark.parametrize("block", [NULL_BLOCK, -1, 4, 100])
def test_ids_outside_the_pool_are_refused_everywhere(block: int, state_of: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    held = pool.take(3)
    before = state_of(pool)
    for call in (
        lambda: pool.share(block),
        lambda: pool.touch(block),
        lambda: pool.release([*held, block]),
        lambda: pool.ref_count(block),
        lambda: pool.key_of(block),
        lambda: pool.publish(block, key(1)),
        lambda: pool.begin_copy(held[0], block),
        lambda: pool.begin_copy(block, held[0]),
    ):
        with pytest.raises(StaleBlock) as error:
            call()
        assert error.value.block_id == block
    assert state_of(pool) == before


def test_a_free_block_can_be_neither_shared_nor_published(state_of: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    before = state_of(pool)
    with pytest.raises(StaleBlock, match="nobody holds it"):
        pool.share(1)
    with pytest.raises(StaleBlock, match="nobody holds it"):
        pool.publish(1, key(1))
    with pytest.raises(StaleBlock, match="not published"):
        pool.touch(1)
    assert state_of(pool) == before


def test_touch_takes_a_findable_block_from_the_middle_of_the_free_ring() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    blocks = pool.take(5)
    for block in blocks:
        pool.publish(block, key(block))
    for block in blocks:
        pool.release([block])
    assert pool.free_blocks() == blocks
    pool.touch(blocks[2])
    assert pool.free_blocks() == [blocks[0], blocks[1], blocks[3], blocks[4]]
    assert pool.ref_count(blocks[2]) == 1
    pool.touch(blocks[2])  # a held block can be found and touched as well
    assert pool.ref_count(blocks[2]) == 2
    pool.check([[blocks[2]], [blocks[2]]])


def test_a_block_loses_its_hash_before_it_is_handed_out_again() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    first, second = pool.take(2)
    pool.publish(first, key(1))
    pool.publish(second, key(2))
    pool.release([first, second])
    assert pool.num_free_findable == 2
    assert pool.take(1) == [second]  # the tail goes before its prefix
    assert pool.find(key(2)) is None
    assert pool.key_of(second) is None
    assert pool.find(key(1)) == first
    assert pool.num_evictions == 1


def test_the_first_publisher_of_a_hash_wins_and_the_duplicate_stays_private() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    first, second = pool.take(2)
    assert pool.publish(first, key(7)) is True
    assert pool.publish(first, key(7)) is True
    assert pool.publish(second, key(7)) is False
    assert pool.key_of(second) is None
    assert pool.find(key(7)) == first
    with pytest.raises(PublishConflict):
        pool.publish(first, key(8))
    pool.check([[first, second]])


def test_free_blocks_without_a_hash_are_reused_before_any_cached_one() -> None:
    pool = BlockPool(num_blocks=7, block_size=4)
    old, new, plain = pool.take(1), pool.take(1), pool.take(2)
    pool.publish(old[0], key(1))
    pool.publish(new[0], key(2))
    pool.release(old)
    pool.release(new)
    pool.release(plain)
    assert set(pool.free_blocks()[:2]) == set(plain)
    assert pool.free_blocks()[-2:] == [*old, *new]


def test_cached_blocks_are_reused_least_recently_released_first_and_tail_before_prefix() -> None:
    pool = BlockPool(num_blocks=7, block_size=4)
    first, second = pool.take(3), pool.take(3)
    for block in first + second:
        pool.publish(block, key(block))
    pool.release(second)
    pool.release(first)
    assert pool.free_blocks() == second[::-1] + first[::-1]
    for block in second:  # used again, so now the most recent
        pool.touch(block)
    pool.release(second)
    assert pool.take(6) == first[::-1] + second[::-1]


def test_both_ends_of_a_copy_stay_held_until_it_is_finished(state_of: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    src, dst, other = pool.take(3)
    pool.share(src)
    pool.begin_copy(src, dst)
    pool.release([src])
    pool.release([dst])
    assert (pool.ref_count(src), pool.ref_count(dst), pool.num_free) == (1, 1, 0)
    before = state_of(pool)
    for wrong in ([(src, other)], [(dst, src)], [(src, dst), (src, dst)]):
        with pytest.raises(StaleBlock):
            pool.finish_copies(wrong)
        assert state_of(pool) == before
    with pytest.raises(RefCountError):
        pool.release([dst])  # the copy's hold is not a table's to give back
    assert state_of(pool) == before
    pool.finish_copies([(src, dst)])
    assert (pool.num_free, pool.num_copies_in_flight) == (2, 0)
    pool.check([[other]])
    with pytest.raises(StaleBlock):
        pool.finish_copies([(src, dst)])


def test_a_block_is_the_target_of_one_copy_at_a_time(state_of: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    first, second, dst = pool.take(3)
    pool.begin_copy(first, dst)
    before = state_of(pool)
    with pytest.raises(StaleBlock):
        pool.begin_copy(second, dst)
    with pytest.raises(StaleBlock):
        pool.begin_copy(second, second)
    with pytest.raises(RefCountError):
        pool.begin_copy(4, second)  # a free source
    assert state_of(pool) == before


def test_every_error_of_the_package_has_one_base() -> None:
    for error in (InvariantBroken, OutOfBlocks, OutOfRange, PublishConflict, RefCountError, StaleBlock):
        assert issubclass(error, AllocatorError)


def _break_ring(pool: BlockPool) -> None:
    pool._next[3] = 3


def _break_count(pool: BlockPool) -> None:
    pool._num_free += 1


def _break_reference(pool: BlockPool) -> None:
    pool._refs[1] = 0


def _break_pin(pool: BlockPool) -> None:
    pool._pins[1] += 1


def _break_index(pool: BlockPool) -> None:
    pool._index[key(9)] = 4


def _break_key(pool: BlockPool) -> None:
    pool._keys[1] = None


def _break_null_block(pool: BlockPool) -> None:
    pool._refs[NULL_BLOCK] = 1


@pytest.mark.parametrize(
    "damage",
    [
        _break_ring,
        _break_count,
        _break_reference,
        _break_pin,
        _break_index,
        _break_key,
        _break_null_block,
    ],
)
def test_the_self_check_explains_broken_bookkeeping(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    held = pool.take(1)
    pool.publish(held[0], key(1))
    pool.check([held])
    damage(pool)
    with pytest.raises(InvariantBroken) as error:
        pool.check([held])
    assert str(error.value)


def test_the_self_check_finds_a_holder_that_lost_its_blocks() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    pool.take(2)
    with pytest.raises(InvariantBroken, match="the tables hold 0"):
        pool.check([])
