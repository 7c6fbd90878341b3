"""Speculation through the core: answers as without it, in fewer steps; slots given back; switched off where it does not pay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.config import SchedulerConfig
from service.engine.batch import EntryOutput, SampledToken, StepBatch, StepOutput
from service.engine.core import BadStepOutput
from service.engine.request import ChoiceAdvanced, CoreEvent, choice_seed
from service.engine.speculation import MARGIN, RETRY_AFTER, RETRY_SHARE, STEPS_AHEAD, Drafter, Speculation, StepTime
from service.errors import NonFiniteLogits
from tests.engine.driver import SEED, CoreDriver
from tests.engine.test_core_properties import Arrival, Scenario, arrivals
from tests.factories import collect, make_request, running_engine
from tests.fakes import FIRST_ORDINARY_ID, choose_by_hash, continuation

CYCLE = (31, 32, 33, 34, 35)


def in_circles(context: Sequence[int], seed: int) -> int:
    """Go round the cycle, whatever came before: all drafts behind a second round are right."""
    return CYCLE[(CYCLE.index(context[-1]) + 1) % len(CYCLE)] if context[-1] in CYCLE else CYCLE[0]


def mostly_in_circles(context: Sequence[int], seed: int) -> int:
    """Follow one of a few tokens, as the last two and now and then all of the context say: some drafts are right."""
    if choose_by_hash(context, seed) % 4 == 0:
        return FIRST_ORDINARY_ID + choose_by_hash(context, seed) % 3
    return FIRST_ORDINARY_ID + choose_by_hash(context[-2:], seed) % 3


def driver_of(**options: Any) -> CoreDriver:
    """A driver whose core speculates."""
    return CoreDriver(**{"speculation": "ngram", "choose": in_circles, **options})


def drafts_of(batch: StepBatch) -> list[int]:
    return [entry.num_drafts for entry in batch.entries]


# ── Answers ──────────────────────────────────────────────────────────────────────────────────────


def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps() -> None:
    driver = driver_of(max_draft_tokens=8)
    key = driver.add(CYCLE * 2, max_tokens=90)
    num_steps = driver.run()
    assert driver.output(key) == continuation(CYCLE * 2, 90, choose=in_circles)
    assert driver.finish_reasons[key][0] == "length"
    assert num_steps == 1 + 10  # the prompt, then nine tokens a step, and eight behind the first token at last
    stats = driver.core.stats()
    assert stats.generated_tokens == 90
    assert (stats.draft_tokens, stats.accepted_draft_tokens) == (79, 79)
    assert stats.pool.used == 0


def test_without_the_option_nothing_is_drafted() -> None:
    driver = driver_of(speculation="off")
    driver.add(CYCLE * 2, max_tokens=20)
    assert driver.run() == 20
    assert driver.core.stats().draft_tokens == 0


class SpeculatingScenario(Scenario):
    """The mix of the core's properties, over texts that repeat themselves."""

    def judge(self, key: Any, arrival: Arrival) -> None:
        self.driver.expected = self.expected  # type: ignore[method-assign]
        super().judge(key, arrival)

    def expected(self, key: Any, num_tokens: int, *, seed: int | None = None, index: int = 0) -> list[int]:
        drawn = 0 if seed is None else choice_seed(seed, index)
        return continuation(self.driver.prompts[key], num_tokens, seed=drawn, choose=mostly_in_circles)

    def end_texts(self) -> None:
        """Choice 0 ends by its text as soon as it is long enough; a step may have brought it beyond."""
        for key, (_, arrival) in self.live.items():
            driver, wanted = self.driver, arrival.ends_by_text_after
            if wanted is None or key in self.aborted or key not in driver.sequence_ids:
                continue
            if len(driver.output(key)) >= wanted and 0 not in driver.finish_reasons[key]:
                driver.finish_reasons[key][0] = "stop"
                del driver.tokens[key][0][wanted:]
                driver.take(driver.core.finish_sequence(driver.sequence_ids[key][0]))


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(arrivals, min_size=1, max_size=10),
    num_usable=st.integers(4, 40),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(3, 8),
    token_budget=st.integers(3, 40),
    max_draft_tokens=st.integers(1, 9),
    max_ngram=st.integers(1, 3),
    has_prefix_cache=st.sampled_from([True, True, False]),
    sub_blocks=st.booleans(),
)
def test_every_request_ends_once_with_the_answer_it_gets_alone(
    plan: list[Arrival],
    num_usable: int,
    block_size: int,
    max_num_seqs: int,
    token_budget: int,
    max_draft_tokens: int,
    max_ngram: int,
    has_prefix_cache: bool,
    sub_blocks: bool,
) -> None:
    """With aborts, preemption, forks, ends by text and cache hits; the cache gives what it gave, or later answers would differ."""
    driver = driver_of(
        num_blocks=1 + num_usable,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_draft_tokens=max_draft_tokens,
        max_ngram=max_ngram,
        has_prefix_cache=has_prefix_cache,
        sub_blocks=sub_blocks and has_prefix_cache,
        choose=mostly_in_circles,
        max_model_len=64,
    )
    SpeculatingScenario(driver, plan).run()


