"""Order, sharing and preemption: who is computed when, and that it never changes an answer."""

from __future__ import annotations

import pytest

from service.engine.request import RequestKey
from service.engine.scheduler import PASS_AGE_S, PASS_LIMIT
from service.errors import ContextTooLong, InvalidRequest, QueueFull
from tests.engine.driver import CoreDriver, prompt_of
from tests.fakes import continuation

# ── Limits ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_model_len", [64, 63, 65])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_request_may_fill_the_context_to_the_last_token(max_model_len: int, is_alone: bool) -> None:
    """BLK-11: prompt + max_tokens == max_model_len, around a multiple of the block size."""
    driver = CoreDriver(num_blocks=100, block_size=16, max_model_len=max_model_len)
    others = [] if is_alone else [driver.add(prompt_of(3, start=i), max_tokens=4) for i in range(3)]
    for length in (10, max_model_len - 1):
        key = driver.add(prompt_of(length), max_tokens=max_model_len - length)
        rest = driver.add(prompt_of(length), max_tokens=None)
        driver.run()
        for each in (key, rest):
            assert driver.output(each) == continuation(prompt_of(length), max_model_len - length)
            assert driver.finish_reasons[each] == {0: "length"}
    for index, other in enumerate(others):
        assert driver.output(other) == continuation(prompt_of(3, start=index), 4)


def test_a_prompt_as_long_as_the_context_is_refused_with_the_limit() -> None:
    """BLK-11: prompt == max_model_len leaves no room for an answer."""
    driver = CoreDriver(num_blocks=100, block_size=16, max_model_len=64)
    with pytest.raises(ContextTooLong, match=r"64 tokens and at most 63 fit"):
        driver.add(prompt_of(64))
    with pytest.raises(ContextTooLong, match=r"max_tokens is 15 .* has room for 14") as caught:
        driver.add(prompt_of(50), max_tokens=15)
    assert caught.value.param == "max_tokens"
    assert driver.core.is_idle


def test_a_prompt_that_can_never_fit_the_pool_is_refused_while_short_ones_answer() -> None:
    """SCH-01: 50 blocks of 16 and a prompt of 1000 tokens."""
    driver = CoreDriver(num_blocks=51, block_size=16, token_budget=256, max_model_len=2048)
    short = [driver.add(prompt_of(10, start=i)) for i in range(3)]
    with pytest.raises(ContextTooLong, match=r"at most 799 fit .* pool 800 tokens"):
        driver.add(prompt_of(1000))
    driver.run()
    assert [driver.output(key) for key in short] == [continuation(prompt_of(10, start=i), 8) for i in range(3)]


def test_a_lone_request_runs_to_the_capacity_of_the_pool_and_ends_with_length() -> None:
    """SCH-01: the prompt fits, prompt and max_tokens do not; it must not loop in preemption."""
    driver = CoreDriver(num_blocks=11, block_size=4, max_model_len=2048)
    key = driver.add(prompt_of(15), max_tokens=500)
    driver.run()
    assert driver.output(key) == continuation(prompt_of(15), 25)
    assert driver.finish_reasons[key] == {0: "length"}
    assert driver.core.stats().preemptions == 0


def test_the_waiting_queue_is_bounded_and_preempted_sequences_do_not_count() -> None:
    driver = CoreDriver(max_waiting=2, max_num_seqs=1)
    keys = [driver.add(prompt_of(5, start=i)) for i in range(2)]
    with pytest.raises(QueueFull, match="2 requests"):
        driver.add(prompt_of(5))
    driver.step()
    keys.append(driver.add(prompt_of(5, start=2)))
    driver.run()
    assert all(len(driver.output(key)) == 8 for key in keys)


def test_an_empty_prompt_is_refused_and_the_next_request_works() -> None:
    """SMP-12: nothing to compute is the caller's error, not an assertion in the loop."""
    driver = CoreDriver()
    with pytest.raises(InvalidRequest, match="at least one token") as caught:
        driver.add(())
    assert caught.value.param == "prompt"
    key = driver.add((1,))
    driver.run()
    assert driver.output(key) == continuation((1,), 8)


# ── Sharing a step ───────────────────────────────────────────────────────────────────────────────────


