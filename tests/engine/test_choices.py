"""Several choices of one prompt, and how choices end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from service.engine.batch import EntryOutput, SampledToken, StepOutput
from service.errors import InvalidRequest, NonFiniteLogits, StepFailed
from tests.engine.driver import SEED, CoreDriver, prompt_of
from tests.fakes import choose_by_hash, continuation

EOS = 2
SECOND_EOS = 4


# ── n > 1 ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [10, 12, 13])
def test_choices_share_the_prompt_and_each_is_what_its_seed_gives(length: int) -> None:
    """BLK-12, SMP-14: the prompt is computed once, a shared tail is copied for all but one owner, before the writes."""
    driver = CoreDriver()
    key = driver.add(prompt_of(length), n=4, temperature=1.0, max_tokens=9)
    driver.run()
    outputs = [driver.output(key, index) for index in range(4)]
    assert outputs == [driver.expected(key, 9, seed=SEED, index=index) for index in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    assert driver.finish_reasons[key] == dict.fromkeys(range(4), "length")
    assert sum(len(entry.token_ids) for batch in driver.runner.batches for entry in batch.entries) == length + 4 * 8
    copies = [copy for batch in driver.runner.batches for copy in batch.copies]
    assert len(copies) == len(set(copies)) == (3 if length % 4 else 0)
    assert driver.finished[key].num_output_tokens == 36


def test_full_prompt_blocks_stay_shared_while_the_choices_run() -> None:
    driver = CoreDriver(num_blocks=40)
    driver.add(prompt_of(40), n=8, temperature=1.0, max_tokens=6)
    for _ in range(4):
        driver.step()
    pool = driver.core.stats().pool
    assert pool.shared == 10
    assert pool.used == 10 + 8
    driver.run()


def test_the_first_of_several_choices_answers_like_the_only_one() -> None:
    driver = CoreDriver()
    alone = driver.add(prompt_of(10), temperature=1.0, seed=99)
    several = driver.add(prompt_of(10), temperature=1.0, seed=99, n=3)
    driver.run()
    assert driver.output(alone) == driver.output(several, 0)


def test_choices_that_end_at_different_times_do_not_disturb_each_other() -> None:
    """SMP-14: one choice ends by eos at once, one in between, one by length."""
    seen: dict[tuple[int, ...], int] = {}

    def choose(context: Sequence[int], seed: int) -> int:
        rank = seen.setdefault((seed,), len(seen))  # choice 0 ends with its first token, choice 1 with its third
        return EOS if len(context) - 9 == 2 * rank else choose_by_hash(context, seed)

    driver = CoreDriver(choose=choose)
    key = driver.add(prompt_of(9), n=3, temperature=1.0, max_tokens=4, eos_ids=(EOS,))
    driver.run()
    assert [len(driver.output(key, index)) for index in range(3)] == [1, 3, 4]
    assert driver.finish_reasons[key] == {0: "stop", 1: "stop", 2: "length"}


def test_choices_survive_preemption_one_by_one() -> None:
    """SCH-06: n * max_tokens is far more than the pool; the choices run as far as it goes, then in turn."""
    driver = CoreDriver(num_blocks=1 + 20, block_size=4)
    key = driver.add(prompt_of(10), n=6, temperature=1.0, max_tokens=50)
    driver.run()
    for index in range(6):
        assert driver.output(key, index) == driver.expected(key, 50, seed=SEED, index=index)
    assert driver.core.stats().preemptions > 0


def test_as_many_choices_as_sequences_may_run_and_one_more_is_refused_at_once() -> None:
    """SCH-06: the limit is named."""
    driver = CoreDriver(max_num_seqs=5)
    key = driver.add(prompt_of(6), n=5, temperature=1.0)
    driver.run()
    assert sorted(driver.finish_reasons[key]) == [0, 1, 2, 3, 4]
    for n in (6, 128, 10**6):
        with pytest.raises(InvalidRequest, match=f"n is {n} and at most 5") as caught:
            driver.add(prompt_of(6), n=n)
        assert caught.value.param == "n"
    assert driver.core.is_idle


def test_choices_wait_until_all_of_them_have_a_slot() -> None:
    driver = CoreDriver(max_num_seqs=4)
    others = [driver.add(prompt_of(5, start=i), max_tokens=5 + i) for i in range(3)]
    driver.step()
    key = driver.add(prompt_of(6), n=3, temperature=1.0)
    while driver.step() is not None:
        assert driver.core.stats().running <= 4
    assert len(driver.output(key, 2)) == 8
    assert all(key in driver.finished for key in others)


def test_a_leader_keeps_the_slots_of_its_choices_while_its_prompt_is_computed() -> None:
    driver = CoreDriver(max_num_seqs=4, token_budget=8)
    driver.add(prompt_of(40), n=3, temperature=1.0)
    driver.step()
    for start in range(3):
        driver.add(prompt_of(4, start=start), max_tokens=30)
    most = 0
    while driver.step() is not None:
        most = max(most, driver.core.stats().running)
    assert most == 4


def test_one_choice_with_impossible_logits_fails_its_request_and_no_other() -> None:
    driver = CoreDriver()
    key = driver.add(prompt_of(6), n=2, temperature=1.0)
    other = driver.add(prompt_of(6, start=3))
    driver.step()
    victim = driver.sequence_ids[key][1]
    driver.runner.poison = lambda entry: "not a number" if entry.sequence_id == victim else None
    driver.run()
    assert isinstance(driver.failed[key], NonFiniteLogits)
    assert driver.output(other) == continuation(prompt_of(6, start=3), 8)


def test_a_failed_step_fails_what_was_in_it_and_lets_the_rest_go_on() -> None:
    """API-02: waiting requests are untouched, blocks and copies come back."""
    driver = CoreDriver(max_num_seqs=3)
    key = driver.add(prompt_of(6), n=3, temperature=1.0)
    driver.step()
    waiting = driver.add(prompt_of(6, start=3))
    batch = driver.schedule()
    assert batch is not None
    assert batch.copies
    error = StepFailed("injected")
    driver.take(driver.core.fail_step(batch.step_id, error))
    assert driver.failed == {key: error}
    assert driver.core.fail_step(batch.step_id, error) == []
    driver.run()
    assert driver.output(waiting) == continuation(prompt_of(6, start=3), 8)


def test_a_failed_step_fails_every_request_that_was_in_it() -> None:
    """API-02: none of them may go on with blocks that were perhaps half written."""
    driver = CoreDriver()
    keys = [driver.add(prompt_of(6, start=i)) for i in range(3)]
    driver.step()
    batch = driver.schedule()
    assert batch is not None
    driver.take(driver.core.fail_step(batch.step_id, StepFailed("injected")))
    assert sorted(driver.failed) == keys
    assert driver.core.is_idle
    driver.core.check()


# ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("eos", [EOS, SECOND_EOS])
def test_no_end_of_sequence_id_ends_a_choice_before_min_tokens(eos: int) -> None:
    """SMP-08: two ids, each made the likeliest in turn."""
    driver = CoreDriver()
    key = driver.add(prompt_of(6), max_tokens=50, min_tokens=20, eos_ids=(EOS, SECOND_EOS), logit_bias={eos: 100.0})
    driver.run()
    assert driver.output(key) == [*continuation(prompt_of(6), 20), eos]
    assert driver.finish_reasons[key] == {0: "stop"}
    assert driver.stop_reasons[key] == {0: None}


def test_min_tokens_holds_even_if_the_runner_lets_an_early_end_through() -> None:
    """SMP-08: the count is the core's promise."""
    driver = CoreDriver()
    key = driver.add(prompt_of(6), max_tokens=50, min_tokens=20, eos_ids=(EOS,))
    while (batch := driver.schedule()) is not None:
        (entry,) = batch.entries
        sample = SampledToken(token_id=EOS)
        result = EntryOutput(sequence_id=entry.sequence_id, samples=(sample,))
        driver.take(driver.core.apply(StepOutput(step_id=batch.step_id, outputs=(result,), compute_s=0.0)))
    assert driver.output(key) == [EOS] * 21
    assert driver.finish_reasons[key] == {0: "stop"}