def test_drafts_are_made_and_some_fail_in_the_property_above() -> None:
    """Or it would say nothing."""
    driver = driver_of(choose=mostly_in_circles)
    for start in range(4):
        driver.add((start, 5, 6, 7), max_tokens=200)
    driver.run()
    stats = driver.core.stats()
    assert 50 < stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.parametrize("stop", [33, 34, 35])
def test_a_stop_token_in_the_middle_of_a_step_ends_the_choice_there(stop: int) -> None:
    fast, slow = driver_of(), driver_of(speculation="off")
    ends: list[dict[str, Any]] = [
        {"eos_ids": (stop,)},
        {"eos_ids": (stop,), "ignore_eos": True},
        {"stop_token_ids": (stop,)},
        {"stop_token_ids": (stop,), "min_tokens": 8},
    ]
    for end in ends:
        key = fast.add(CYCLE * 2, max_tokens=30, **end)
        assert key == slow.add(CYCLE * 2, max_tokens=30, **end)
        assert fast.run() < slow.run()
        assert fast.output(key) == slow.output(key)
        assert fast.finish_reasons[key] == slow.finish_reasons[key]
        assert fast.stop_reasons[key] == slow.stop_reasons[key]
        assert (len(fast.output(key)) == 30) == ("ignore_eos" in end)


def test_max_tokens_cuts_drafts_and_no_slot_is_taken_for_more() -> None:
    driver = driver_of(num_blocks=1 + 4, block_size=4, max_draft_tokens=8)
    for max_tokens in range(1, 7):  # 10 + 6 tokens, of which the last is never computed
        key = driver.add(CYCLE * 2, max_tokens=max_tokens)
        driver.run()
        assert len(driver.output(key)) == max_tokens
        assert max(entry.seq_len for batch in driver.runner.batches for entry in batch.entries) <= 10 + max_tokens - 1
        driver.runner.batches.clear()


def test_logprobs_come_with_every_token_of_a_step() -> None:
    driver = driver_of()
    driver.add(CYCLE * 2, max_tokens=20, logprobs=2)
    events: list[CoreEvent] = []
    while (batch := driver.core.schedule(0.0)) is not None:
        events += driver.core.apply(driver.runner.execute(batch))
    tokens = [event.token for event in events if isinstance(event, ChoiceAdvanced) and event.token is not None]
    assert [token.token_id for token in tokens] == continuation(CYCLE * 2, 20, choose=in_circles)
    assert all(token.logprob == -0.25 and len(token.top) == 2 for token in tokens)


def test_choices_draft_apart_once_they_are_forked() -> None:
    driver = driver_of(choose=mostly_in_circles, max_draft_tokens=4)
    key = driver.add((5, 6, 7), max_tokens=60, n=3, temperature=1.0)
    driver.run()
    for index in range(3):
        expected = continuation((5, 6, 7), 60, seed=choice_seed(SEED, index), choose=mostly_in_circles)
        assert driver.output(key, index) == expected
    assert driver.core.stats().accepted_draft_tokens > 0


# ── Slots, budget and the cache ──────────────────────────────────────────────────────────────────


