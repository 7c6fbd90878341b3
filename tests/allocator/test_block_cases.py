"""Failures seen in other engines, as far as the allocator alone can show them (ids in the docstrings)."""

from collections.abc import Callable
from itertools import permutations

import pytest

from allocator import (
    NO_GROWTH,
    BlockPool,
    BlockTable,
    OutOfBlocks,
    PrefixCache,
    RefCountError,
    StaleBlock,
)

Fill = Callable[..., BlockTable]
StateOf = Callable[[BlockPool], object]
B = 4


def tokens_of(name: str, num_tokens: int) -> list[int]:
    return [ord(name) * 1000 + position for position in range(num_tokens)]


@pytest.mark.parametrize("num_tokens", [B, 2 * B, 4 * B, 2 * B - 1, 2 * B + 1])
def test_a_wholly_cached_prompt_leaves_a_token_to_compute_and_later_sends_hit_as_much(
    num_tokens: int, fill: Fill
) -> None:
    """BLK-01"""
    pool = BlockPool(num_blocks=12, block_size=B)
    cache = PrefixCache(pool)
    prompt = tokens_of("a", num_tokens)
    hits = []
    for _ in range(4):
        hits.append(cache.match(cache.block_hashes(prompt), num_tokens - 1).num_tokens)
        fill(pool, cache, prompt).release()
    assert hits == [0] + [(num_tokens - 1) // B * B] * 3
    longer = [*prompt, 7]
    assert cache.match(cache.block_hashes(longer), num_tokens).num_tokens == num_tokens // B * B
    pool.check([])


def table_with_a_block_twice(pool: BlockPool, cache: PrefixCache, num_tokens: int) -> BlockTable:
    """A window re-uses a block: the table's first two entries are one published block."""
    (key,) = cache.block_hashes([1] * B)
    first = BlockTable(pool)
    first.append(B)
    cache.publish(first.block_ids[0], key)
    table = BlockTable(pool)
    table.adopt(cache.match([key, key], 2 * B), 0)
    first.release()
    if num_tokens > 2 * B:
        table.append(num_tokens - 2 * B)
    else:
        table.truncate(num_tokens)
    return table


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("num_tokens", [2 * B + 2, 2 * B - 1])
def test_a_block_twice_in_forked_tables_is_given_back_exactly_as_often_as_it_was_held(
    order: tuple[int, ...], num_tokens: int
) -> None:
    """BLK-02: both with a private shared tail and with the doubled block itself as the tail."""
    pool = BlockPool(num_blocks=16, block_size=B)
    cache = PrefixCache(pool)
    table = table_with_a_block_twice(pool, cache, num_tokens)
    doubled = table.block_ids[0]
    assert table.block_ids[1] == doubled
    tables = [table, *(table.fork() for _ in range(3))]
    assert pool.ref_count(doubled) == 8
    growths = [each.append(1) for each in tables]
    pool.check([each.block_ids for each in tables])
    assert len({each.block_ids[-1] for each in tables}) == 4
    for growth in growths:
        pool.finish_copies(growth.copies)
    for index in order:
        tables[index].release()
        pool.check([each.block_ids for each in tables])
    assert pool.num_free == pool.num_usable
    assert len(set(pool.free_blocks())) == pool.num_usable


def test_freeing_a_free_block_is_an_error_and_changes_nothing(state_of: StateOf) -> None:
    """BLK-02"""
    pool = BlockPool(num_blocks=4, block_size=B)
    blocks = pool.take(2)
    pool.release(blocks)
    before = state_of(pool)
    for block in (*blocks, 3):
        with pytest.raises(RefCountError):
            pool.release([block])
    assert state_of(pool) == before


def test_a_reused_block_is_no_longer_found_under_its_old_content(fill: Fill) -> None:
    """BLK-03"""
    pool = BlockPool(num_blocks=9, block_size=B)
    cache = PrefixCache(pool)
    a, b = tokens_of("a", 4 * B), tokens_of("b", 8 * B)
    fill(pool, cache, a).release()
    assert cache.match(cache.block_hashes(a), 4 * B).num_tokens == 4 * B
    table = fill(pool, cache, b)
    assert pool.num_free == 0
    assert cache.match(cache.block_hashes(a), 4 * B).block_ids == ()
    for block, key in zip(table.block_ids, cache.block_hashes(b), strict=True):
        assert (pool.find(key), pool.key_of(block)) == (block, key)
    table.release()
    assert cache.match(cache.block_hashes(a), 4 * B).block_ids == ()
    fill(pool, cache, a).release()
    assert cache.match(cache.block_hashes(a), 4 * B).num_tokens == 4 * B
    pool.check([])


def test_hits_among_the_free_blocks_are_counted_once_in_admission(fill: Fill, state_of: StateOf) -> None:
    """BLK-04: 5 blocks are free, 2 of them are hits; 4 new ones do not fit, 3 do."""
    pool = BlockPool(num_blocks=9, block_size=B)
    cache = PrefixCache(pool)
    prompt = tokens_of("a", 2 * B)
    fill(pool, cache, prompt).release()
    busy = BlockTable(pool)
    busy.append(3 * B)
    match = cache.match(cache.block_hashes(prompt), 2 * B)
    assert (pool.num_free, match.num_free_hits) == (5, 2)

    table = BlockTable(pool)
    before = state_of(pool)
    for _ in range(100):
        assert table.blocks_needed(4 * B, match) == 6
        with pytest.raises(OutOfBlocks) as error:
            table.adopt(match, 4 * B)
        assert (error.value.needed, error.value.free) == (6, 5)
        assert (state_of(pool), table.num_tokens) == (before, 0)
    assert cache.match(cache.block_hashes(prompt), 2 * B) == match

    growth = table.adopt(match, 3 * B)
    assert (len(growth.new_blocks), pool.num_free) == (3, 0)
    assert table.snapshot() == match.block_ids + growth.new_blocks
    pool.check([busy.block_ids, table.block_ids])


def test_taking_new_blocks_never_evicts_the_hits_of_the_same_admission(fill: Fill) -> None:
    """BLK-04: the hits are the oldest cached blocks, so an unprotected take would reuse them."""
    pool = BlockPool(num_blocks=7, block_size=B)
    cache = PrefixCache(pool)
    old, new = tokens_of("a", 2 * B), tokens_of("b", 4 * B)
    fill(pool, cache, old).release()
    fill(pool, cache, new).release()
    match = cache.match(cache.block_hashes(old), 2 * B)
    assert set(pool.free_blocks()[:2]) == set(match.block_ids)
    table = BlockTable(pool)
    table.adopt(match, 4 * B)
    assert len(set(table.block_ids)) == 6
    pool.check([table.block_ids])


def test_a_preempted_sequence_finds_its_own_blocks_and_needs_only_the_rest(fill: Fill) -> None:
    """BLK-05: on resume the hit is known before slots are reserved, so the table ends where the tokens do."""
    pool = BlockPool(num_blocks=9, block_size=B)
    cache = PrefixCache(pool)
    tokens = tokens_of("a", 3 * B + 2)
    fill(pool, cache, tokens).release()
    match = cache.match(cache.block_hashes(tokens), len(tokens) - 1)
    assert match.num_tokens == 3 * B
    table = BlockTable(pool)
    table.adopt(match, len(tokens) - match.num_tokens)
    assert (table.num_tokens, len(table.block_ids)) == (len(tokens), 4)
    assert table.slot(len(tokens) - 1) == table.block_ids[3] * B + 1


def test_reserved_blocks_are_not_found_before_they_are_published() -> None:
    """BLK-06: identical prompts of one tick all miss, and a half-computed prompt matches its computed part."""
    pool = BlockPool(num_blocks=60, block_size=B)
    cache = PrefixCache(pool)
    prompt = tokens_of("a", 5 * B + 3)
    hashes = cache.block_hashes(prompt)
    tables = [BlockTable(pool) for _ in range(8)]
    for table in tables:
        match = cache.match(hashes, len(prompt) - 1)
        assert match.num_tokens == 0
        table.adopt(match, len(prompt))
    for index in range(2):  # the first chunk ended inside the third block
        cache.publish(tables[0].block_ids[index], hashes[index])
    assert cache.match(hashes, len(prompt) - 1).num_tokens == 2 * B


@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"),
    [([1, 23], [12, 3]), ([0], []), ([0, 0], [0]), ([1, 2, 3, 4], [4, 3, 2, 1]), ([256], [1]), ([0, 1], [1, 0])],
)
def test_two_prompts_share_exactly_the_hashes_of_their_common_full_blocks(
    first: list[int], second: list[int], block_size: int
) -> None:
    """BLK-07: token ids have a fixed width, so no two lists read alike."""
    cache = PrefixCache(BlockPool(8, block_size))
    num_common = 0
    while num_common < min(len(first), len(second)) and first[num_common] == second[num_common]:
        num_common += 1
    one, two = cache.block_hashes(first), cache.block_hashes(second)
    assert {*one} & {*two} == {*one[: num_common // block_size]}
    assert len({*one, *two}) == len(one) + len(two) - num_common // block_size


def test_the_same_content_after_another_prefix_is_a_miss(fill: Fill) -> None:
    """BLK-07"""
    pool = BlockPool(num_blocks=12, block_size=B)
    cache = PrefixCache(pool)
    same = tokens_of("s", B)
    fill(pool, cache, [*tokens_of("a", B), *same]).release()
    other = [*tokens_of("b", B), *same]
    assert cache.match(cache.block_hashes(other), 2 * B).num_tokens == 0
    assert cache.match(cache.block_hashes(same), B).num_tokens == 0
    fill(pool, cache, tokens_of("b", B)).release()
    assert cache.match(cache.block_hashes(other), 2 * B).num_tokens == B


def test_one_tenants_blocks_are_never_found_by_another(fill: Fill) -> None:
    """BLK-07"""
    pool = BlockPool(num_blocks=12, block_size=B)
    cache = PrefixCache(pool)
    prompt = tokens_of("a", 2 * B)
    fill(pool, cache, prompt, b"tenant a").release()
    assert cache.match(cache.block_hashes(prompt, b"tenant b"), 2 * B).num_tokens == 0
    assert cache.match(cache.block_hashes(prompt, b"tenant a"), 2 * B).num_tokens == 2 * B


def test_duplicates_of_a_cached_prefix_stay_with_their_table(fill: Fill) -> None:
    """BLK-08: both tables keep their blocks while others take every free one."""
    pool = BlockPool(num_blocks=16, block_size=B)
    cache = PrefixCache(pool)
    prompt = tokens_of("a", 2 * B)
    hashes = cache.block_hashes(prompt)
    tables = [BlockTable(pool), BlockTable(pool)]
    for table in tables:  # both cold
        table.adopt(cache.match(hashes, 2 * B - 1), 2 * B)
    won = [[cache.publish(block, key) for block, key in zip(t.block_ids, hashes, strict=True)] for t in tables]
    assert won == [[True, True], [False, False]]
    snapshots = [table.snapshot() for table in tables]
    rest = pool.take(pool.num_free)
    assert not {*rest} & {*snapshots[0], *snapshots[1]}
    assert [table.snapshot() for table in tables] == snapshots
    pool.release(rest)
    tables[1].release()
    assert cache.match(hashes, 2 * B).block_ids == snapshots[0]
    tables[0].release()
    pool.check([])


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_held_hits_are_never_evicted_and_become_evictable_in_lru_order(depth: int, fill: Fill) -> None:
    """BLK-09"""
    pool = BlockPool(num_blocks=13, block_size=B)
    cache = PrefixCache(pool)
    prompt, other = tokens_of("a", depth * B), tokens_of("b", 3 * B)
    fill(pool, cache, prompt).release()
    fill(pool, cache, other).release()
    match = cache.match(cache.block_hashes(prompt), depth * B)
    holder = BlockTable(pool)
    holder.adopt(match, 0)
    everything = pool.take(pool.num_free)  # plain and evictable ones
    assert not {*everything} & {*match.block_ids}
    with pytest.raises(OutOfBlocks) as error:
        pool.take(1)
    assert (error.value.needed, error.value.free) == (1, 0)
    assert cache.match(cache.block_hashes(prompt), depth * B).block_ids == match.block_ids
    holder.release()
    assert pool.take(depth) == [*reversed(match.block_ids)]
    with pytest.raises(StaleBlock):
        holder.adopt(match, 0)


def test_children_share_the_prefix_and_each_writes_its_own_tail() -> None:
    """BLK-12: the parent appends first; all but one owner copy the tail, and copies run before writes."""
    pool = BlockPool(num_blocks=16, block_size=B)
    device: dict[int, int] = {}  # slot → token
    parent = BlockTable(pool)
    parent.append(B + 2)
    for position in range(B + 2):
        device[parent.slot(position)] = position
    family = [parent, *(parent.fork() for _ in range(3))]
    full, tail = parent.block_ids
    growths = [table.append(1) for table in family]
    copies = [copy for growth in growths for copy in growth.copies]
    assert [src for src, _ in copies] == [tail] * 3
    assert len({dst for _, dst in copies}) == 3
    assert growths[3] == NO_GROWTH
    for src, dst in copies:
        for offset in range(B):
            device[dst * B + offset] = device.get(src * B + offset, -1)
    for number, table in enumerate(family):
        device[table.slot(B + 2)] = 100 + number
    pool.finish_copies(copies)
    for number, table in enumerate(family):
        assert table.block_ids[0] == full
        assert [device[table.slot(p)] for p in range(B + 3)] == [*range(B + 2), 100 + number]
        assert table.append(1) == NO_GROWTH
    pool.check([table.block_ids for table in family])
    for table in family:
        table.release()
    assert pool.num_free == pool.num_usable
