"""Histograms of the cache's turnover, and the bytes a pool really needs."""

import pytest

from allocator import BOUNDS_S, BlockPool, BlockTable, PoolStats, PrefixCache, Timeline

B = 4


def published(pool: BlockPool, cache: PrefixCache, tokens: list[int]) -> BlockTable:
    table = BlockTable(pool)
    table.append(len(tokens))
    for block, key in zip(table.block_ids, cache.block_hashes(tokens), strict=False):
        cache.publish(block, key)
    return table


def test_residence_runs_from_publication_to_eviction_and_the_gap_from_release_to_hit() -> None:
    pool = BlockPool(3, B)
    cache, timeline = PrefixCache(pool), Timeline(pool)
    prompt = list(range(2 * B))
    pool.advance(10.0)
    table = published(pool, cache, prompt)
    pool.advance(14.0)
    table.release()
    pool.advance(44.0)
    table.adopt(cache.match(cache.block_hashes(prompt), B), 0)  # 30 s later
    fork = BlockTable(pool)
    fork.adopt(cache.match(cache.block_hashes(prompt), B), 0)  # a hit without a gap
    table.release()
    fork.release()
    pool.advance(110.0)
    pool.take(2)
    stats = PoolStats.of(pool, timeline=timeline)
    assert stats.reuse_gap_s is not None
    assert stats.residence_s is not None
    assert (stats.reuse_gap_s.count, stats.reuse_gap_s.sum_s) == (1, 30.0)
    assert (stats.residence_s.count, stats.residence_s.sum_s) == (2, 200.0)
    assert stats.residence_s.counts[BOUNDS_S.index(128.0)] == 2
    assert (stats.reuse_gap_s.quantile_s(0.5), stats.residence_s.quantile_s(0.99)) == (32.0, 128.0)


def test_a_cleared_cache_says_nothing_about_eviction() -> None:
    pool = BlockPool(3, B)
    cache, timeline = PrefixCache(pool), Timeline(pool)
    published(pool, cache, list(range(B))).release()
    cache.clear()
    pool.take(2)
    assert timeline.residence_s.count == 0
    assert timeline.residence_s.quantile_s(0.5) is None


def test_durations_beyond_the_last_bound_are_counted() -> None:
    pool = BlockPool(2, B)
    cache, timeline = PrefixCache(pool), Timeline(pool)
    published(pool, cache, [1] * B).release()
    pool.advance(1e9)
    pool.take(1)
    assert timeline.residence_s.counts[-1] == 1
    assert timeline.residence_s.quantile_s(1.0) == float("inf")


def test_theoretical_bytes_count_each_token_once_and_allocated_bytes_each_block() -> None:
    pool = BlockPool(20, B)
    table = BlockTable(pool)
    table.append(2 * B + 1)
    fork = table.fork()  # the same three blocks
    other = BlockTable(pool)
    other.append(B + 3)
    tables = [table, fork, other]
    stats = PoolStats.of(pool, tables, bytes_per_token=100)
    assert (stats.used, stats.filled_slots) == (5, 2 * B + 1 + B + 3)
    assert (stats.allocated_bytes, stats.theoretical_bytes) == (5 * B * 100, (3 * B + 4) * 100)
    assert stats.waste == pytest.approx(4 / 20)
    growth = fork.append(1)
    pool.finish_copies(growth.copies)
    stats = PoolStats.of(pool, tables, bytes_per_token=100)
    assert stats.filled_slots == (2 * B + 1) + 2 + (B + 3)  # the copied tail's two tokens are now its own
    assert PoolStats.of(BlockPool(4, B)).waste == 0.0


@pytest.mark.parametrize("is_longer_first", [True, False])
def test_a_tail_shared_by_tables_of_different_lengths_counts_its_longest(is_longer_first: bool) -> None:
    pool = BlockPool(20, B)
    table = BlockTable(pool)
    table.append(B + 3)
    shorter = table.fork()
    shorter.truncate(B + 1)
    stats = PoolStats.of(pool, [table, shorter] if is_longer_first else [shorter, table])
    assert (stats.filled_slots, stats.tail_waste_slots) == (B + 3, 1 + 3)


def test_a_pool_wholly_in_quarantine_still_has_numbers() -> None:
    pool = BlockPool(3, B)
    for block in (1, 2):
        pool.quarantine(block, "a test")
    stats = PoolStats.of(pool)
    assert (stats.total, stats.utilisation, stats.residency, stats.waste) == (0, 0.0, 0.0, 0.0)
    pool.check([])


def test_the_snapshot_counts_incidents() -> None:
    pool = BlockPool(9, B)
    pool.quarantine(3, "a test")
    stats = PoolStats.of(pool)
    assert (stats.quarantined, stats.incidents, stats.total, stats.free) == (1, 1, 7, 7)