def test_slots_of_wrong_drafts_are_given_back_and_nothing_of_them_is_published() -> None:
    driver = driver_of(block_size=2, choose=choose_by_hash, min_ngram=1, max_draft_tokens=6)
    prompt = (7, 8, 9, 7, 8, 9, 7, 8, 9)
    key = driver.add(prompt, max_tokens=4)
    driver.step()
    (sequence,) = driver.core._sequences.values()
    sequence.tokens[-1] = 7  # as if it had been sampled: the prompt says what comes next, and the hash says otherwise
    batch = driver.core.schedule(0.0)
    assert batch is not None
    assert drafts_of(batch) == [2]  # at most four tokens in all
    assert sequence.table.num_tokens == sequence.num_tokens + 2
    driver.take(driver.core.apply(driver.compute(batch)))
    assert sequence.table.num_tokens == sequence.num_computed == sequence.num_tokens - 1 == 10
    assert sequence.num_published == 5
    driver.run()
    assert len(driver.output(key)) == 4
    again = driver.add((*prompt, 7, 8, 9), max_tokens=1)
    driver.run()
    assert driver.cached(again) == 10  # not the twelve that were computed


def test_drafts_take_what_the_budget_leaves_and_wait_for_no_one() -> None:
    driver = driver_of(token_budget=9, max_num_seqs=4, max_draft_tokens=8)
    first = driver.add(CYCLE * 2, max_tokens=40)
    while not driver.output(first):
        driver.step()
    for _ in range(2):  # the price of a draft is learned: without it half of the budget would be too much
        driver.step()
    driver.add(range(50, 80), max_tokens=1)
    batch = driver.step()
    assert batch is not None
    assert batch.num_tokens <= 9
    prefill = [len(entry.token_ids) for entry in batch.entries if not entry.seeds]
    assert prefill == [8]  # all that the decode of the first one left: no draft came before the prompt


def test_drafts_do_not_preempt_nor_evict_a_sequence() -> None:
    driver = driver_of(num_blocks=1 + 9, block_size=4, max_num_seqs=2, max_draft_tokens=8)
    keys = [driver.add(CYCLE * 2, max_tokens=8), driver.add((*CYCLE, *CYCLE), max_tokens=8)]
    driver.run()
    assert driver.core.stats().preemptions == 0
    assert [len(driver.output(key)) for key in keys] == [8, 8]


def test_a_full_pool_leaves_drafts_the_slots_of_the_last_block() -> None:
    driver = driver_of(num_blocks=1 + 3, block_size=8, max_draft_tokens=16, has_prefix_cache=False)
    key = driver.add(CYCLE * 2, max_tokens=14)
    driver.step()
    table = next(iter(driver.core._sequences.values())).table
    held = driver.core._pool.take(1)
    batch = driver.core.schedule(0.0)
    assert batch is not None
    assert len(table.block_ids) == 2
    assert drafts_of(batch) == [16 - 11]
    driver.take(driver.core.apply(driver.runner.execute(batch)))
    driver.core._pool.release(held)
    driver.run()
    assert len(driver.output(key)) == 14


def test_a_request_aborted_in_a_step_with_drafts_leaves_nothing() -> None:
    driver = driver_of()
    key = driver.add(CYCLE * 2, max_tokens=40)
    driver.step()
    batch = driver.core.schedule(0.0)
    assert batch is not None
    assert drafts_of(batch) == [8]
    driver.core.abort(key)
    assert driver.core.apply(driver.compute(batch)) == []
    driver.core.check()
    assert driver.core.is_idle


def test_an_output_that_confirms_what_was_not_guessed_is_refused() -> None:
    driver = driver_of()
    driver.add(CYCLE * 2, max_tokens=40)
    driver.step()
    batch = driver.core.schedule(0.0)
    assert batch is not None
    (entry,) = batch.entries

    def output(*ids: int) -> StepOutput:
        samples = tuple(SampledToken(token_id=token_id) for token_id in ids)
        return StepOutput(
            step_id=batch.step_id,
            outputs=(EntryOutput(sequence_id=entry.sequence_id, samples=samples),),
            compute_s=0.1,
        )

    for wrong in ((), (*entry.token_ids[1:], 1, 2), (99, 98)):
        with pytest.raises(BadStepOutput):
            driver.core.apply(output(*wrong))
    driver.take(driver.core.apply(output(*entry.token_ids[1:3], 99)))
    driver.core.check()


def test_a_fault_in_a_step_with_drafts_fails_the_request() -> None:
    driver = driver_of()
    key = driver.add(CYCLE * 2, max_tokens=40)
    driver.step()
    driver.runner.poison = lambda entry: "not finite" if entry.num_drafts else None
    driver.run()
    assert isinstance(driver.failed[key], NonFiniteLogits)