def test_stop_token_ids_wait_for_min_tokens_too_and_are_the_reason() -> None:
    """SMP-08: the user's own ids."""
    driver = CoreDriver()
    key = driver.add(prompt_of(6), max_tokens=50, min_tokens=5, stop_token_ids=(77,), logit_bias={77: 100.0})
    driver.run()
    assert driver.output(key) == [*continuation(prompt_of(6), 5), 77]
    assert driver.stop_reasons[key] == {0: 77}


def test_min_tokens_above_max_tokens_is_refused() -> None:
    """SMP-08: also above what the context leaves."""
    driver = CoreDriver(max_model_len=20)
    for max_tokens in (4, None):
        with pytest.raises(InvalidRequest, match="min_tokens is 16 and must be at most") as caught:
            driver.add(prompt_of(6), max_tokens=max_tokens, min_tokens=16)
        assert caught.value.param == "min_tokens"


def test_ignored_end_of_sequence_ids_do_not_stop_but_stop_token_ids_still_do() -> None:
    """SMP-09: exactly max_tokens tokens, "length"."""
    driver = CoreDriver(max_model_len=300)
    biased = {"max_tokens": 200, "eos_ids": (EOS,), "logit_bias": {EOS: 100.0}, "ignore_eos": True}
    key = driver.add(prompt_of(6), **biased)  # type: ignore[arg-type]
    own = driver.add(prompt_of(6), stop_token_ids=(EOS,), **biased)  # type: ignore[arg-type]
    driver.run()
    assert driver.output(key) == [EOS] * 200
    assert driver.finish_reasons[key] == {0: "length"}
    assert driver.output(own) == [EOS]
    assert driver.stop_reasons[own] == {0: EOS}


