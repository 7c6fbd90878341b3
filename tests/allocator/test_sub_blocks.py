"""Sub-block reuse: the longest common run inside a partly fitting block, copied on write and never across tenants."""

from collections.abc import Callable
from random import Random

import pytest

from allocator import (
    NO_GROWTH,
    BlockPool,
    BlockTable,
    EventLog,
    OutOfBlocks,
    OutOfRange,
    PrefixCache,
    StaleBlock,
    Stored,
)

StateOf = Callable[[BlockPool], object]
B = 4


class Device:
    """What each slot holds, as its whole prefix; a copy copies whole blocks."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[object, ...]] = {}

    def step(self, table: BlockTable, tokens: list[int], start: int, copies: tuple[tuple[int, int], ...]) -> None:
        for src, dst in copies:
            for offset in range(B):
                if src * B + offset in self.slots:
                    self.slots[dst * B + offset] = self.slots[src * B + offset]
        for position in range(start, len(tokens)):
            self.slots[table.slot(position)] = tuple(tokens[: position + 1])

    def reads_back(self, table: BlockTable, tokens: list[int]) -> bool:
        return all(self.slots[table.slot(p)] == tuple(tokens[: p + 1]) for p in range(len(tokens)))


def serve(
    pool: BlockPool, cache: PrefixCache, tokens: list[int], device: Device, namespace: bytes = b"", tail: bool = False
) -> tuple[BlockTable, int]:
    """Serve a prompt and publish it, its tail too if asked; returns the table and the cached tokens."""
    hashes = cache.block_hashes(tokens, namespace)
    match = cache.match(hashes, len(tokens) - 1, tokens, namespace)
    table = BlockTable(pool)
    growth = table.adopt(match, len(tokens) - match.num_tokens)
    device.step(table, tokens, match.num_tokens, growth.copies)
    pool.finish_copies(growth.copies)
    for depth, key in enumerate(hashes):
        own = tokens[depth * B : depth * B + B]
        cache.publish(table.block_ids[depth], key, hashes[depth - 1] if depth else None, depth, own, namespace)
    rest = tokens[len(hashes) * B :]
    if tail and rest:
        cache.publish_tail(table.block_ids[-1], hashes[-1] if hashes else None, len(hashes), rest, namespace)
    return table, match.num_tokens


def make(num_blocks: int = 30) -> tuple[BlockPool, PrefixCache, Device]:
    pool = BlockPool(num_blocks, B, ledger=True)
    return pool, PrefixCache(pool, secret=b"s", sub_blocks=True), Device()


def test_the_common_beginning_of_a_block_is_copied_and_the_rest_computed() -> None:
    pool, cache, device = make()
    serve(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], device)[0].release()
    tokens = [1, 2, 3, 4, 5, 6, 70, 80]
    match = cache.match(cache.block_hashes(tokens), 7, tokens)
    assert (match.num_tokens, len(match.block_ids)) == (6, 1)
    assert match.partial is not None
    assert match.partial.num_tokens == 2
    table = BlockTable(pool)
    assert table.blocks_needed(2, match) == 3  # both hits are free, and one new block
    growth = table.adopt(match, 2)
    assert growth.copies == ((match.partial.block_id, table.block_ids[1]),)
    assert growth.new_blocks == ()
    assert pool.ref_count(match.partial.block_id) == 1  # held by the copy
    device.step(table, tokens, 6, growth.copies)
    pool.finish_copies(growth.copies)
    assert device.reads_back(table, tokens)
    assert pool.ref_count(match.partial.block_id) == 0
    assert (pool.lookup_tokens, pool.hit_tokens) == (8 + 7, 6)
    pool.check([table.block_ids])


def test_the_longest_run_among_siblings_wins_and_stops_before_the_last_token() -> None:
    pool, cache, device = make()
    for tokens in ([1, 9, 9, 9], [1, 2, 3, 9], [1, 2, 9, 9], [7, 2, 3, 4]):
        serve(pool, cache, tokens, device)[0].release()
    for tokens, expected in (([1, 2, 3, 4, 5], 3), ([1, 2, 3], 2), ([1, 2], 1), ([1], 0), ([8, 2, 3, 4, 5], 0)):
        match = cache.match(cache.block_hashes(tokens), len(tokens) - 1, tokens)
        assert match.num_tokens == expected


def test_the_tail_of_a_finished_turn_is_found_by_the_next() -> None:
    pool, cache, device = make()
    turn = [1, 2, 3, 4, 5, 6, 7]
    table, _ = serve(pool, cache, turn, device, tail=True)
    following = [*turn, 8, 9]
    assert cache.match(cache.block_hashes(following), 8, following).num_tokens == 7
    growth = table.append(1)  # a published tail never changes
    assert len(growth.copies) == 1
    pool.finish_copies(growth.copies)
    table.release()
    table, num_cached = serve(pool, cache, following, device)
    assert num_cached == 7
    assert device.reads_back(table, following)


def test_a_tail_is_an_event_with_its_own_number_of_tokens_and_no_full_block_is_mistaken_for_it() -> None:
    pool, cache, device = make()
    log = EventLog(pool)
    serve(pool, cache, [1, 2, 3, 4, 5, 6], device, tail=True)
    first, tail = log.since(0)
    assert isinstance(first, Stored)
    assert isinstance(tail, Stored)
    assert (first.num_tokens, tail.num_tokens, tail.parent) == (B, 2, first.key)
    assert tail.key not in cache.block_hashes([1, 2, 3, 4, 5, 6, 0, 0])


def test_tails_have_tokens_and_are_not_full() -> None:
    pool, cache, _ = make()
    (block,) = pool.take(1)
    for tokens in ([], [1] * B):
        with pytest.raises(OutOfRange, match="token_ids"):
            cache.publish_tail(block, None, 0, tokens)
    assert PrefixCache(pool).publish_tail(block, None, 0, [1]) is False


def test_part_of_a_block_is_never_found_by_another_tenant_or_after_another_prefix() -> None:
    pool, cache, device = make()
    serve(pool, cache, [1, 2, 3, 4, 5, 6, 7], device, b"tenant a", tail=True)[0].release()
    probe = [1, 2, 3, 4, 5, 6, 7, 8]
    for namespace in (b"tenant b", b""):
        assert cache.match(cache.block_hashes(probe, namespace), 7, probe, namespace).num_tokens == 0
    other = [9, 2, 3, 4, 5, 6, 7, 8]
    assert cache.match(cache.block_hashes(other, b"tenant a"), 7, other, b"tenant a").num_tokens == 0
    assert cache.match(cache.block_hashes(probe, b"tenant a"), 7, probe, b"tenant a", b"adapter").num_tokens == B
    assert cache.match(cache.block_hashes(probe, b"tenant a"), 7, probe, b"tenant a").num_tokens == 7


def test_after_a_public_segment_parts_are_found_within_a_tenant_only() -> None:
    pool, cache, device = make()
    cache.declare_public([1, 2, 3, 4])
    serve(pool, cache, [1, 2, 3, 4, 5, 6, 7], device, b"a", tail=True)[0].release()
    probe = [1, 2, 3, 4, 5, 6, 7, 8]
    assert cache.match(cache.block_hashes(probe, b"b"), 7, probe, b"b").num_tokens == 4
    assert cache.match(cache.block_hashes(probe, b"a"), 7, probe, b"a").num_tokens == 7


def test_a_partial_hit_that_was_reused_since_is_refused(state_of: StateOf) -> None:
    pool, cache, device = make(4)
    serve(pool, cache, [1, 2, 3, 4], device)[0].release()
    match = cache.match((), 2, [1, 2, 9])
    assert match.partial is not None
    pool.release(pool.take(3))
    before = state_of(pool)
    with pytest.raises(StaleBlock, match="reused"):
        BlockTable(pool).adopt(match, 1)
    assert state_of(pool) == before


def test_a_partial_hit_needs_a_block_more_than_none(state_of: StateOf) -> None:
    pool, cache, device = make(3)
    serve(pool, cache, [1, 2, 3, 4, 5], device)[0].release()
    tokens = [1, 2, 9, 9, 9]
    match = cache.match(cache.block_hashes(tokens), 4, tokens)
    table, before = BlockTable(pool), state_of(pool)
    with pytest.raises(OutOfBlocks) as error:
        table.adopt(match, 3)
    assert (error.value.needed, error.value.free) == (3, 2)
    assert state_of(pool) == before
    whole = match.whole_blocks()
    assert (whole.num_tokens, whole.num_free_hits, whole.partial) == (0, 0, None)
    assert whole.whole_blocks() is whole
    table.adopt(whole, 5)
    pool.check([table.block_ids])


def test_the_source_stays_held_until_the_copy_is_finished_even_if_its_taker_ends() -> None:
    pool, cache, device = make(4)
    serve(pool, cache, [1, 2, 3, 4], device)[0].release()
    match = cache.match((), 2, [1, 2, 9])
    table = BlockTable(pool)
    growth = table.adopt(match, 1)
    assert table.append(1) == NO_GROWTH
    table.release()
    assert pool.num_used == 2
    with pytest.raises(OutOfBlocks):
        pool.take(2)
    pool.finish_copies(growth.copies)
    assert pool.num_used == 0
    assert match.partial is not None
    assert pool.key_of(match.partial.block_id) == match.partial.block_hash
    pool.check([])


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_found_reads_back_right_and_the_index_follows_the_pool(policy: str, seed: int) -> None:
    random = Random(seed)
    pool = BlockPool(14, B, ledger=True, policy=policy)
    cache, device = PrefixCache(pool, sub_blocks=True), Device()
    tables: list[BlockTable] = []
    partial_hits = 0
    for _ in range(500):
        if tables and random.random() < 0.5:
            tables.pop(random.randrange(len(tables))).release()
        tokens = [random.randint(0, 1) for _ in range(random.randint(1, 14))]
        try:
            table, num_cached = serve(pool, cache, tokens, device, tail=random.random() < 0.7)
        except OutOfBlocks:
            continue
        partial_hits += num_cached % B > 0
        assert device.reads_back(table, tokens)
        tables.append(table)
        pool.check([each.block_ids for each in tables])
        assert cache._sub_blocks is not None
        assert cache._sub_blocks._places.keys() == {key for key, _ in pool.published()}
        if random.random() < 0.01:
            cache.clear()
    assert partial_hits > 100
    assert pool.num_evictions > 50
