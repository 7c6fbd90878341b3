"""The counting core does what the engine's core does, step by step and many steps at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import BlockPool, PrefixCache
from service.config import SchedulerConfig
from service.engine.core import EngineCore
from service.engine.request import ChoiceAdvanced, RequestFinished, RequestKey, RequestStarted
from service.messages import SamplingParams
from service.simulate.core import CountingCore
from service.simulate.cost import StepCost, Work
from tests.fakes import FakeRunner

BLOCK = 4
COST = StepCost(base_s=0.25, token_s=0.0625, context_s=0.015625, pair_s=0.0078125)  # sums without rounding


@dataclass(frozen=True)
class Ask:
    """A request: its first blocks are those of `family`, as far as it goes, the other tokens its own."""

    arrival_s: float
    num_prompt: int
    num_output: int
    family: int
    priority: int

    @property
    def num_named(self) -> int:
        return (self.num_prompt - 1) // BLOCK  # the last token, which the fake repeats, is its own

    def tokens(self, fill: int) -> tuple[int, ...]:
        named = [1000 * (1 + self.family) + block for block in range(self.num_named) for _ in range(BLOCK)]
        return tuple(named + [fill] * (self.num_prompt - len(named)))

    def names(self) -> list[bytes]:
        return [bytes([1, self.family, block]).ljust(32, b"\0") for block in range(self.num_named)]


@dataclass(frozen=True)
class Life:
    """What a request was told, and when."""

    first_token_s: float | None  # None where none was asked for
    end_s: float
    cached_tokens: int
    num_preemptions: int


class Clocked:
    """Runs requests through a core and notes when each started and ended."""

    def __init__(self, asks: list[Ask], num_blocks: int, max_num_seqs: int, budget: int) -> None:
        self.waiting = sorted(enumerate(asks), key=lambda pair: pair[1].arrival_s)
        self.pool = BlockPool(num_blocks, BLOCK)
        self.cache = PrefixCache(self.pool, secret=b"test")
        self.config = SchedulerConfig(max_num_seqs=max_num_seqs, token_budget=budget)
        self.now = 0.0
        self.index: dict[RequestKey, int] = {}
        self.cached: dict[int, int] = {}
        self.first_token_s: dict[int, float] = {}
        self.lives: dict[int, Life] = {}

    @property
    def next_arrival_s(self) -> float:
        return self.waiting[0][1].arrival_s if self.waiting else math.inf

    def note(
        self, started: list[RequestStarted], first_tokens: list[RequestKey], finished: list[RequestFinished]
    ) -> None:
        for start in started:
            self.cached[self.index[start.key]] = start.cached_tokens
        for key in first_tokens:
            assert self.first_token_s.setdefault(self.index[key], self.now) == self.now, "two first tokens"
        for end in finished:
            index = self.index[end.key]
            self.lives[index] = Life(self.first_token_s.get(index), self.now, self.cached[index], end.num_preemptions)


def run_engine(clocked: Clocked) -> Clocked:
    core = EngineCore(clocked.config, clocked.pool, clocked.cache, max_model_len=10_000)
    runner = FakeRunner(clocked.pool.num_blocks, BLOCK, choose=lambda context, seed: context[-1])
    while clocked.waiting or not core.is_idle:
        if core.is_idle:
            clocked.now = max(clocked.now, clocked.next_arrival_s)
        while clocked.next_arrival_s <= clocked.now:
            index, ask = clocked.waiting.pop(0)
            params = SamplingParams(max_tokens=ask.num_output, temperature=0.0)
            key = core.add(ask.tokens(100 + index), params, seed=0, priority=ask.priority)
            clocked.index[key] = index
        batch = core.schedule(clocked.now)
        assert batch is not None
        lengths = [(len(entry.token_ids), entry.seq_len) for entry in batch.entries]
        work = Work(
            sum(count for count, _ in lengths),
            sum(end for _, end in lengths),
            sum(sum(range(end - count + 1, end + 1)) for count, end in lengths),
        )
        clocked.now += COST.seconds(work)
        events = core.apply(runner.execute(batch))
        clocked.note(
            [event for event in events if isinstance(event, RequestStarted)],
            [
                event.key
                for event in events
                if isinstance(event, ChoiceAdvanced)
                and event.token
                and clocked.index[event.key] not in clocked.first_token_s
            ],
            [event for event in events if isinstance(event, RequestFinished)],
        )
    return clocked


def run_counting(clocked: Clocked, *, is_stepwise: bool) -> tuple[Clocked, CountingCore]:
    core = CountingCore(clocked.config, clocked.pool, clocked.cache, max_model_len=10_000)
    while clocked.waiting or not core.is_idle:
        if core.is_idle:
            clocked.now = max(clocked.now, clocked.next_arrival_s)
        while clocked.next_arrival_s <= clocked.now:
            index, ask = clocked.waiting.pop(0)
            key = core.add_counted(
                ask.num_prompt, ask.num_output, fill=100 + index, hashes=ask.names(), priority=ask.priority
            )
            clocked.index[key] = index
        num_quiet = 0 if is_stepwise else core.num_quiet_steps()
        if num_quiet:
            num_tokens, num_context, _ = core.decode_work()
            num_steps = 0
            while num_steps < num_quiet and clocked.now < clocked.next_arrival_s:
                clocked.now += COST.seconds(Work(num_tokens, num_context, num_context))
                num_context += num_tokens
                num_steps += 1
            settled = core.fast_forward(num_steps)
        else:
            work = core.step(clocked.now)
            assert work is not None
            clocked.now += COST.seconds(work)
            settled = core.settle()
        clocked.note(*settled)
        core.check()
    return clocked, core


asks = st.lists(
    st.builds(
        Ask,
        arrival_s=st.integers(0, 160).map(lambda quarter: quarter / 4),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(0, 40),
        family=st.integers(0, 2),
        priority=st.integers(0, 1),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(asks=asks, num_blocks=st.integers(21, 60), max_num_seqs=st.integers(1, 6), budget=st.integers(6, 40))
def test_counting_gives_the_lives_that_the_engine_gives(
    asks: list[Ask], num_blocks: int, max_num_seqs: int, budget: int
) -> None:
    """Same starts, ends, hits and preemptions, whether steps are built and executed, counted, or skipped."""
    size = (num_blocks, max_num_seqs, budget)
    engine = run_engine(Clocked(asks, *size))
    stepwise, stepwise_core = run_counting(Clocked(asks, *size), is_stepwise=True)
    skipping, skipping_core = run_counting(Clocked(asks, *size), is_stepwise=False)
    assert len(engine.lives) == len(asks)
    assert stepwise.lives == engine.lives
    assert skipping.lives == engine.lives
    assert skipping_core.stats() == stepwise_core.stats()
    assert eviction_order(skipping.pool) == eviction_order(stepwise.pool)


def eviction_order(pool: BlockPool) -> list[bytes | None]:
    """What the free blocks hold, in the order in which they will be reused; their ids may differ."""
    return [pool.key_of(block) for block in pool.free_blocks()]


def quiet_core(num_blocks: int, *lengths: tuple[int, int]) -> CountingCore:
    """A core whose sequences have their prompts computed."""
    core = CountingCore(SchedulerConfig(), BlockPool(num_blocks, BLOCK), None, max_model_len=1000)
    for fill, (num_prompt, num_output) in enumerate(lengths):
        core.add_counted(num_prompt, num_output, fill=fill, hashes=[])
    for _ in range(2):  # the prompts, then a step of decodes only
        core.step(0.0)
        core.settle()
    return core


def test_quiet_steps_last_until_the_first_end() -> None:
    core = quiet_core(100, (4, 30), (4, 12))
    assert core.num_quiet_steps() == 10
    assert not core.fast_forward(9).finished
    assert core.num_quiet_steps() == 1
    assert len(core.fast_forward(1).finished) == 1
    assert core.num_quiet_steps() == 0, "the scheduler must see that a place is free"


def test_quiet_steps_end_where_blocks_run_out() -> None:
    core = quiet_core(9, (4, 20), (4, 20))
    # Slots reserved: 5 of 8 in each table; 8 blocks in all, 4 held. Both may fill 3 + 8 more slots.
    assert core.num_quiet_steps() == 11
    core.fast_forward(11)
    assert core.num_quiet_steps() == 0
    core.step(0.0)
    core.settle()
    assert core.stats().preemptions == 1


def test_an_arrival_ends_the_quiet() -> None:
    core = quiet_core(100, (4, 30))
    core.add_counted(4, 4, fill=9, hashes=[])
    assert core.num_quiet_steps() == 0


def test_an_idle_core_has_no_step() -> None:
    core = CountingCore(SchedulerConfig(), BlockPool(9, BLOCK), None, max_model_len=1000)
    assert core.step(0.0) is None
    assert core.num_quiet_steps() == 0


@pytest.mark.parametrize("is_caching", [False, True])
def test_requests_without_names_share_nothing(*, is_caching: bool) -> None:
    pool = BlockPool(100, BLOCK)
    core = CountingCore(
        SchedulerConfig(), pool, PrefixCache(pool, secret=b"test") if is_caching else None, max_model_len=1000
    )
    for fill in range(3):
        core.add_counted(20, 4, fill=fill, hashes=[])
        while core.step(0.0) is not None:
            core.settle()
    assert core.stats().cached_prompt_tokens == 0
    assert core.stats().prompt_tokens == 60


@pytest.mark.parametrize(("priority", "is_quiet"), [(0, False), (1, True)])
def test_steps_are_not_quiet_while_a_more_urgent_request_waits(*, priority: int, is_quiet: bool) -> None:
    """It takes a running one's place as soon as that has grown enough blocks, whereas an equal one is refused until somebody ends."""
    core = CountingCore(SchedulerConfig(), BlockPool(13, BLOCK), None, max_model_len=1000)
    core.add_counted(16, 20, fill=1, hashes=[], priority=0)
    core.add_counted(4, 20, fill=2, hashes=[], priority=1)
    core.step(0.0)
    core.settle()
    core.add_counted(32, 4, fill=3, hashes=[], priority=priority)
    core.step(0.0)
    core.settle()
    assert core.stats().waiting == 1
    assert (core.num_quiet_steps() > 0) == is_quiet


def test_a_prompt_computed_token_by_token_is_no_decode() -> None:
    core = CountingCore(
        SchedulerConfig(max_num_seqs=2, token_budget=2), BlockPool(100, BLOCK), None, max_model_len=1000
    )
    core.add_counted(1, 50, fill=1, hashes=[])
    core.step(0.0)
    core.settle()
    core.add_counted(6, 50, fill=2, hashes=[])
    quiet = []
    for _ in range(8):
        assert core.step(0.0) == (2, ANY, ANY)
        core.settle()
        quiet.append(core.num_quiet_steps() > 0)
    assert quiet == [False] * 5 + [True] * 3
