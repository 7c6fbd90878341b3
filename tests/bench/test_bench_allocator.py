"""The allocator's benchmarks count right: checked against published counts, by brute force, and by hand."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import allocator_cost
import claims
import fitted_eviction
import isolation
import numpy as np
import prefix_reuse
import pytest

from service.simulate import TraceRequest, read_trace

DATA = Path(__file__).resolve().parents[1] / "data" / "traces"


def of(num_prompt: int, num_output: int) -> TraceRequest:
    return TraceRequest(arrival_s=0.0, num_prompt=num_prompt, num_output=num_output)


def started_blocks(name: str) -> list[list[bytes]]:
    """Every id of a trace, partly filled last blocks included, as the published counts have it."""
    return [[id_.to_bytes(32, "little") for id_ in request.hash_ids] for request in read_trace(DATA / name)]


def random_prompts(seed: int, num_prompts: int) -> list[list[bytes]]:
    """Paths from the root of a small random tree."""
    draw = random.Random(seed)
    return [
        [b"/".join(path[: end + 1]).ljust(32, b".") for end in range(len(path))]
        for path in ([b"%d" % draw.randrange(2) for _ in range(draw.randint(1, 4))] for _ in range(num_prompts))
    ]


@pytest.mark.parametrize(
    ("name", "unbounded", "lru"),
    [
        ("mooncake_conversation.jsonl.gz", 105_710, {1000: 12_831, 20_000: 82_939}),
        ("mooncake_synthetic.jsonl.gz", 77_953, {1000: 10_050, 20_000: 69_649}),
    ],
)
def test_hits_are_those_counted_independently(name: str, unbounded: int, lru: dict[int, int]) -> None:
    prompts = started_blocks(name)
    assert prefix_reuse.unbounded_hits(prompts) == unbounded
    assert {size: prefix_reuse.lru_hits(prompts, size) for size in lru} == lru


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_a_pool_that_is_large_enough_finds_what_an_unbounded_cache_finds(policy: str) -> None:
    prompts = started_blocks("mooncake_synthetic.jsonl.gz")[:500]
    size = len({name for prompt in prompts for name in prompt})
    assert prefix_reuse.pool_hits(prompts, size, policy, 512) == prefix_reuse.unbounded_hits(prompts) > 0


def best_possible(prompts: list[list[bytes]], num_blocks: int) -> int:
    """The most hits there can be, by trying every content of the cache after every prompt."""
    best = {frozenset[bytes](): 0}
    for prompt in prompts:
        following: dict[frozenset[bytes], int] = {}
        for cached, hits in best.items():
            found = hits + prefix_reuse._leading(prompt, dict.fromkeys(cached, 0))
            available = cached | set(prompt)
            for kept in itertools.combinations(sorted(available), min(num_blocks, len(available))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), found)
        best = following
    return max(best.values())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_best_that_can_be_had(seed: int) -> None:
    prompts = random_prompts(seed, 7)
    for num_blocks in (1, 2, 3):
        optimum = prefix_reuse.belady_hits(prompts, num_blocks)
        assert optimum == best_possible(prompts, num_blocks)
        assert prefix_reuse.lru_hits(prompts, num_blocks) <= optimum


def test_waste_is_exact() -> None:
    # Steps hold 15, 16 and 17 tokens: 48 of 16 + 16 + 32 slots in blocks of 16, of 3 × 20 reserved.
    assert claims.waste([of(15, 3)], lambda n: -(-n // 16) * 16) == pytest.approx(1 - 48 / 64)
    assert claims.waste([of(15, 3)], lambda n: 20) == pytest.approx(1 - 48 / 60)


def test_reservations_are_of_the_trace() -> None:
    trace = [of(number, 1) for number in range(1, 101)]
    assert claims.reservations(trace) == {"longest": 101, "2 × p99": 200}
    assert [claims.power_of_two(number) for number in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_sessions_fill_the_pool_and_no_more() -> None:
    held = claims.sessions([of(100, 1)], num_slots=1120, reservation=200, rounds=2)
    assert held == {"best fit": 5, "buddy": 4, "paged": 10, "paged, at their ends": 10}


def test_blocks_of_the_reservation_hold_one_sequence_each() -> None:
    """So the scheduler over such blocks is a contiguous server, and runs as many as best fit places."""
    side = claims.throughput([of(100, 40)] * 30, "llama-3.1-8b-h100", num_slots=1000, block_size=200)
    assert (side["finished"], side["refused"], side["preemptions"]) == (30, 0, 0)
    assert 4 < side["mean_running"] <= 5
    assert claims.sessions([of(100, 40)], 1000, 200, 1)["best fit"] == 5


def test_auc_is_the_share_of_pairs() -> None:
    draw = random.Random(0)
    first, second = [draw.randrange(9) for _ in range(40)], [draw.randrange(3, 12) for _ in range(30)]
    pairs = [1.0 if a < b else 0.5 if a == b else 0.0 for a in first for b in second]
    auc, low, high, p = isolation.compare(first, second)
    assert auc == pytest.approx(sum(pairs) / len(pairs))
    assert low < auc < high
    assert p < 0.001
    assert isolation.compare(second, first)[0] == pytest.approx(1 - auc)


def test_equal_times_tell_nothing() -> None:
    assert isolation.compare([1.0] * 5, [1.0] * 5)[::3] == (0.5, 1.0)


def test_p_is_what_the_textbook_example_has() -> None:
    """Two samples of 5 without overlap: U = 0, z = -12.5 / sqrt(22.9) = -2.61, p = 0.009."""
    assert isolation.compare([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])[3] == pytest.approx(0.00902, rel=0.01)


def test_every_allocator_is_measured_on_every_operation() -> None:
    for name, make in allocator_cost._makers(256).items():
        if "transformers" in name:
            continue
        measured = allocator_cost.measure(make, 256)
        assert all(value > 0 for value in measured.values())
        assert len(measured) == (3 if name in {"best fit", "buddy"} else 6), name
        if name in {"allocator/", "textbook"}:
            assert all(value > 10 for value in allocator_cost.metadata(make, 256).values())


def test_the_textbook_allocator_does_the_same_job() -> None:
    """Both give the same numbers of blocks and find the same prompts through a random life."""
    draw = random.Random(3)
    paged, textbook = allocator_cost.Paged(64), allocator_cost.Textbook(64)
    lengths: dict[int, int] = {}
    for number in range(400):
        if lengths and (len(lengths) > 6 or draw.random() < 0.3):
            sequence = draw.choice(list(lengths))
            tokens = [sequence % 5] * lengths.pop(sequence)
            for subject in (paged, textbook):
                subject.publish(sequence, tokens)
                subject.release(sequence)
        else:
            lengths[number] = draw.randint(1, 120)
            for subject in (paged, textbook):
                subject.append(number, lengths[number])
        assert paged.pool.num_used == len(textbook.inner.refs)
        assert paged.pool.num_free == len(textbook.inner.free) + len(textbook.inner.cached)
    assert [paged.match([kind] * 160) for kind in range(5)] == [textbook.match([kind] * 160) for kind in range(5)]


def test_a_policy_fitted_to_a_trace_beats_one_that_is_not_where_there_is_something_to_learn() -> None:
    """Half of the blocks come back after 30 prompts, the others never; a cache that knows can hold all that return."""
    returning = [np.array([number % 30]) for number in range(3000)]
    singles = [np.array([1000 + 3 * number, 1001 + 3 * number, 1002 + 3 * number]) for number in range(3000)]
    prompts = [prompt for pair in zip(returning, singles, strict=True) for prompt in pair]
    num_ids = 1000 + 9000
    classes, event_class, event_gap = fitted_eviction.classify(prompts, num_ids)
    score = fitted_eviction.scores(event_class, event_gap, 3)
    names = [[b"%d" % block for block in prompt] for prompt in prompts]
    fitted = fitted_eviction.fitted_hits(prompts, classes, score, num_ids, 60)
    assert prefix_reuse.lru_hits(names, 60) == 0
    assert 0.9 * prefix_reuse.belady_hits(names, 60) < fitted <= prefix_reuse.belady_hits(names, 60)
