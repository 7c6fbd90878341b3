"""Steps made ahead: one is computed while the next is already there. Answers, blocks and endings are those of steps made in turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import InvariantBroken
from service.engine.batch import (
    UNKNOWN_TOKEN,
    EntryOutput,
    SampledToken,
    SequenceId,
    StepBatch,
    StepEntry,
    StepOutput,
    complete,
)
from service.engine.core import BadStepOutput
from service.errors import NonFiniteLogits, StepFailed
from service.messages import SamplingParams
from tests.engine.driver import SEED, CoreDriver, prompt_of
from tests.engine.test_core_properties import Arrival, Scenario, arrivals
from tests.fakes import Choose, choose_by_hash, continuation

EOS = 2


@pytest.fixture(scope="module", autouse=True)
def overlaps() -> None:
    """Run once: each of these tests says how its steps are made."""


def choose_eos_after(num_tokens: int) -> Choose:
    """Return a choice that ends a text of so many tokens, prompt included."""

    def choose(context: Sequence[int], seed: int) -> int:
        return EOS if len(context) == num_tokens else choose_by_hash(context, seed)

    return choose


def ahead(**options: object) -> CoreDriver:
    """A driver whose steps overlap, and which makes none ahead by itself."""
    driver = CoreDriver(overlap=True, **options)  # type: ignore[arg-type]
    driver.plans_ahead = False
    return driver


def two_steps(driver: CoreDriver) -> tuple[StepBatch, StepBatch]:
    """Make a step, and the next one ahead."""
    first, second = driver.core.schedule(0.0), driver.core.schedule(0.0)
    assert first is not None
    assert second is not None
    driver.core.check()
    return first, second


def apply(driver: CoreDriver, batch: StepBatch) -> None:
    driver.take(driver.core.apply(driver.compute(batch)))
    driver.core.check()


# ── Tokens to come ───────────────────────────────────────────────────────────────────────────────────


def test_the_next_step_is_made_before_the_token_that_it_computes_is_known() -> None:
    driver = ahead()
    key = driver.add(prompt_of(6), 3)
    first, second = two_steps(driver)
    assert [len(entry.token_ids) for entry in first.entries] == [6]
    (entry,) = second.entries
    assert (entry.token_ids, entry.awaits_token, entry.start) == ((UNKNOWN_TOKEN,), True, 6)
    assert driver.core.schedule(0.0) is None  # two at most
    apply(driver, first)
    third = driver.core.schedule(0.0)
    assert third is not None
    apply(driver, second)
    assert driver.core.schedule(0.0) is None  # the third token is the last one, and known to be
    apply(driver, third)
    assert driver.output(key) == continuation(prompt_of(6), 3)
    assert driver.core.is_idle


def test_steps_made_in_turn_are_complete() -> None:
    driver = CoreDriver(overlap=False)
    driver.add(prompt_of(6), 3)
    batch = driver.core.schedule(0.0)
    assert batch is not None
    assert driver.core.schedule(0.0) is None
    driver.run()
    assert not any(entry.awaits_token for batch in driver.runner.batches for entry in batch.entries)


def test_chunks_of_a_prompt_are_made_ahead_too() -> None:
    driver = ahead(token_budget=8)
    driver.add(prompt_of(20), 2)
    first, second = two_steps(driver)
    assert [(e.start, len(e.token_ids), e.awaits_token) for e in (*first.entries, *second.entries)] == [
        (0, 8, False),
        (8, 8, False),
    ]


def entry_of(sequence_id: int, token_ids: tuple[int, ...], **more: object) -> StepEntry:
    return StepEntry(
        sequence_id=SequenceId(sequence_id),
        token_ids=token_ids,
        start=4,
        block_ids=(1, 2),
        sampling=SamplingParams(),
        seeds=(1,),
        **more,  # type: ignore[arg-type]
    )


def output_of(*samples: tuple[int, int]) -> StepOutput:
    outputs = tuple(
        EntryOutput(sequence_id=SequenceId(sequence_id), samples=(SampledToken(token_id=token_id),))
        for sequence_id, token_id in samples
    )
    return StepOutput(step_id=1, outputs=outputs, compute_s=0.0)


def test_a_complete_step_has_the_tokens_of_the_step_before_and_the_history_that_penalties_act_on() -> None:
    known = entry_of(3, (8, 9))
    batch = StepBatch(
        step_id=2,
        entries=(
            entry_of(1, (UNKNOWN_TOKEN,), awaits_token=True),
            entry_of(2, (UNKNOWN_TOKEN,), awaits_token=True, prompt_token_ids=(5,), output_token_ids=(6, 7)),
            known,
        ),
        copies=((1, 2),),
    )
    done = complete(batch, output_of((2, 22), (1, 11), (3, 33)))
    assert done.entries == (
        entry_of(1, (11,)),
        entry_of(2, (22,), prompt_token_ids=(5,), output_token_ids=(6, 7, 22)),
        known,
    )
    assert (done.step_id, done.copies) == (2, ((1, 2),))


@pytest.mark.parametrize("previous", [None, output_of((2, 22))])
def test_a_token_that_never_came_is_one_that_a_model_can_compute(previous: StepOutput | None) -> None:
    batch = StepBatch(step_id=2, entries=(entry_of(1, (UNKNOWN_TOKEN,), awaits_token=True),))
    assert complete(batch, previous).entries == (entry_of(1, (UNKNOWN_TOKEN,)),)


def test_penalties_see_the_token_that_was_to_come() -> None:
    driver = CoreDriver(overlap=True)
    key = driver.add(prompt_of(6), 8, repetition_penalty=1.5, min_tokens=3, eos_ids=(EOS,))
    driver.run()
    output = driver.output(key)
    histories = [entry.output_token_ids for batch in driver.runner.batches for entry in batch.entries]
    assert histories == [tuple(output[:count]) for count in range(8)]
    counts = [entry.num_output_tokens for batch in driver.runner.batches for entry in batch.entries]
    assert counts == list(range(8))  # what min_tokens is compared with


def test_choices_are_forked_from_what_is_known() -> None:
    driver = ahead()
    key = driver.add(prompt_of(6), 4, n=3, temperature=1.0)
    beside = driver.add(prompt_of(5, start=3), 4)
    first, second = two_steps(driver)
    assert len(first.entries) == 2
    assert len(second.entries) == 1  # the leader's three next tokens must be known first
    apply(driver, first)
    third = driver.core.schedule(0.0)
    assert third is not None
    assert len(third.entries) == 4
    assert third.copies
    apply(driver, second)
    driver.plans_ahead = True
    driver.run()
    for index in range(3):
        assert driver.output(key, index) == driver.expected(key, 4, seed=SEED, index=index)
    assert driver.output(beside) == continuation(driver.prompts[beside], 4)


# ── Taking a step back ───────────────────────────────────────────────────────────────────────────────


def test_a_step_taken_back_is_made_again_with_the_request_that_has_come() -> None:
    driver = ahead()
    key = driver.add(prompt_of(6), 4)
    first, second = two_steps(driver)
    late = driver.add(prompt_of(5, start=3), 4)
    assert driver.core.recall(second.step_id)
    driver.core.check()
    again = driver.core.schedule(0.0)
    assert again is not None
    assert again.entries[0] == second.entries[0]
    assert len(again.entries) == 2
    apply(driver, first)
    apply(driver, again)
    assert len(driver.output(late)) == 1
    driver.run()
    assert driver.output(key) == continuation(driver.prompts[key], 4)
    assert driver.output(late) == continuation(driver.prompts[late], 4)


def test_only_the_newest_of_two_steps_can_be_taken_back_and_only_without_copies() -> None:
    driver = ahead()
    driver.add(prompt_of(6), 4, n=2, temperature=1.0)
    driver.add(prompt_of(5, start=3), 9)
    first, second = two_steps(driver)
    assert not driver.core.recall(first.step_id)
    apply(driver, first)
    assert not driver.core.recall(second.step_id)  # the runner may have begun it
    third = driver.core.schedule(0.0)
    assert third is not None
    assert third.copies
    assert not driver.core.recall(third.step_id)
    apply(driver, second)
    driver.run()


def test_a_sequence_aborted_in_a_step_that_is_taken_back_gives_its_blocks_back() -> None:
    driver = ahead(token_budget=8)
    driver.add(prompt_of(20), 4)
    key = driver.add(prompt_of(3, start=3), 4)
    first, second = two_steps(driver)
    aborted = next(e for e in second.entries if e.sequence_id == driver.core._requests[key].sequences[0].id)
    driver.core.abort(key)
    used = driver.core.stats().pool.used
    assert driver.core.recall(second.step_id)
    driver.core.check()
    in_first = {entry.sequence_id for entry in first.entries}
    assert driver.core.stats().pool.used == used - (aborted.sequence_id not in in_first)
    apply(driver, first)
    driver.run()
    assert driver.core.stats().pool.used == 0


# ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_computed_behind_an_end_is_dropped_and_its_blocks_are_held_until_then() -> None:
    driver = ahead(choose=choose_eos_after(8), num_blocks=9)
    key = driver.add(prompt_of(8), 5, eos_ids=(EOS,))
    first, second = two_steps(driver)
    apply(driver, first)
    assert driver.finished[key].num_output_tokens == 1
    assert driver.core.stats().pool.used == 3  # the second step writes to the third block
    other = driver.add(prompt_of(20, start=3), 2)
    third = driver.core.schedule(0.0)
    assert third is not None
    assert not {*third.entries[0].block_ids} & {*second.entries[0].block_ids}
    apply(driver, second)
    assert driver.core.stats().pool.used == 5
    assert driver.output(key) == [EOS]
    driver.run()
    assert driver.output(other) == continuation(driver.prompts[other], 2)


def test_an_end_by_text_drops_the_token_that_is_computed() -> None:
    driver = ahead()
    key = driver.add(prompt_of(6), 8)
    first, second = two_steps(driver)
    apply(driver, first)
    driver.take(driver.core.finish_sequence(driver.sequence_ids[key][0]))
    assert key in driver.finished
    assert driver.core.schedule(0.0) is None
    apply(driver, second)
    assert driver.output(key) == continuation(prompt_of(6), 1)
    assert driver.core.is_idle
    driver.core.check()


def test_an_abort_with_two_steps_in_flight_keeps_the_blocks_until_both_have_landed() -> None:
    driver = ahead()
    key = driver.add(prompt_of(8), 8)
    first, second = two_steps(driver)
    assert driver.core.abort(key)
    used = driver.core.stats().pool.used
    assert used == 3
    apply(driver, first)
    assert driver.core.stats().pool.used == used
    assert not driver.core.is_idle
    apply(driver, second)
    assert driver.core.stats().pool.used == 0
    assert driver.core.is_idle
    assert key not in driver.started


def test_giving_blocks_back_under_a_step_in_flight_is_noticed() -> None:
    """The check that all these tests rely on can fail."""
    driver = ahead()
    driver.add(prompt_of(8), 8)
    two_steps(driver)
    (sequence,) = driver.core._scheduler.running
    sequence.table.truncate(4)
    with pytest.raises(InvariantBroken, match="gave back"):
        driver.core.check()


def test_steps_are_applied_in_order() -> None:
    driver = ahead()
    driver.add(prompt_of(8), 8)
    first, second = two_steps(driver)
    early = StepOutput(step_id=second.step_id, outputs=(), compute_s=0.0)
    with pytest.raises(BadStepOutput, match="not the oldest"):
        driver.core.apply(early)
    apply(driver, first)
    apply(driver, second)


# ── Failures ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_step_fails_its_requests_and_what_was_built_on_it_is_neither_used_nor_offered() -> None:
    driver = ahead(token_budget=8)
    doomed = driver.add(prompt_of(16), 8)
    driver.step()
    first = driver.core.schedule(0.0)
    beside = driver.add(prompt_of(3, start=3), 3)
    second = driver.core.schedule(0.0)
    assert first is not None
    assert second is not None
    assert len(second.entries) == 2
    driver.compute(first)  # it may have written before it failed
    driver.take(driver.core.fail_step(first.step_id, StepFailed("injected")))
    driver.core.check()
    driver.previous = None
    assert list(driver.failed) == [doomed]
    apply(driver, second)
    assert driver.core.stats().pool.used == 1  # of the other one alone
    assert driver.core.stats().pool.cached == 2  # what the first step computed of the doomed one
    driver.run()
    assert driver.output(beside) == continuation(driver.prompts[beside], 3)


def test_impossible_numbers_are_not_offered_to_others() -> None:
    driver = ahead()
    driver.runner.poison = lambda entry: "NaN"
    key = driver.add(prompt_of(8), 8)
    first, second = two_steps(driver)
    apply(driver, first)
    assert isinstance(driver.failed[key], NonFiniteLogits)
    apply(driver, second)
    assert driver.core.stats().pool.cached == 0
    assert driver.core.is_idle


# ── Room ─────────────────────────────────────────────────────────────────────────────────────────────


def test_nobody_is_preempted_under_a_step_in_flight() -> None:
    driver = ahead(num_blocks=1 + 6, block_size=4)
    keys = [driver.add(prompt_of(7, start=start), 12) for start in range(3)]
    num_refused = 0
    while not driver.core.is_idle:
        num_in_flight, before = len(driver.core._flight), driver.core.stats().preemptions
        batch = driver.core.schedule(0.0)
        driver.core.check()
        if num_in_flight:
            assert driver.core.stats().preemptions == before
            num_refused += batch is None
        if (oldest := driver.schedule()) is not None and (batch is None or num_in_flight):
            apply(driver, oldest)
    assert driver.core.stats().preemptions > 0
    assert num_refused > 0
    for key in keys:
        assert driver.output(key) == continuation(driver.prompts[key], 12)


def test_an_urgent_request_waits_for_the_step_in_flight_and_then_takes_the_slot() -> None:
    driver = ahead(max_num_seqs=1)
    slow = driver.add(prompt_of(6), 20, priority=5)
    driver.step()
    first = driver.core.schedule(0.0)
    assert first is not None
    urgent = driver.add(prompt_of(5, start=3), 2)
    assert driver.core.schedule(0.0) is None
    assert driver.core.stats().preemptions == 0
    apply(driver, first)
    driver.step()
    assert driver.core.stats().preemptions == 1
    assert len(driver.output(urgent)) == 1
    driver.run()
    assert driver.output(slow) == continuation(driver.prompts[slow], 20)


# ── The prefix cache ─────────────────────────────────────────────────────────────────────────────────


def test_a_block_is_offered_when_the_step_that_fills_it_has_been_applied() -> None:
    driver = ahead(token_budget=8)
    driver.add(prompt_of(20), 2)
    first, second = two_steps(driver)
    pool = driver.core._pool
    assert pool.num_findable == 0
    apply(driver, first)
    assert pool.num_findable == 2
    apply(driver, second)
    assert pool.num_findable == 4


def test_the_tail_of_an_answer_is_offered_when_nothing_writes_behind_it_any_more() -> None:
    driver = ahead(sub_blocks=True, block_size=16, choose=choose_eos_after(8))
    driver.add(prompt_of(5), 9, eos_ids=(EOS,))
    driver.step()
    driver.step()
    first, second = two_steps(driver)
    apply(driver, first)
    assert driver.core._pool.num_findable == 0
    apply(driver, second)
    assert driver.core._pool.num_findable == 1


# ── At random ────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(arrivals, min_size=1, max_size=12),
    num_usable=st.integers(4, 40),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(3, 8),
    token_budget=st.integers(3, 40),
    is_ahead=st.lists(st.booleans(), min_size=1, max_size=12),
    is_recalled=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_answers_do_not_depend_on_which_steps_were_made_ahead(
    plan: list[Arrival],
    num_usable: int,
    block_size: int,
    max_num_seqs: int,
    token_budget: int,
    is_ahead: list[bool],
    is_recalled: list[bool],
) -> None:
    """With aborts, texts that end, forks and preemptions; `is_ahead` says for which steps the loop was in time."""
    driver = CoreDriver(
        num_blocks=1 + num_usable,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=64,
        overlap=True,
    )
    Scenario(driver, plan, is_ahead, is_recalled).run()


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=10),
    gaps=st.lists(st.integers(0, 2), min_size=10, max_size=10),
    num_usable=st.integers(12, 40),
    failing=st.sets(st.integers(1, 30), max_size=4),
)
def test_texts_that_end_by_themselves_end_alike_made_ahead_and_in_turn(
    prompts: list[tuple[int, int]], gaps: list[int], num_usable: int, failing: set[int]
) -> None:
    """About one token in six ends a text, which the step made ahead does not know; some steps fail."""

    def choose(context: Sequence[int], seed: int) -> int:
        token = choose_by_hash(context, seed)
        return EOS if token % 6 == 0 else token

    driver = CoreDriver(num_blocks=1 + num_usable, max_num_seqs=4, token_budget=16, overlap=True, choose=choose)  # type: ignore[arg-type]
    keys = []
    for (stem, length), gap in zip(prompts, gaps, strict=False):
        keys.append(driver.add(prompt_of(length, start=stem), 12, eos_ids=(EOS,)))
        for _ in range(gap):
            step_or_fail(driver, failing)
    while not driver.core.is_idle:
        step_or_fail(driver, failing)
    assert driver.core.stats().pool.used == 0
    for key in keys:
        whole = continuation(driver.prompts[key], 12, choose=choose)
        whole = whole[: whole.index(EOS) + 1] if EOS in whole else whole
        got = driver.output(key)
        assert got == whole if key in driver.finished else got == whole[: len(got)]
        assert (key in driver.finished) != (key in driver.failed)


def step_or_fail(driver: CoreDriver, failing: set[int]) -> None:
    batch = driver.schedule()
    if batch is None:
        return
    output = driver.compute(batch)
    if batch.step_id in failing:
        driver.previous = None
        driver.take(driver.core.fail_step(batch.step_id, StepFailed("injected")))
    else:
        driver.take(driver.core.apply(output))
    driver.core.check()