# ── Streams ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_stop_string_in_the_middle_of_a_step_ends_text_tokens_and_usage_there() -> None:
    async with (
        running_engine(choose=in_circles, speculation="ngram") as fast,
        running_engine(choose=in_circles) as slow,
    ):
        tokenizer = fast.tokenizer
        stop = tokenizer.token_text(CYCLE[3])
        for n, min_tokens in ((1, 0), (1, 9), (3, 6)):
            request = make_request(CYCLE * 2, max_tokens=40, stop=(stop,), min_tokens=min_tokens, n=n)
            answer, expected = await collect(fast.engine, request), await collect(slow.engine, request)
            assert expected.last().stop_reason == stop
            for index in range(n):
                assert answer.text(index) == expected.text(index)
                assert answer.token_ids(index) == expected.token_ids(index)
                assert answer.last(index).stop_reason == stop
            assert answer.finished == expected.finished
        assert fast.engine.stats().accepted_draft_tokens > 0
        assert fast.engine.stats().steps < slow.engine.stats().steps


async def test_streams_carry_several_tokens_of_a_step_in_order() -> None:
    async with running_engine(choose=in_circles, speculation="ngram") as it:
        answer = await collect(it.engine, make_request(CYCLE * 2, max_tokens=50, logprobs=1))
        assert answer.token_ids() == continuation(CYCLE * 2, 50, choose=in_circles)
        assert answer.finished.usage.completion_tokens == 50
        assert sum(len(delta.logprobs or ()) for delta in answer.deltas) == 50
        assert len(answer.deltas) <= 7


# ── When it pays ─────────────────────────────────────────────────────────────────────────────────


def test_wrong_drafts_switch_a_sequence_off_and_now_and_then_it_is_tried_again() -> None:
    driver = driver_of(
        choose=lambda context, seed: 5 + choose_by_hash(context, seed) % 100, max_ngram=1, num_blocks=257
    )
    driver.add(range(5, 105), max_tokens=880)
    drafted = [0]
    while (batch := driver.step()) is not None:
        drafted.append(drafted[-1] + sum(drafts_of(batch)))
    late = drafted[-1] - drafted[-201]
    assert 0 < late <= 200 / RETRY_AFTER + 1


@pytest.mark.parametrize(("price", "pause"), [(0.1, RETRY_AFTER), (0.5, round(0.5 / RETRY_SHARE))])
def test_tries_of_what_does_not_pay_are_as_rare_as_they_are_dear_and_follow_each_other_once_right(
    price: float, pause: int
) -> None:
    speculation = Speculation(SchedulerConfig(speculation="ngram", max_ngram=1))
    drafter = speculation.new_drafter(20)
    tokens = [7] * 20
    while drafts := speculation.propose(drafter, tokens, 100, price):
        speculation.learn(drafter, len(drafts), 0)
        tokens.append(7)
    tried = len(tokens)
    while not (drafts := speculation.propose(drafter, tokens, 100, price)):
        tokens.append(7)
    assert len(drafts) == 1
    assert len(tokens) - tried == pytest.approx(pause, abs=1)
    speculation.learn(drafter, 1, 1)
    tokens.append(7)
    assert len(speculation.propose(drafter, tokens, 100, price)) == 1


def test_a_large_batch_drafts_only_what_is_sure() -> None:
    speculation = Speculation(SchedulerConfig(speculation="ngram"))
    for _ in range(200):
        for num_tokens in (1, 4, 9, 32, 64):
            speculation.observe(num_tokens, 0.010 + 0.0005 * num_tokens)
    alone, crowd = speculation.price(1), speculation.price(64)  # whatever prompts are computed in the same step
    assert alone == pytest.approx(MARGIN * 0.0005 / 0.0105, rel=0.05)
    assert crowd == pytest.approx(MARGIN * 64 * 0.0005 / 0.042, rel=0.05)
    likely, sure = [1, 2, 3, 9, 1, 2, 3], [*CYCLE * 3]
    assert [num_drafts_of(speculation, tokens, 0, alone) for tokens in (likely, sure)] == [8, 8]
    assert [num_drafts_of(speculation, tokens, 0, crowd) for tokens in (likely, sure)] == [0, 2]