def test_a_short_prompt_gets_its_first_token_before_a_long_prefill_is_complete_and_decodes_flow() -> None:
    """SCH-03: chunks of a long prompt leave room under contention."""
    driver = CoreDriver(num_blocks=400, token_budget=16, max_model_len=2000, overlap=False)
    stream = driver.add(prompt_of(4, start=1), max_tokens=200)
    driver.step()
    long = driver.add(prompt_of(800, start=2), max_tokens=2)
    driver.step()
    short = driver.add(prompt_of(5, start=3), max_tokens=2)
    while long not in driver.first_token_step:
        before = len(driver.output(stream))
        driver.step()
        assert len(driver.output(stream)) == before + 1  # not one step without a token
    assert driver.first_token_step[short] == 3
    assert driver.first_token_step[long] > 40
    driver.run()
    assert driver.output(long) == continuation(prompt_of(800, start=2), 2)  # chunked = whole


def test_a_long_prompt_alone_gets_the_whole_budget() -> None:
    """SCH-03: the cap holds only under contention."""
    driver = CoreDriver(num_blocks=400, token_budget=16)
    driver.add(prompt_of(160), max_tokens=1)
    assert driver.run() == 10


def test_a_step_that_no_stream_waits_for_takes_the_larger_budget() -> None:
    driver = CoreDriver(num_blocks=400, token_budget=16, prefill_budget=64)
    key = driver.add(prompt_of(160), max_tokens=3)
    assert driver.run() == 3 + 2  # 64 + 64 + 32 tokens of the prompt, two decodes
    assert driver.output(key) == continuation(prompt_of(160), 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_beside_a_stream_keeps_to_the_token_budget_until_the_stream_ends(overlap: bool) -> None:
    driver = CoreDriver(num_blocks=400, token_budget=16, prefill_budget=64, overlap=overlap)
    stream = driver.add(prompt_of(4, start=1), max_tokens=3)
    driver.plans_ahead = False
    driver.step()
    driver.plans_ahead = True
    driver.add(prompt_of(200, start=2), max_tokens=1)
    sizes = []
    while (batch := driver.step()) is not None:
        sizes.append([len(entry.token_ids) for entry in batch.entries])
    assert sizes == [[1, 15], [1, 15], [64], [64], [42]]
    assert driver.output(stream) == continuation(prompt_of(4, start=1), 3)


def test_a_stream_that_was_refused_a_block_still_bounds_the_step() -> None:
    """It misses the step made ahead and waits for the end of it."""
    driver = CoreDriver(num_blocks=1 + 64, block_size=4, token_budget=8, prefill_budget=64, overlap=True)
    stream = driver.add(prompt_of(4, start=1), max_tokens=40)
    driver.step()
    long = driver.add(prompt_of(240, start=2), max_tokens=1)
    sizes = []
    while stream not in driver.finished:
        batch = driver.step()
        assert batch is not None
        sizes.append([len(entry.token_ids) for entry in batch.entries])
    assert [8] in sizes, "the stream missed no step"
    assert max(map(sum, sizes)) == 8
    driver.run()
    assert driver.output(stream) == continuation(prompt_of(4, start=1), 40)
    assert driver.output(long) == continuation(prompt_of(240, start=2), 1)


def test_prompts_that_come_together_share_a_large_step_and_its_first_tokens() -> None:
    driver = CoreDriver(num_blocks=400, token_budget=16, prefill_budget=64)
    keys = [driver.add(prompt_of(12, start=i), max_tokens=2) for i in range(5)]
    driver.step()
    assert {driver.first_token_step[key] for key in keys} == {1}
    driver.run()
    for index, key in enumerate(keys):
        assert driver.output(key) == continuation(prompt_of(12, start=index), 2)


def test_a_step_whose_prompts_keep_the_processor_busy_takes_no_further_one() -> None:
    """Two of twelve tokens do, so the first two have their first tokens when a third of the work is done."""
    driver = CoreDriver(num_blocks=400, token_budget=16, prefill_budget=64, saturating_tokens=20)
    keys = [driver.add(prompt_of(12, start=i), max_tokens=2) for i in range(6)]
    driver.step()
    assert [driver.first_token_step.get(key) for key in keys] == [1, 1, *[None] * 4]
    driver.run()
    assert max(driver.first_token_step.values()) == 5  # beside streams as many as the budget says
    for index, key in enumerate(keys):
        assert driver.output(key) == continuation(prompt_of(12, start=index), 2)


def test_long_prompts_come_one_after_the_other_and_short_ones_beside_them() -> None:
    driver = CoreDriver(num_blocks=400, token_budget=64, prefill_budget=64, saturating_tokens=16)
    long = [driver.add(prompt_of(100, start=i), max_tokens=1) for i in range(2)]
    short = [driver.add(prompt_of(10, start=5 + i), max_tokens=1) for i in range(3)]
    sizes = []
    while (batch := driver.step()) is not None:
        sizes.append([len(entry.token_ids) for entry in batch.entries])
    assert sizes == [[44, 10, 10], [54, 10], [2, 62], [38]]
    assert [driver.first_token_step[key] for key in (*short, *long)] == [1, 1, 2, 3, 4]


def test_a_more_urgent_long_prompt_goes_before_one_under_way() -> None:
    driver = CoreDriver(num_blocks=400, token_budget=64, prefill_budget=64, saturating_tokens=16)
    first = driver.add(prompt_of(400, start=1), max_tokens=1)
    driver.step()
    later = driver.add(prompt_of(200, start=2), max_tokens=1)
    urgent = driver.add(prompt_of(200, start=3), max_tokens=1, priority=-1)
    driver.run()
    order = sorted((first, later, urgent), key=lambda key: driver.first_token_step[key])
    assert order == [urgent, first, later]
    assert driver.first_token_step[urgent] <= 2 + 200 // 32


def test_a_cap_that_nobody_else_can_use_costs_nothing() -> None:
    """SCH-03: what waits without room for blocks does not slow a long prompt down."""
    driver = CoreDriver(num_blocks=41, block_size=4, token_budget=16)
    driver.add(prompt_of(150, start=1), max_tokens=1)
    driver.step()
    driver.add(prompt_of(140, start=2), max_tokens=1)
    while (batch := driver.step()) is not None and len(batch.entries) == 1:
        assert batch.num_tokens in {16, 150 % 16, 140 % 16}
    driver.run()


def test_decodes_come_before_prefill_chunks() -> None:
    driver = CoreDriver(token_budget=16, overlap=False)
    driver.add(prompt_of(40, start=1), max_tokens=4, priority=-5)
    driver.step()
    driver.add(prompt_of(3, start=2), max_tokens=20)
    for _ in range(2):
        batch = driver.step()
    assert batch is not None
    assert [len(entry.token_ids) > 1 for entry in batch.entries] == [False, True]
    driver.run()


def test_a_budget_below_the_number_of_sequences_still_serves_all() -> None:
    driver = CoreDriver(token_budget=2, max_num_seqs=8)
    keys = [driver.add(prompt_of(6, start=i)) for i in range(6)]
    driver.run()
    for index, key in enumerate(keys):
        assert driver.output(key) == continuation(prompt_of(6, start=index), 8)


# ── Preemption ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_requests", [2, 6])
def test_equal_requests_in_a_pool_for_one_and_a_half_are_preempted_a_few_times_at_most(num_requests: int) -> None:
    """SCH-05: no ping-pong, and the oldest is never preempted by a younger equal."""
    driver = CoreDriver(num_blocks=1 + 120, block_size=4, token_budget=64)  # a request has 20 + 300 tokens: 80 blocks
    prompts = [prompt_of(20, start=i) for i in range(num_requests)]
    keys = [driver.add(prompt, max_tokens=300) for prompt in prompts]
    driver.run()
    for key, prompt in zip(keys, prompts, strict=True):
        assert driver.output(key) == continuation(prompt, 300)
    counts = [driver.finished[key].num_preemptions for key in keys]
    assert sum(counts) == driver.core.stats().preemptions > 0
    assert counts[0] == 0
    assert max(counts) <= 4


def test_a_preempted_request_hits_its_own_blocks_on_resumption_and_answers_as_if_alone() -> None:
    """BLK-05: common prefix, a pool of 1.3 requests, many at once."""
    driver = CoreDriver(num_blocks=1 + 83, block_size=4, token_budget=48, max_num_seqs=32)
    common = prompt_of(40)
    prompts = [(*common, 20 + i, 30 + i) for i in range(32)]
    keys = [driver.add(prompt, max_tokens=210) for prompt in prompts]
    driver.run()
    for key, prompt in zip(keys, prompts, strict=True):
        assert driver.output(key) == continuation(prompt, 210)
    stats = driver.core.stats()
    assert stats.preemptions > 0
    assert stats.cached_prompt_tokens > 0
    resumed = [
        entry for batch in driver.runner.batches for entry in batch.entries if entry.num_output_tokens and entry.start
    ]
    assert any(len(entry.token_ids) > 1 for entry in resumed), "no resumption hit the cache"
    assert stats.pool.used == 0
    assert max(driver.finished[key].num_preemptions for key in keys) <= 5


def test_a_request_preempted_with_prompt_logprobs_reports_each_of_them_once() -> None:
    driver = CoreDriver(num_blocks=1 + 40, block_size=4, token_budget=8, max_num_seqs=1)
    key = driver.add(prompt_of(100), prompt_logprobs=0, priority=1)
    for _ in range(6):
        driver.step()
    urgent = driver.add(prompt_of(60, start=5), priority=0)
    driver.run()
    assert driver.finished[key].num_preemptions == 1
    assert driver.first_token_step[urgent] < driver.first_token_step[key]
    logprobs = driver.started[key].prompt_logprobs
    assert logprobs is not None
    assert [entry.logprob for entry in logprobs] == [-float(position) for position in range(1, 100)]
    assert driver.output(key) == continuation(prompt_of(100), 8)


def test_an_urgent_request_starts_in_the_next_step_although_all_slots_are_taken() -> None:
    """SCH-04: the last one of the less urgent is preempted and still answers right."""
    driver = CoreDriver(num_blocks=400, max_num_seqs=2, max_model_len=2000, overlap=False)
    slow = [driver.add(prompt_of(6, start=i), max_tokens=500, priority=5) for i in range(2)]
    for _ in range(10):
        driver.step()
    urgent = driver.add(prompt_of(5, start=9), max_tokens=3, priority=1)
    driver.step()
    assert len(driver.output(urgent)) == 1
    driver.run()
    assert [driver.finished[key].num_preemptions for key in slow] == [0, 1]
    for index, key in enumerate(slow):
        assert driver.output(key) == continuation(prompt_of(6, start=index), 500)
    assert driver.output(urgent) == continuation(prompt_of(5, start=9), 3)


def test_an_urgent_request_without_blocks_preempts_only_if_that_makes_room() -> None:
    """SCH-04: nobody is preempted for nothing."""
    driver = CoreDriver(num_blocks=1 + 50, block_size=4, token_budget=256)
    kept = driver.add(prompt_of(100, start=1), max_tokens=90, priority=0)
    lesser = driver.add(prompt_of(60, start=2), max_tokens=20, priority=9)
    driver.step()
    big = driver.add(prompt_of(150, start=3), max_tokens=4, priority=5)  # not even with the blocks of `lesser`
    driver.step()
    assert driver.core.stats().preemptions == 0
    driver.run()
    assert driver.output(kept) == continuation(prompt_of(100, start=1), 90)
    assert driver.output(lesser) == continuation(prompt_of(60, start=2), 20)
    assert driver.output(big) == continuation(prompt_of(150, start=3), 4)


def test_equal_priorities_never_preempt_for_a_slot() -> None:
    driver = CoreDriver(max_num_seqs=1)
    first = driver.add(prompt_of(5), max_tokens=30)
    driver.step()
    driver.add(prompt_of(5, start=2))
    driver.run()
    assert driver.finished[first].num_preemptions == 0
    assert driver.core.stats().preemptions == 0


# ── The head of the queue ────────────────────────────────────────────────────────────────────────────


def test_small_requests_pass_a_big_one_for_a_while_and_then_it_is_admitted() -> None:
    """SCH-02: two long decodes, a prompt of 60 % of the pool, and a small request every 0.1 s."""
    driver = CoreDriver(num_blocks=1 + 100, block_size=4, token_budget=64, max_num_seqs=16)
    running = [driver.add(prompt_of(100, start=i), max_tokens=80) for i in range(2)]
    for _ in range(8):
        driver.step()
    big = driver.add(prompt_of(240, start=5), max_tokens=4)
    small: dict[RequestKey, float] = {}
    waits: list[float] = []
    for tick in range(600):
        small[driver.add(prompt_of(10, start=100 + tick), max_tokens=4)] = driver.now
        driver.step()
        driver.now += 0.1
        answered = [key for key in small if key in driver.first_token_step]
        waits.extend(driver.now - small.pop(key) for key in answered)
        if big in driver.finished:
            break
    assert big in driver.finished, "the big request starved"
    last = max(driver.first_token_step[key] for key in running)
    assert all(key in driver.finished for key in running)
    assert driver.first_token_step[big] > last
    # Some went first, without waiting; none waited longer than the decodes that the big one waited for.
    assert sum(wait <= 0.2 for wait in waits) >= PASS_LIMIT
    assert max(waits) <= 0.1 * 100
    driver.run()
    assert driver.output(big) == continuation(prompt_of(240, start=5), 4)


def test_a_head_that_has_not_waited_long_lets_anything_pass_that_has_room_now() -> None:
    """SCH-02: the reservation begins after PASS_AGE_S, or after PASS_LIMIT sequences."""
    driver = CoreDriver(num_blocks=1 + 100, block_size=4, token_budget=400, max_num_seqs=16, overlap=False)
    driver.add(prompt_of(280, start=1), max_tokens=20)
    driver.step()
    big = driver.add(prompt_of(340, start=2), max_tokens=4)  # 85 blocks
    driver.step()
    driver.now += PASS_AGE_S / 2
    first = driver.add(prompt_of(40, start=3), max_tokens=30)  # does not fit beside the big one
    driver.step()
    assert len(driver.output(first)) == 1
    driver.now += PASS_AGE_S / 2
    second = driver.add(prompt_of(5, start=4), max_tokens=2)  # would fit alone, not with the one that has passed
    driver.step()
    assert second not in driver.first_token_step
    driver.run()
    assert driver.first_token_step[second] >= driver.first_token_step[big]


def test_what_fits_beside_an_aged_head_still_passes_and_does_not_delay_it() -> None:
    """SCH-02: the reservation counts what may pass at its largest."""
    driver = CoreDriver(num_blocks=1 + 100, block_size=4, token_budget=400, max_num_seqs=16, overlap=False)
    holder = driver.add(prompt_of(280, start=1), max_tokens=20)  # 75 blocks
    driver.step()
    big = driver.add(prompt_of(240, start=2), max_tokens=4)  # 61 blocks
    driver.step()
    driver.now += PASS_AGE_S
    fitting = driver.add(prompt_of(40, start=3), max_tokens=40)  # 20 blocks: fits beside the big one
    too_large = driver.add(prompt_of(60, start=4), max_tokens=40)  # 25 more do not
    driver.step()
    assert len(driver.output(fitting)) == 1
    assert too_large not in driver.first_token_step
    while driver.step() is not None:
        if big not in driver.first_token_step:
            assert too_large not in driver.first_token_step
    assert driver.first_token_step[big] - 20 <= 2  # the holder's twenty tokens, and its own prefill
    assert holder in driver.finished


# ── Aborts ───────────────────────────────────────────────────────────────────────────────────────────


def test_aborting_what_waits_computes_nothing_and_a_second_abort_is_no_error() -> None:
    """SCH-07: abort before the first allocation, twice, and of an unknown id."""
    driver = CoreDriver(max_num_seqs=1)
    running = driver.add(prompt_of(5), max_tokens=20)
    driver.step()
    waiting = [driver.add(prompt_of(5, start=i)) for i in range(50)]
    for key in waiting:
        assert driver.core.abort(key)
        assert not driver.core.abort(key)
    assert not driver.core.abort(RequestKey(10**9))
    assert driver.core.stats().waiting == 0
    driver.run()
    assert not any(key in driver.started for key in waiting)
    assert driver.output(running) == continuation(prompt_of(5), 20)


def test_an_abort_while_a_step_is_in_flight_keeps_the_blocks_until_it_is_applied() -> None:
    """SCH-07: the step may still write into them; its late output is ignored."""
    driver = CoreDriver(num_blocks=9, overlap=False)
    key = driver.add(prompt_of(8))
    batch = driver.schedule()
    assert batch is not None
    used = driver.core.stats().pool.used
    assert driver.core.abort(key)
    assert driver.core.stats().pool.used == used == 2
    other = driver.add(prompt_of(20, start=2))
    assert driver.core.schedule(0.0) is None  # one step at a time
    assert driver.core.apply(driver.compute(batch)) == []
    assert driver.core.stats().pool.used == 0
    driver.run()
    assert driver.output(other) == continuation(prompt_of(20, start=2), 8)
    assert key not in driver.started


def test_an_abort_at_the_very_step_that_finishes_is_an_abort() -> None:
    """SCH-07: the end is decided once."""
    driver = CoreDriver()
    key = driver.add(prompt_of(8), max_tokens=1)
    batch = driver.schedule()
    assert batch is not None
    driver.core.abort(key)
    driver.take(driver.core.apply(driver.compute(batch)))
    assert key not in driver.finished
    assert driver.core.is_idle
    driver.core.check()
    assert not driver.core.abort(key)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_the_pool_is_whole_after_an_abort_in_any_state(num_steps: int) -> None:
    """BLK-10: waiting, in a prefill chunk, in decode, with three choices."""
    driver = CoreDriver(token_budget=6)
    key = driver.add(prompt_of(14), max_tokens=20, n=3, temperature=1.0)
    for _ in range(num_steps):
        driver.step()
    driver.core.abort(key)
    driver.run()  # where steps overlap, one is in flight
    assert driver.core.is_idle
    driver.core.check()
