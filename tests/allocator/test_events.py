"""Events are numbered without gaps, replayable within bounds, and tell exactly what can be found."""

from random import Random

import pytest

from allocator import (
    DEVICE,
    BlockPool,
    BlockTable,
    Cleared,
    EventLog,
    EventsLost,
    OutOfBlocks,
    OutOfRange,
    Owner,
    PrefixCache,
    Quarantined,
    Quotas,
    Removed,
    Stored,
)

B = 4


def serve(pool: BlockPool, cache: PrefixCache, prompt: list[int], namespace: bytes = b"") -> BlockTable:
    hashes = cache.block_hashes(prompt, namespace)
    match = cache.match(hashes, len(prompt) - 1)
    table = BlockTable(pool, Owner("sequence", "", namespace))
    table.adopt(match, len(prompt) - match.num_tokens)
    for depth, key in enumerate(hashes):
        cache.publish(table.block_ids[depth], key, hashes[depth - 1] if depth else None, depth)
    return table


def test_events_tell_parent_tokens_namespace_and_tier() -> None:
    pool = BlockPool(4, B, quotas=Quotas())
    log, cache = EventLog(pool), PrefixCache(pool)
    prompt = list(range(2 * B))
    table = serve(pool, cache, prompt, b"tenant")
    first, second = cache.block_hashes(prompt, b"tenant")
    table.release()
    BlockTable(pool).append(2 * B)
    pool.quarantine(table_block := pool.find(first) or 0, "a test")
    cache.clear()
    assert log.since(0) == [
        Stored(0, first, None, B, b"tenant", DEVICE),
        Stored(1, second, first, B, b"tenant", DEVICE),
        Removed(2, second, b"tenant", DEVICE),
        Removed(3, first, b"tenant", DEVICE),
        Quarantined(4, table_block, "a test"),
        Cleared(5, DEVICE),
    ]
    assert log.next_seq == 6


def test_a_consumer_that_is_too_far_behind_is_told_and_starts_from_a_snapshot() -> None:
    pool = BlockPool(30, B)
    log, cache = EventLog(pool, capacity=5), PrefixCache(pool)
    serve(pool, cache, list(range(8 * B)))
    assert [event.seq for event in log.since(3)] == [3, 4, 5, 6, 7]
    assert log.since(8) == []
    with pytest.raises(EventsLost) as error:
        log.since(2)
    assert (error.value.seq, error.value.first) == (2, 3)
    for wrong in (-1, 9):
        with pytest.raises(OutOfRange, match="seq"):
            log.since(wrong)
    seq, stored = log.snapshot()
    assert seq == 8
    assert {event.key for event in stored} == {*cache.block_hashes(range(8 * B))}
    assert [event.parent for event in stored] == [None, *cache.block_hashes(range(7 * B))]
    with pytest.raises(OutOfRange, match="capacity"):
        EventLog(pool, capacity=0)


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("seed", range(3))
def test_replaying_a_snapshot_and_what_followed_gives_what_can_be_found(policy: str, seed: int) -> None:
    random = Random(seed)
    pool = BlockPool(20, B, policy=policy, ledger=True)
    log, cache = EventLog(pool, capacity=40), PrefixCache(pool)
    known: dict[bytes, int] = {}
    position, resyncs, numbers = 0, 0, []
    for step in range(400):
        prompt = [random.randint(0, 2)] * random.randint(1, 12) + [step] * random.randint(0, 12)
        try:
            table = serve(pool, cache, prompt)
        except OutOfBlocks:
            continue
        table.release()
        if random.random() < 0.01:
            cache.clear()
        if random.random() < 0.01 and pool.num_usable > 12:
            pool.quarantine(random.randint(1, 19), "a test")
        if random.random() < 0.2:
            try:
                events = log.since(position)
            except EventsLost:
                resyncs += 1
                position, stored = log.snapshot()
                known = {event.key: event.num_tokens for event in stored}
                events = log.since(position)
            for event in events:
                numbers.append(event.seq)
                position = event.seq + 1
                if isinstance(event, Stored):
                    known[event.key] = event.num_tokens
                elif isinstance(event, Removed):
                    del known[event.key]
                elif isinstance(event, Cleared):
                    known.clear()
            assert known.keys() == {key for key, _ in pool.published()}
    assert numbers == sorted(set(numbers))
    assert resyncs > 0
    assert len(numbers) > 200
