"""The core and the prefix cache: hits are never wrong, never leave nothing to compute, and never hold what was refused."""

from __future__ import annotations

import pytest

from tests.engine.driver import CoreDriver, prompt_of
from tests.fakes import continuation


@pytest.mark.parametrize("length", [4, 8, 16, 3, 7, 15, 5, 9, 17])
def test_a_prompt_sent_again_hits_all_but_its_last_tokens_and_answers_alike(length: int) -> None:
    """BLK-01: whole-prompt hits still compute a token, and later sends hit as much as the second."""
    driver = CoreDriver()
    prompt = prompt_of(length)
    keys = []
    for _ in range(4):
        keys.append(driver.add(prompt))
        driver.run()
    for key in keys:
        assert driver.output(key) == continuation(prompt, 8)
    hits = [driver.cached(key) for key in keys]
    assert hits == [0] + [(length - 1) // 4 * 4] * 3
    longer = driver.add((*prompt, 99))
    driver.run()
    assert driver.cached(longer) == length // 4 * 4
    assert driver.output(longer) == continuation((*prompt, 99), 8)


def test_a_prompt_whose_blocks_another_took_waits_or_misses_and_answers_like_a_cold_one() -> None:
    """BLK-03: a pool of 8 blocks; A fills 4 and ends, B takes all 8, A comes again while B runs and after it."""
    driver = CoreDriver(num_blocks=9, block_size=4, token_budget=64)
    a, b = prompt_of(16), prompt_of(28, start=3)
    first = driver.add(a, max_tokens=1)
    driver.run()
    assert driver.core.stats().pool.cached == 4
    owner = driver.add(b, max_tokens=4)
    while driver.core.stats().pool.used < 8:
        driver.step()
    during = driver.add(a, max_tokens=3)
    driver.run()
    after = driver.add(a, max_tokens=3)
    driver.run()
    assert driver.output(owner) == continuation(b, 4)
    assert driver.output(first) == continuation(a, 1)
    for key in (during, after):
        assert driver.output(key) == continuation(a, 3)
    assert driver.cached(during) == 0
    assert driver.cached(after) == 12


def test_a_refused_admission_leaves_hits_evictable_and_counts_unchanged() -> None:
    """BLK-04: free = 5 with 2 evictable hits; 2 + 4 does not fit, tried 100 times; 2 + 3 does."""
    driver = CoreDriver(num_blocks=9, block_size=4, token_budget=64, overlap=False)
    driver.add(prompt_of(8), max_tokens=1)
    driver.run()
    assert driver.core.stats().pool.cached == 2
    driver.add(prompt_of(9, start=3), max_tokens=3)  # three blocks, to its end
    driver.step()
    before = driver.core.stats().pool
    assert (before.used, before.cached + before.free) == (3, 5)
    refused = driver.add(prompt_of(24), max_tokens=1)
    scheduler = driver.core._scheduler
    match = scheduler._prefixes.match(scheduler.waiting[0], "partial")
    for _ in range(100):
        assert not scheduler._admit(0, match, [])
        assert driver.core.stats().pool == before
        driver.core.check()
    driver.core.abort(refused)
    admitted = driver.add(prompt_of(20), max_tokens=1)
    batch = driver.step()
    assert batch is not None
    assert len(batch.entries) == 2  # beside the one that runs
    assert driver.cached(admitted) == 8
    assert driver.output(admitted) == continuation(prompt_of(20), 1)
    driver.run()


@pytest.mark.parametrize("budget", [64, 9, 3])
@pytest.mark.parametrize("num_requests", [2, 8])
def test_identical_prompts_in_one_tick_answer_as_if_alone(budget: int, num_requests: int) -> None:
    """BLK-06: a block is matched only after its last slot was computed, also when it is filled over two steps."""
    driver = CoreDriver(num_blocks=200, token_budget=budget, max_num_seqs=8)
    prompt = prompt_of(5 * 4 + 3)
    keys = [driver.add(prompt) for _ in range(num_requests)]
    driver.run()
    for key in keys:
        assert driver.output(key) == continuation(prompt, 8)


def test_a_block_is_found_by_a_later_request_as_soon_as_its_last_slot_is_computed() -> None:
    """BLK-06: publishing follows the computation chunk by chunk."""
    driver = CoreDriver(token_budget=6)
    driver.add(prompt_of(20))
    found = []
    for _ in range(3):
        driver.step()
        found.append(driver.core._pool.num_findable)
    assert found == [1, 3, 4]  # 6, 12 and 18 tokens computed, in blocks of 4


def test_twins_that_prefill_together_keep_their_own_blocks_while_others_take_every_free_one() -> None:
    """BLK-08: an equal block already published is not merged under a running sequence."""
    driver = CoreDriver(num_blocks=140, max_num_seqs=12, token_budget=16, overlap=False)
    prompt = prompt_of(22)
    twins = [driver.add(prompt, max_tokens=200, priority=1)]
    driver.step()
    twins.append(driver.add(prompt, max_tokens=200))  # more urgent, so it does not wait for the other's fifth block
    batch = driver.step()
    assert batch is not None
    assert [entry.start for entry in batch.entries] == [16, 16]
    for _ in range(20):
        driver.step()
    others = [driver.add(prompt_of(30, start=i), max_tokens=60) for i in range(20, 30)]
    least_free = 10**6
    while driver.step() is not None:
        pool = driver.core.stats().pool
        least_free = min(least_free, pool.free + pool.cached)
    assert least_free <= 1
    for key in twins:
        assert driver.output(key) == continuation(prompt, 200)
    for start, key in zip(range(20, 30), others, strict=True):
        assert driver.output(key) == continuation(prompt_of(30, start=start), 60)


def test_the_next_turn_of_a_chat_hits_the_blocks_of_the_answer_too() -> None:
    driver = CoreDriver()
    prompt = prompt_of(10)
    first = driver.add(prompt, max_tokens=12)
    driver.run()
    turn = (*prompt, *driver.output(first), 50, 51, 52)
    second = driver.add(turn)
    driver.run()
    assert driver.cached(second) == 20  # of the 21 tokens that were computed in blocks of 4
    assert driver.output(second) == continuation(turn, 8)


def test_namespaces_share_nothing() -> None:
    driver = CoreDriver()
    keys = []
    for namespace in ("a", "b", "a"):
        keys.append(driver.add(prompt_of(20), namespace=namespace))
        driver.run()
    assert [driver.cached(key) for key in keys] == [0, 0, 16]


def test_without_a_prefix_cache_nothing_is_found_and_answers_are_the_same() -> None:
    driver = CoreDriver(has_prefix_cache=False)
    for _ in range(2):
        key = driver.add(prompt_of(20))
        driver.run()
        assert driver.cached(key) == 0
        assert driver.output(key) == continuation(prompt_of(20), 8)
    assert driver.core.stats().pool.cached == 0


def test_prompt_logprobs_are_computed_although_the_prompt_is_cached() -> None:
    driver = CoreDriver(token_budget=6)
    prompt = prompt_of(18)
    driver.add(prompt)
    driver.run()
    key = driver.add(prompt, prompt_logprobs=0)
    driver.run()
    logprobs = driver.started[key].prompt_logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == list(prompt[1:])
    assert [entry.logprob for entry in logprobs] == [-float(position) for position in range(1, 18)]
    assert driver.output(key) == continuation(prompt, 8)