def test_steps_wait_for_tokens_to_draft_from_only_while_drafts_bring_something() -> None:
    speculation = Speculation(SchedulerConfig(speculation="ngram"))
    hopeful, hopeless = speculation.new_drafter(10), speculation.new_drafter(10)
    hopeless.gain = 0.01
    assert speculation.should_wait(2, [hopeful, hopeless])
    assert speculation.should_wait(2, [None])
    assert not speculation.should_wait(2, [])
    waits = [speculation.should_wait(2, [hopeless, hopeless]) for _ in range(10 * (STEPS_AHEAD + 1))]
    assert sum(waits) == 10
    for _ in range(100):  # every token takes as long as if it were alone, and longer
        speculation.observe(1, 0.001)
        speculation.observe(64, 0.1)
    assert speculation.price(2) >= 1.0
    assert not speculation.should_wait(2, [hopeful])


def test_a_text_that_begins_to_repeat_itself_late_is_noticed() -> None:
    def late(context: Sequence[int], seed: int) -> int:
        return 5 + choose_by_hash(context, seed) % 200 if len(context) < 150 else in_circles(context, seed)

    driver = driver_of(choose=late, num_blocks=257)
    key = driver.add(range(10, 20), max_tokens=440)
    num_steps = driver.run()
    assert driver.output(key) == continuation(range(10, 20), 440, choose=late)
    assert num_steps < 140 + 300 / 9 + 3 * STEPS_AHEAD  # the text before it, the rounds, and until they are noticed


def num_drafts_of(speculation: Speculation, tokens: Sequence[int], num_prompt_tokens: int, price: float = 0.5) -> int:
    """Return how many drafts a sequence gets that nothing is known of but its tokens."""
    return len(speculation.propose(speculation.new_drafter(num_prompt_tokens), [*tokens], 100, price))


def test_longer_matches_are_trusted_further_and_those_with_the_answer_more_than_those_with_the_prompt() -> None:
    speculation = Speculation(SchedulerConfig(speculation="ngram"))
    one, three, many = [1, 2, 3, 9, 1], [1, 2, 3, 9, 1, 2, 3], [*CYCLE * 3]
    for price, in_answer, in_prompt in ((0.3, (1, 8, 8), (0, 1, 6)), (0.7, (0, 1, 8), (0, 0, 1))):
        assert tuple(num_drafts_of(speculation, tokens, 0, price) for tokens in (one, three, many)) == in_answer
        assert tuple(num_drafts_of(speculation, tokens, 99, price) for tokens in (one, three, many)) == in_prompt


def test_a_sequence_begins_with_what_others_have_seen_and_soon_knows_better() -> None:
    """At this price a draft behind one known token is worth it while more than half of them are right."""
    speculation = Speculation(SchedulerConfig(speculation="ngram", max_ngram=1))
    tokens = [1, 2, 3, 9, 1]
    other, ours = speculation.new_drafter(0), speculation.new_drafter(0)

    def show(drafter: Drafter, is_right: bool, times: int) -> None:
        for _ in range(times):
            drafter.propose(tokens, 1, 0.0)
            speculation.learn(drafter, 1, int(is_right))

    show(other, False, 200)
    assert not speculation.propose(ours, tokens, 1, 0.5)
    show(ours, True, 8)
    assert speculation.propose(ours, tokens, 1, 0.5) == (2,)
    show(other, True, 400)
    assert num_drafts_of(speculation, tokens, 0) >= 1
    show(ours, False, 40)
    assert not speculation.propose(ours, tokens, 1, 0.5)


def test_the_line_of_step_times_is_found_and_an_outlier_does_not_move_it_far() -> None:
    line = StepTime()
    assert line.expected_s(3) == 0.0
    line.observe(1, 0.02)
    assert line.expected_s(1) == pytest.approx(0.02)
    assert line.slope == pytest.approx(0.02 / 16)  # assumed as long as nothing says otherwise
    for step in range(400):
        num_tokens = 1 + step * 7 % 13
        line.observe(num_tokens, 0.013 + 0.0003 * num_tokens)
    assert line.slope == pytest.approx(0.0003, rel=0.15)
    before = line.slope
    line.observe(9, 5.0)
    assert line.slope < 5 * before + 0.001


def test_steps_of_one_size_leave_the_assumption() -> None:
    line = StepTime()
    for _ in range(100):
        line.observe(4, 0.02)
    assert line.expected_s(4) == pytest.approx(0.02)
    assert 0.0 < line.slope < 0.02 / 16
