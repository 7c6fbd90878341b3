"""Which cached block goes first: policies by name, priority levels, and their expiry."""

from collections.abc import Callable
from random import Random

import pytest

from allocator import (
    HIGH,
    LOW,
    NORMAL,
    POLICIES,
    BlockPool,
    BlockTable,
    OutOfBlocks,
    OutOfRange,
    PrefixCache,
    Quotas,
    StaleBlock,
    UnknownPolicy,
)

B = 4


def serve(pool: BlockPool, cache: PrefixCache, prompt: list[int]) -> BlockTable:
    hashes = cache.block_hashes(prompt)
    match = cache.match(hashes, len(prompt) - 1)
    table = BlockTable(pool)
    table.adopt(match, len(prompt) - match.num_tokens)
    for depth, key in enumerate(hashes):
        cache.publish(table.block_ids[depth], key, hashes[depth - 1] if depth else None, depth)
    return table


def found(cache: PrefixCache, prompt: list[int]) -> int:
    return cache.match(cache.block_hashes(prompt), len(prompt)).num_tokens


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(UnknownPolicy, match="lru, cost and is 'mru'"):
        BlockPool(9, B, policy="mru")
    assert set(POLICIES) == {"lru", "cost"}


@pytest.mark.parametrize("seed", range(4))
def test_the_free_ring_and_the_lru_order_on_shelves_hand_out_the_same_blocks(seed: int) -> None:
    """LRU has two homes: the ring of a plain pool and `LruOrder`. They must be one policy."""

    def walk(pool: BlockPool) -> list[object]:
        random, cache, tables = Random(seed), PrefixCache(pool, secret=b"s"), []
        log: list[object] = []
        for _ in range(600):
            if tables and random.random() < 0.5:
                tables.pop(random.randrange(len(tables))).release()
            prompt = [random.randint(0, 2)] * random.randint(1, 14) + [random.randint(0, 9)] * random.randint(0, 9)
            try:
                tables.append(serve(pool, cache, prompt))
            except OutOfBlocks:
                log.append("full")
            else:
                log.append(tables[-1].snapshot())
            log.append(pool.free_blocks())
            pool.check()
        return log

    shelved = BlockPool(30, B)
    shelved._open_shelves()
    assert walk(BlockPool(30, B)) == walk(shelved)


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_a_cached_prompt_shrinks_from_its_end(policy: str) -> None:
    pool = BlockPool(9, B, policy=policy)
    cache = PrefixCache(pool)
    prompt = list(range(8 * B))
    serve(pool, cache, prompt).release()
    holder = BlockTable(pool)
    lengths = []
    for _ in range(8):
        lengths.append(found(cache, prompt))
        holder.append(B)
    assert lengths == [n * B for n in range(8, 0, -1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_blocks_without_a_hash_go_first(policy: str) -> None:
    pool = BlockPool(33, B, policy=policy)
    cache = PrefixCache(pool)
    shared = list(range(30 * B))
    serve(pool, cache, shared).release()
    for number in range(100):
        serve(pool, cache, [number] * (1 + number % (B - 1))).release()
    assert found(cache, shared) == len(shared)
    assert pool.num_evictions == 0


def test_the_cost_aware_policy_keeps_a_prefix_in_use_through_a_scan_that_lru_loses() -> None:
    def hits(policy: str) -> int:
        pool = BlockPool(41, B, policy=policy)
        cache = PrefixCache(pool)
        popular, total = list(range(10 * B)), 0
        for _ in range(3):
            serve(pool, cache, popular).release()
        for number in range(60):
            total += found(cache, popular)
            if number % 20 == 0:
                serve(pool, cache, popular).release()
            serve(pool, cache, [100 + number] * (4 * B)).release()  # never seen again
        return total

    assert hits("cost") > 1.5 * hits("lru")


def test_the_cost_aware_policy_keeps_what_is_dearer_to_compute_among_equals() -> None:
    """The last tokens of a long prompt cost more attention than a short prompt's; LRU sees only that it is older."""
    lengths = {}
    for policy in POLICIES:
        pool = BlockPool(13, B, policy=policy)
        cache = PrefixCache(pool)
        long, short = [1] * (10 * B), [2] * (2 * B)
        serve(pool, cache, long).release()
        serve(pool, cache, short).release()
        BlockTable(pool).append(2 * B)
        lengths[policy] = found(cache, long) // B, found(cache, short) // B
    assert lengths == {"lru": (8, 2), "cost": (10, 0)}


def test_the_cost_aware_policy_forgets_what_was_popular_once() -> None:
    pool = BlockPool(41, B, policy="cost")
    cache = PrefixCache(pool)
    popular = list(range(10 * B))
    for _ in range(50):
        serve(pool, cache, popular).release()
    for number in range(60):
        serve(pool, cache, [100 + number] * (4 * B)).release()
    assert found(cache, popular) == 0


def test_the_cost_aware_policy_keeps_its_heap_in_bounds() -> None:
    pool = BlockPool(9, B, policy="cost")
    cache = PrefixCache(pool)
    for _ in range(1000):
        serve(pool, cache, [1] * (6 * B)).release()
    assert pool._shelves is not None
    (order,) = (levels[NORMAL] for levels in pool._shelves._levels.values())
    assert len(order._heap) < 200  # type: ignore[attr-defined]
    pool.check()


# ── Levels ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", POLICIES)
def test_all_blocks_of_a_lower_level_go_before_any_of_a_higher_one(policy: str) -> None:
    pool = BlockPool(7, B, policy=policy)
    cache = PrefixCache(pool)
    prompts = {level: [level] * (2 * B) for level in (HIGH, LOW, NORMAL)}  # released in this order
    for level, prompt in prompts.items():
        table = serve(pool, cache, prompt)
        pool.retain(table.block_ids, level, until=100.0)
        table.release()
    holder = BlockTable(pool)
    left = []
    for _ in range(6):
        holder.append(B)
        left.append([found(cache, prompts[level]) // B for level in (LOW, NORMAL, HIGH)])
        pool.check()
    assert left == [[1, 2, 2], [0, 2, 2], [0, 1, 2], [0, 0, 2], [0, 0, 1], [0, 0, 0]]


def test_a_level_never_keeps_a_block_from_being_taken() -> None:
    pool = BlockPool(5, B)
    cache = PrefixCache(pool)
    table = serve(pool, cache, list(range(4 * B)))
    pool.retain(table.block_ids, HIGH, until=1e9)
    table.release()
    assert pool.num_free == 4
    assert len(pool.take(4)) == 4
    pool.check()


def test_a_forgotten_pin_expires() -> None:
    pool = BlockPool(5, B)
    cache = PrefixCache(pool)
    pinned, plain = [1] * (2 * B), [2] * (2 * B)
    table = serve(pool, cache, pinned)
    pool.retain(table.block_ids, HIGH, until=10.0)
    table.release()
    serve(pool, cache, plain).release()
    pool.advance(9.99)
    assert pool.level_of(table_block := pool.find(cache.block_hashes(pinned)[0]) or 0) == HIGH
    pool.advance(10.0)
    assert pool.level_of(table_block) == NORMAL
    pool.check()
    # Back among the ordinary ones it is the most recent, and the next time round the first.
    pool.take(2)
    assert (found(cache, pinned), found(cache, plain)) == (2 * B, 0)


def test_a_later_pin_outlives_the_deadline_of_an_earlier_one_and_a_held_block_keeps_its_level() -> None:
    pool = BlockPool(5, B)
    cache = PrefixCache(pool)
    table = serve(pool, cache, [1] * B)
    (block,) = table.block_ids
    pool.retain([block], HIGH, until=5.0)
    pool.retain([block], HIGH, until=50.0)
    pool.advance(6.0)
    assert pool.level_of(block) == HIGH
    table.release()
    assert pool.level_of(block) == HIGH
    pool.retain([block], NORMAL, until=0.0)
    assert pool.level_of(block) == NORMAL
    pool.retain([block], LOW, until=60.0)
    pool.advance(50.0)
    assert pool.level_of(block) == LOW
    pool.advance(60.0)
    assert pool.level_of(block) == NORMAL


def test_pins_renewed_again_and_again_take_no_more_memory_and_still_expire() -> None:
    pool = BlockPool(5, B)
    blocks = pool.take(3)
    for block in blocks:
        pool.publish(block, bytes([block]) * 32)
    for number in range(1000):
        pool.retain(blocks, HIGH, until=100.0 + number)
    assert len(pool._deadlines) < 100
    pool.advance(1098.0)
    assert [pool.level_of(block) for block in blocks] == [HIGH] * 3
    pool.advance(1099.0)
    assert [pool.level_of(block) for block in blocks] == [NORMAL] * 3
    pool.check()


def test_a_deadline_does_not_touch_the_block_that_reuses_the_place() -> None:
    pool = BlockPool(2, B)
    (block,) = pool.take(1)
    pool.publish(block, b"a" * 32)
    pool.retain([block], HIGH, until=5.0)
    pool.release([block])
    assert pool.take(1) == [block]
    assert pool.level_of(block) == NORMAL
    pool.publish(block, b"b" * 32)
    pool.retain([block], LOW, until=9.0)
    pool.advance(5.0)
    assert pool.level_of(block) == LOW


def test_only_published_blocks_have_a_level_and_wrong_ones_change_nothing(
    state_of: Callable[[BlockPool], object],
) -> None:
    pool = BlockPool(5, B)
    first, second = pool.take(2)
    pool.publish(first, b"a" * 32)
    before = state_of(pool)
    with pytest.raises(StaleBlock, match="not published"):
        pool.retain([first, second], HIGH, until=1.0)
    with pytest.raises(OutOfRange, match="level"):
        pool.retain([first], 3, until=1.0)
    assert (state_of(pool), pool.level_of(first)) == (before, NORMAL)


def test_a_tenants_pins_do_not_protect_it_from_its_share() -> None:
    """Levels order the blocks of one namespace; which namespace gives way is decided by its share."""
    from allocator import Owner

    pool = BlockPool(21, B, quotas=Quotas())
    cache = PrefixCache(pool)

    def run(namespace: bytes, number: int) -> None:
        prompt = [number] * (2 * B)
        hashes = cache.block_hashes(prompt, namespace)
        table = BlockTable(pool, Owner("sequence", "", namespace))
        table.append(len(prompt))
        for block, key in zip(table.block_ids, hashes, strict=True):
            cache.publish(block, key)
        if namespace == b"greedy":
            pool.retain(table.block_ids, HIGH, until=1e9)
        table.release()

    for number in range(10):
        run(b"greedy", number)
    for number in range(10):
        run(b"modest", number)
    assert pool.quotas is not None
    assert (pool.quotas.space(b"greedy").resident, pool.quotas.space(b"modest").resident) == (10, 10)
    pool.check()