def test_no_token_at_all_may_be_asked_for() -> None:
    """SMP-10, the engine's part: the prompt is computed, with logprobs, and every choice ends with "length"."""
    driver = CoreDriver(token_budget=8)
    key = driver.add(prompt_of(20), max_tokens=0, n=2, prompt_logprobs=0)
    driver.run()
    assert driver.output(key) == []
    assert driver.finish_reasons[key] == {0: "length", 1: "length"}
    logprobs = driver.started[key].prompt_logprobs
    assert logprobs is not None
    assert len(logprobs) == 19


def test_a_choice_ended_by_its_text_stops_at_once_and_the_others_go_on() -> None:
    driver = CoreDriver()
    key = driver.add(prompt_of(6), n=2, temperature=1.0)
    driver.step()
    driver.step()
    driver.take(driver.core.finish_sequence(driver.sequence_ids[key][0]))
    driver.core.check()
    driver.run()
    assert len(driver.output(key, 0)) == 2
    assert len(driver.output(key, 1)) == 8
    assert driver.core.finish_sequence(driver.sequence_ids[key][0]) == []


def test_penalties_see_the_whole_history_also_after_a_preemption() -> None:
    driver = CoreDriver(max_num_seqs=1)
    key = driver.add(prompt_of(6), repetition_penalty=1.5, priority=1)
    for _ in range(3):
        driver.step()
    driver.add(prompt_of(4), priority=0, max_tokens=2)
    driver.run()
    assert driver.finished[key].num_preemptions == 1
    for batch in driver.runner.batches:
        for entry in batch.entries:
            if entry.sampling.wants_penalties and entry.seeds:
                assert entry.prompt_token_ids == prompt_of(6)
                assert entry.output_token_ids == tuple(driver.output(key)[: entry.num_output_tokens])
