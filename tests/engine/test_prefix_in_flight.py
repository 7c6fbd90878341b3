"""Prompts that begin alike and are in flight together: the common part is computed once, and nobody waits in vain."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.request import RequestKey
from service.errors import NonFiniteLogits, StepFailed
from tests.engine.driver import CoreDriver, prompt_of
from tests.fakes import continuation

STEM = prompt_of(48)


def num_computed(driver: CoreDriver) -> int:
    """Count the tokens that the runner was given, decodes and recomputed ones included."""
    return sum(batch.num_tokens for batch in driver.runner.batches)


def add_group(driver: CoreDriver, count: int, **options: object) -> list[RequestKey]:
    """Queue requests with one stem, each with two tokens of its own."""
    return [driver.add((*STEM, 400 + i, 500 + i), 3, **options) for i in range(count)]  # type: ignore[arg-type]


def require_answers(driver: CoreDriver, keys: list[RequestKey]) -> None:
    for key in keys:
        assert driver.output(key) == continuation(driver.prompts[key], 3)


@pytest.mark.parametrize("token_budget", [512, 64, 20])
def test_sixteen_prompts_with_one_prefix_that_come_together_compute_it_once(token_budget: int) -> None:
    driver = CoreDriver(num_blocks=400, block_size=16, max_num_seqs=16, token_budget=token_budget)
    prefix = prompt_of(512)
    keys = [driver.add((*prefix, *prompt_of(9, start=50 + i)), 4) for i in range(16)]
    driver.run()
    assert num_computed(driver) == 512 + 16 * (9 + 3)
    assert [driver.cached(key) for key in keys] == [0] + [512] * 15
    for key in keys:
        assert driver.output(key) == continuation(driver.prompts[key], 4)
    first_tokens = [driver.first_token_step[key] for key in keys]
    assert min(first_tokens) == first_tokens[0]


def test_followers_of_a_prefix_share_the_step_behind_it() -> None:
    """The first step has what the budget of a step without streams holds of the prefix, the second one all the rest."""
    driver = CoreDriver(num_blocks=400, block_size=16, max_num_seqs=16, token_budget=256, prefill_budget=1024)
    prefix = prompt_of(512)
    keys = [driver.add((*prefix, *prompt_of(32, start=50 + i)), 2) for i in range(16)]
    driver.run()
    assert num_computed(driver) == 512 + 16 * (32 + 1)
    first_tokens = [driver.first_token_step[key] for key in keys]
    assert first_tokens[0] == 1
    assert sorted(first_tokens)[8] == 3, "more than half have their first token in the third step"


def test_equal_prompts_share_all_blocks_but_the_one_with_the_last_token() -> None:
    driver = CoreDriver(num_blocks=200, max_num_seqs=16, token_budget=64)
    for _ in range(16):
        driver.add(STEM, 1)
    driver.run()
    assert num_computed(driver) == 48 + 15 * 4


def test_who_waits_starts_in_the_step_after_the_blocks_were_computed() -> None:
    """It needs the common blocks only, not the end of the prompt that computes them."""
    driver = CoreDriver(num_blocks=200, token_budget=16, overlap=False)
    first = driver.add((*STEM, *prompt_of(100, start=3)))
    second = driver.add((*STEM, 1))
    for _ in range(3):
        driver.step()
        assert second not in driver.started
    driver.step()
    assert driver.output(second) == continuation(driver.prompts[second], 1)
    assert driver.cached(second) == 48
    assert driver.output(first) == []
    driver.run()
    assert driver.output(first) == continuation(driver.prompts[first], 8)


def test_others_pass_whoever_waits_for_a_block() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=32)
    leader, follower = add_group(driver, 2)
    other = driver.add(prompt_of(6, start=3))
    driver.step()
    assert len(driver.output(other)) == 1
    assert driver.core.stats().waiting == 1
    driver.run()
    require_answers(driver, [leader, follower])


def test_groups_within_a_group_compute_their_own_common_part_once_too() -> None:
    driver = CoreDriver(num_blocks=200, max_num_seqs=16, token_budget=64)
    branches = [(*STEM, *prompt_of(16, start=start)) for start in (3, 4)]
    for index in range(8):
        driver.add((*branches[index % 2], 400 + index), 1)
    driver.run()
    assert num_computed(driver) == 48 + 2 * 16 + 8


@pytest.mark.parametrize("in_flight", [False, True])
def test_when_the_first_is_aborted_the_next_goes_on_from_the_blocks_that_were_computed(in_flight: bool) -> None:
    driver = CoreDriver(num_blocks=200, token_budget=20, overlap=False)
    keys = add_group(driver, 4)
    driver.step()  # 20 tokens, five blocks
    if in_flight:
        batch = driver.schedule()
        assert batch is not None
        output = driver.compute(batch)
        driver.core.abort(keys[0])
        driver.take(driver.core.apply(output))
    else:
        driver.core.abort(keys[0])
    before = num_computed(driver)
    driver.run()
    require_answers(driver, keys[1:])
    assert driver.cached(keys[1]) == (40 if in_flight else 20)
    assert num_computed(driver) - before == 48 - driver.cached(keys[1]) + 3 * (2 + 2)


def test_when_the_step_of_the_first_fails_the_next_computes_the_blocks() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=20)
    keys = add_group(driver, 3)
    driver.step()
    batch = driver.schedule()
    assert batch is not None
    driver.take(driver.core.fail_step(batch.step_id, StepFailed("injected")))
    driver.run()
    assert list(driver.failed) == keys[:1]
    require_answers(driver, keys[1:])


def test_when_the_first_has_impossible_logits_the_next_goes_on() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=20)
    keys = add_group(driver, 3)
    driver.step()
    (leader,) = driver.core._scheduler.running
    driver.runner.poison = lambda entry: "NaN" if entry.sequence_id == leader.id else None
    driver.run()
    assert isinstance(driver.failed[keys[0]], NonFiniteLogits)
    require_answers(driver, keys[1:])


def test_when_the_first_is_preempted_it_is_computed_again_and_the_others_still_wait_once() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=20, max_num_seqs=2)
    keys = add_group(driver, 3, priority=1)
    driver.step()
    urgent = [driver.add(prompt_of(6, start=start)) for start in (3, 4)]
    driver.run()
    assert driver.core.stats().preemptions == 1
    require_answers(driver, keys)
    assert [driver.cached(key) for key in keys] == [0, 48, 48]
    assert num_computed(driver) == 48 + 3 * (2 + 2) + 2 * (6 + 7) + 2  # two of the 34 that it had filled no block
    assert all(key in driver.finished for key in urgent)


def test_the_more_urgent_does_not_wait_for_the_less_urgent() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=20, overlap=False)
    slow = driver.add((*STEM, *prompt_of(100, start=3)), 3, priority=1)
    driver.step()
    urgent = driver.add((*STEM, 1), 3)
    batch = driver.step()
    assert batch is not None
    assert len(batch.entries) == 2
    driver.run()
    require_answers(driver, [slow, urgent])


def test_nobody_is_preempted_for_a_sequence_that_waits_for_a_block() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=20, max_num_seqs=2)
    lesser = driver.add(prompt_of(6, start=3), 30, priority=1)
    leader, follower = (driver.add((*STEM, 400 + i), 3) for i in range(2))
    driver.step()
    driver.step()
    assert driver.core.stats().preemptions == 0
    driver.run()
    assert driver.core.stats().preemptions == 1  # once its blocks are there, its priority counts
    require_answers(driver, [leader, follower])
    assert driver.output(lesser) == continuation(driver.prompts[lesser], 30)


def test_other_tenants_and_prompts_whose_logprobs_are_wanted_do_not_wait() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=200)
    driver.add(STEM, 1)
    driver.add(STEM, 1, namespace="other")
    driver.add(STEM, 1, prompt_logprobs=0)
    batch = driver.step()
    assert batch is not None
    assert [len(entry.token_ids) for entry in batch.entries] == [48, 48, 48]


def test_without_a_prefix_cache_nobody_waits() -> None:
    driver = CoreDriver(num_blocks=200, token_budget=200, has_prefix_cache=False)
    add_group(driver, 3)
    batch = driver.step()
    assert batch is not None
    assert len(batch.entries) == 3


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 3)), min_size=2, max_size=12),
    gaps=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(1, 8),
    token_budget=st.integers(8, 40),
)
def test_no_prompt_block_is_ever_computed_twice(
    prompts: list[tuple[int, int, int]], gaps: list[int], block_size: int, max_num_seqs: int, token_budget: int
) -> None:
    """While the pool has room and all come in order: a block that another one can find is computed by one sequence only."""
    driver = CoreDriver(
        num_blocks=2000, block_size=block_size, max_num_seqs=max_num_seqs, token_budget=token_budget, max_model_len=64
    )
    keys = []
    for (stem, length, tail), gap in zip(prompts, gaps, strict=False):
        keys.append(driver.add((*prompt_of(length, start=stem), *prompt_of(tail, start=stem + tail)), 2))
        for _ in range(gap):
            driver.step()
    driver.run()
    contents = {driver.sequence_ids[key][0]: driver.prompts[key] for key in keys}
    computed: Counter[tuple[tuple[int, ...], int]] = Counter()  # by all tokens up to the end of the block, and position
    for batch in driver.runner.batches:
        for entry in batch.entries:
            prompt = contents[entry.sequence_id]
            end = min(entry.seq_len, (len(prompt) - 1) // block_size * block_size)  # behind it nothing is looked up
            for position in range(entry.start, end):
                computed[prompt[: (position // block_size + 1) * block_size], position] += 1
    assert set(computed.values()) <= {1}
    for key in keys:
        assert driver.output(key) == continuation(driver.prompts[key], 2)
