"""Small, complete objects for tests: name what matters, the rest has a default."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from allocator import BlockPool, PrefixCache, Quotas
from service.config import SchedulerConfig
from service.engine.async_engine import AsyncEngine, EngineInfo, EngineLimits
from service.engine.batch import StepBatch, StepEntry
from service.engine.core import EngineCore
from service.engine.executor import StepExecutor
from service.engine.request_log import EngineMetrics
from service.messages import Delta, Event, Finished, GenerateRequest, SamplingParams, Started
from service.text import ChatTemplate, Tokenizer
from tests.fakes import Choose, FakeRunner, ManualClock, choose_by_hash

GOLDEN = Path(__file__).parent / "data" / "golden"

GREEDY = SamplingParams(temperature=0.0)


_overlaps = ContextVar("overlaps", default=False)


@contextmanager
def overlapping(overlap: bool) -> Iterator[None]:
    """Let cores that are made without saying so plan ahead, or not; a whole module runs in one mode and then in the other."""
    token = _overlaps.set(overlap)
    try:
        yield
    finally:
        _overlaps.reset(token)


@cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of the tiny checkpoints: 320 ids, the first five special, 2 and 4 end a text."""
    return Tokenizer.from_directory(GOLDEN / "tiny-llama")


@cache
def tiny_template() -> ChatTemplate:
    """The chat template that belongs to it."""
    return ChatTemplate.load(tiny_tokenizer())


def make_core(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_num_seqs: int = 8,
    token_budget: int = 32,
    max_waiting: int = 1024,
    long_prefill_share: float = 0.5,
    max_model_len: int = 1000,
    has_prefix_cache: bool = True,
    sub_blocks: bool = False,
    quotas: Quotas | None = None,
    **scheduler: Any,
) -> EngineCore:
    """A core over a pool of its own; one of the blocks is the null block. `scheduler`: further options of its section."""
    pool = BlockPool(num_blocks, block_size, ledger=True, quotas=quotas)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_waiting=max_waiting,
        long_prefill_share=long_prefill_share,
        **({"overlap": _overlaps.get()} | scheduler),
    )
    prefix_cache = PrefixCache(pool, secret=b"test", sub_blocks=sub_blocks) if has_prefix_cache else None
    return EngineCore(config, pool, prefix_cache, max_model_len=max_model_len)


def make_request(
    prompt: str | tuple[int, ...] = "The cat sat",
    *,
    request_id: str = "request",
    priority: int = 0,
    namespace: str = "",
    echo_prompt: bool = False,
    temperature: float = 0.0,
    max_tokens: int | None = 8,
    **sampling: object,
) -> GenerateRequest:
    """A greedy completion of eight tokens unless told otherwise."""
    return GenerateRequest(
        request_id=request_id,
        prompt=prompt,
        priority=priority,
        namespace=namespace,
        echo_prompt=echo_prompt,
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )


@dataclass
class TestEngine:
    """A started engine with its parts within reach."""

    __test__ = False

    engine: AsyncEngine
    core: EngineCore
    runner: FakeRunner
    executor: StepExecutor
    clock: ManualClock
    tokenizer: Tokenizer


@asynccontextmanager
async def running_engine(
    *,
    choose: Choose = choose_by_hash,
    fault: Callable[[StepBatch], BaseException | None] = lambda batch: None,
    poison: Callable[[StepEntry], str | None] = lambda entry: None,
    limits: EngineLimits = EngineLimits(),  # noqa: B008 - frozen
    metrics: EngineMetrics | None = None,
    template: ChatTemplate | None = None,
    num_blocks: int = 257,
    block_size: int = 4,
    max_num_seqs: int = 8,
    token_budget: int = 64,
    max_waiting: int = 1024,
    max_model_len: int = 1000,
    **scheduler: Any,
) -> AsyncIterator[TestEngine]:
    """An `AsyncEngine` with a `FakeRunner` on a real step thread; checks on leaving that no block is held."""
    core = make_core(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
        **scheduler,
    )
    runner = FakeRunner(num_blocks, block_size, choose=choose, fault=fault, poison=poison)
    clock = ManualClock()
    executor = StepExecutor(lambda: runner, clock=clock)
    tokenizer = tiny_tokenizer()
    engine = AsyncEngine(
        core,
        executor,
        tokenizer,
        template or tiny_template(),
        info=EngineInfo(model="tiny", backend="fake", dtype="float32", device="cpu"),
        eos_ids=tokenizer.eos_ids,
        limits=limits,
        metrics=metrics,
        clock=clock,
        draw_seed=lambda: 12345,
    )
    await engine.start()
    try:
        yield TestEngine(engine, core, runner, executor, clock, tokenizer)
    finally:
        runner.gate.open()
        await engine.stop()
    assert runner.is_closed
    core.check()
    assert core.stats().pool.used == 0


@dataclass
class Answer:
    """Everything that one request's events say, put together."""

    started: Started
    finished: Finished
    deltas: list[Delta]

    def text(self, index: int = 0) -> str:
        """The text of one choice."""
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        """The tokens of one choice."""
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    def last(self, index: int = 0) -> Delta:
        """The delta with the finish reason; there is exactly one."""
        (last,) = [delta for delta in self.deltas if delta.index == index and delta.finish_reason is not None]
        return last


async def collect(engine: AsyncEngine, request: GenerateRequest) -> Answer:
    """Read an answer to its end; raises what ends it badly."""
    events: list[Event] = [event async for batch in engine.generate(request) for event in batch]
    started, *middle, finished = events
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    deltas = [event for event in middle if isinstance(event, Delta)]
    assert len(deltas) == len(middle)
    return Answer(started, finished, deltas)
