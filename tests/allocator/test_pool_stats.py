"""The statistics add up in every state a block can be in."""

from collections.abc import Callable

import pytest

from allocator import BlockPool, BlockTable, PoolStats, PrefixCache


def test_an_untouched_pool_is_all_free() -> None:
    stats = PoolStats.of(BlockPool(num_blocks=9, block_size=4))
    assert (stats.total, stats.used, stats.cached, stats.free) == (8, 0, 0, 8)
    assert (stats.utilisation, stats.residency, stats.sharing_ratio, stats.hit_rate) == (0, 0, 0, 0)


def test_cached_blocks_are_not_counted_as_used(fill: Callable[..., BlockTable]) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    cache = PrefixCache(pool)
    table = fill(pool, cache, range(10))
    child = table.fork()
    stats = PoolStats.of(pool, [table, child])
    assert (stats.used, stats.cached, stats.free, stats.shared) == (3, 0, 5, 3)
    assert (stats.references, stats.sharing_ratio, stats.tail_waste_slots) == (6, 2.0, 4)
    child.release()
    table.release()
    stats = PoolStats.of(pool)
    assert (stats.used, stats.cached, stats.free) == (0, 2, 6)
    assert stats.residency == pytest.approx(2 / 8)
    assert stats.used + stats.cached + stats.free == stats.total


def test_the_hit_rate_counts_each_admission_once(fill: Callable[..., BlockTable]) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    cache = PrefixCache(pool)
    prompt = list(range(9))
    fill(pool, cache, prompt).release()
    for _ in range(5):  # a waiting request looks again and again
        cache.match(cache.block_hashes(prompt), 8)
    assert PoolStats.of(pool).lookup_tokens == 8
    fill(pool, cache, prompt).release()
    stats = PoolStats.of(pool)
    assert (stats.lookup_tokens, stats.hit_tokens, stats.hit_rate) == (16, 8, 0.5)


def test_evictions_are_counted(fill: Callable[..., BlockTable]) -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    cache = PrefixCache(pool)
    fill(pool, cache, range(12)).release()
    table = BlockTable(pool)
    table.append(12)
    stats = PoolStats.of(pool)
    assert (stats.evictions, stats.cached, stats.used) == (2, 1, 3)
