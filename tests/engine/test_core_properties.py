"""Every request ends exactly once, the budget is never exceeded, nobody starves, the pool is whole at the end, and no answer depends on
company: whatever arrives, is aborted, preempted, forked or found in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.request import RequestKey
from service.errors import ContextTooLong, StepFailed
from tests.engine.driver import SEED, CoreDriver
from tests.fakes import choose_by_hash


@dataclass(frozen=True)
class Arrival:
    """A request that comes `gap` steps after the one before it."""

    gap: int
    stem: int  # prompts with one stem share a prefix
    length: int
    max_tokens: int
    n: int
    priority: int
    is_greedy: bool
    abort_after: int | None  # steps after its arrival
    aborts_in_flight: bool
    ends_by_text_after: int | None  # tokens, of choice 0
    wants_prompt_logprobs: bool


arrivals = st.builds(
    Arrival,
    gap=st.integers(0, 4),
    stem=st.integers(0, 2),
    length=st.integers(1, 40),
    max_tokens=st.integers(0, 24),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    is_greedy=st.booleans(),
    abort_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    aborts_in_flight=st.booleans(),
    ends_by_text_after=st.one_of(st.none(), st.none(), st.integers(1, 6)),
    wants_prompt_logprobs=st.sampled_from([False, False, True]),
)


class Scenario:
    """Feeds arrivals, aborts and texts that end to a driver, and judges the result."""

    def __init__(
        self,
        driver: CoreDriver,
        plan: list[Arrival],
        is_ahead: Sequence[bool] = (True,),
        is_recalled: Sequence[bool] = (False,),
    ) -> None:
        """`is_ahead`: whether the step after each one is made before it is computed, over and over; where the core lets it.
        `is_recalled`: whether it is then taken back."""
        self.driver = driver
        self.is_ahead = is_ahead
        self.is_recalled = is_recalled
        self.todo: list[tuple[int, Arrival]] = []
        at = 0
        for arrival in plan:
            at += arrival.gap
            self.todo.append((at, arrival))
        self.live: dict[RequestKey, tuple[int, Arrival]] = {}
        self.aborted: set[RequestKey] = set()
        self.refused = 0

    def prompt(self, arrival: Arrival) -> tuple[int, ...]:
        # The stem decides all but the last tokens, so prefixes are shared by the block.
        body = [5 + (arrival.stem * 101 + position * 13) % 300 for position in range(arrival.length)]
        return tuple(body)

    def arrive(self, tick: int) -> None:
        while self.todo and self.todo[0][0] <= tick:
            _, arrival = self.todo.pop(0)
            try:
                key = self.driver.add(
                    self.prompt(arrival),
                    max_tokens=arrival.max_tokens,
                    n=arrival.n,
                    temperature=0.0 if arrival.is_greedy else 1.0,
                    priority=arrival.priority,
                    prompt_logprobs=0 if arrival.wants_prompt_logprobs else None,
                )
            except ContextTooLong:
                assert arrival.length >= self.driver.core.capacity
                self.refused += 1
            else:
                self.live[key] = (tick, arrival)

    def abort_due(self, tick: int, *, in_flight: bool) -> None:
        for key, (since, arrival) in self.live.items():
            if arrival.abort_after is None or arrival.aborts_in_flight != in_flight or key in self.aborted:
                continue
            if tick >= since + arrival.abort_after and self.driver.core.abort(key):
                self.aborted.add(key)

    def end_texts(self) -> None:
        for key, (_, arrival) in self.live.items():
            driver = self.driver
            if arrival.ends_by_text_after is None or key in self.aborted or key not in driver.sequence_ids:
                continue
            if len(driver.output(key)) == arrival.ends_by_text_after and 0 not in driver.finish_reasons[key]:
                driver.finish_reasons[key][0] = "stop"
                driver.take(driver.core.finish_sequence(driver.sequence_ids[key][0]))

    def run(self) -> None:
        driver = self.driver
        for tick in range(4000):
            self.arrive(tick)
            self.abort_due(tick, in_flight=False)
            driver.now += 0.1
            batch = driver.schedule()
            if batch is None:
                if not self.todo:
                    break
                continue
            driver.plans_ahead = self.is_ahead[tick % len(self.is_ahead)]
            output = driver.compute(batch)
            self.abort_due(tick, in_flight=True)
            if self.is_recalled[tick % len(self.is_recalled)]:
                driver.recall()
            driver.take(driver.core.apply(output))
            self.end_texts()
            driver.core.check()
        else:
            raise AssertionError("somebody starved")
        assert driver.core.is_idle
        driver.core.check()
        assert driver.core.stats().pool.used == 0
        for key, (_, arrival) in self.live.items():
            self.judge(key, arrival)

    def judge(self, key: RequestKey, arrival: Arrival) -> None:
        driver = self.driver
        assert (key in driver.finished) != (key in self.aborted)
        assert key not in driver.failed
        room = driver.core.capacity - arrival.length
        full = min(arrival.max_tokens, room)
        for index in range(arrival.n):
            got = driver.output(key, index)
            seed = None if arrival.is_greedy else SEED
            assert got == driver.expected(key, full, seed=seed, index=index)[: len(got)]
            if key in self.aborted:
                continue
            assert index in driver.finish_reasons[key]
            if driver.finish_reasons[key][index] == "length":
                assert len(got) == full
            else:
                assert index == 0
                assert len(got) == arrival.ends_by_text_after
        if key in driver.started and arrival.wants_prompt_logprobs:
            logprobs = driver.started[key].prompt_logprobs
            assert logprobs is not None
            assert [entry.token_id for entry in logprobs] == list(driver.prompts[key][1:])


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(arrivals, min_size=1, max_size=14),
    num_usable=st.integers(4, 40),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(3, 8),
    token_budget=st.integers(3, 40),
    more_alone=st.sampled_from([0, 1, 30]),
    long_prefill_share=st.sampled_from([0.1, 0.5, 1.0]),
    has_prefix_cache=st.sampled_from([True, True, False]),
)
def test_every_request_ends_once_with_the_answer_it_gets_alone(
    plan: list[Arrival],
    num_usable: int,
    block_size: int,
    max_num_seqs: int,
    token_budget: int,
    more_alone: int,
    long_prefill_share: float,
    has_prefix_cache: bool,
) -> None:
    """BLK-05, BLK-06, BLK-10, SCH-05, SCH-07, SMP-14 at random."""
    driver = CoreDriver(
        num_blocks=1 + num_usable,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        prefill_budget=token_budget + more_alone,
        long_prefill_share=long_prefill_share,
        has_prefix_cache=has_prefix_cache,
        max_model_len=64,
    )
    Scenario(driver, plan).run()


@settings(max_examples=40, deadline=None)
@given(plan=st.lists(arrivals, min_size=2, max_size=10), failing=st.sets(st.integers(1, 30), max_size=6))
def test_failing_steps_fail_their_requests_and_change_no_other(plan: list[Arrival], failing: set[int]) -> None:
    """API-02: a step that raises leaves every other answer as it is alone."""
    driver = CoreDriver(num_blocks=25, max_num_seqs=4, token_budget=16, max_model_len=64)
    keys = {}
    for arrival in plan:
        prompt = tuple(5 + (arrival.stem * 101 + position * 13) % 300 for position in range(arrival.length))
        keys[driver.add(prompt, max_tokens=arrival.max_tokens, n=arrival.n, temperature=1.0)] = arrival
    while (batch := driver.schedule()) is not None:
        if batch.step_id in failing:
            driver.runner.execute(batch)  # it may have written before it failed
            driver.take(driver.core.fail_step(batch.step_id, StepFailed("injected")))
        else:
            driver.take(driver.core.apply(driver.compute(batch)))
        driver.core.check()
    assert driver.core.is_idle
    for key, arrival in keys.items():
        assert (key in driver.finished) != (key in driver.failed)
        for index in range(arrival.n):
            got = driver.output(key, index)
            assert got == driver.expected(key, arrival.max_tokens, seed=SEED, index=index)[: len(got)]
            assert key in driver.failed or len(got) == arrival.max_tokens


def test_the_fake_runner_notices_a_wrong_table() -> None:
    """The properties above mean something only if a wrong block changes an answer."""
    driver = CoreDriver()
    driver.add(tuple(range(10, 22)))
    driver.step()
    batch = driver.schedule()
    assert batch is not None
    right = driver.runner.execute(batch)
    driver.runner._tokens[batch.entries[0].block_ids[0] * 4] = 99
    wrong = driver.runner.execute(batch)
    assert right.outputs[0].samples != wrong.outputs[0].samples
    assert choose_by_hash([1, 2], 0) != choose_by_hash([2, 1], 0)
