"""Drives a core step by step with a `FakeRunner`, without asyncio, and checks it after every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from allocator import Quotas
from service.engine.batch import SequenceId, StepBatch, StepOutput, complete
from service.engine.core import EngineCore
from service.engine.request import (
    ChoiceAdvanced,
    CoreEvent,
    RequestFailed,
    RequestFinished,
    RequestKey,
    RequestStarted,
    choice_seed,
)
from service.errors import LooseleafError
from service.messages import SamplingParams
from tests.factories import make_core
from tests.fakes import Choose, FakeRunner, choose_by_hash, continuation

SEED = 7


class CoreDriver:
    """A core, its runner, a time, and what every request has been told so far."""

    def __init__(
        self,
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
        choose: Choose = choose_by_hash,
        **scheduler: Any,
    ) -> None:
        """`num_blocks` counts the null block, as everywhere. `scheduler`: further options of its section."""
        self.core: EngineCore = make_core(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_waiting=max_waiting,
            long_prefill_share=long_prefill_share,
            max_model_len=max_model_len,
            has_prefix_cache=has_prefix_cache,
            sub_blocks=sub_blocks,
            quotas=quotas,
            **scheduler,
        )
        self.runner = FakeRunner(num_blocks, block_size, choose=choose)
        self.token_budget = token_budget
        self.prefill_budget = scheduler.get("prefill_budget") or token_budget
        self.streaming: set[SequenceId] = set()  # those that the last step sampled a token of
        self.now = 0.0
        self.plans_ahead = True  # where the core lets it
        self.previous: StepOutput | None = None
        self.tokens: dict[RequestKey, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.finish_reasons: dict[RequestKey, dict[int, str | None]] = defaultdict(dict)
        self.stop_reasons: dict[RequestKey, dict[int, int | None]] = defaultdict(dict)
        self.sequence_ids: dict[RequestKey, dict[int, SequenceId]] = defaultdict(dict)
        self.started: dict[RequestKey, RequestStarted] = {}
        self.finished: dict[RequestKey, RequestFinished] = {}
        self.failed: dict[RequestKey, LooseleafError] = {}
        self.first_token_step: dict[RequestKey, int] = {}
        self.prompts: dict[RequestKey, tuple[int, ...]] = {}

    def add(
        self,
        prompt: Iterable[int],
        max_tokens: int | None = 8,
        *,
        temperature: float = 0.0,
        eos_ids: tuple[int, ...] = (),
        priority: int = 0,
        namespace: str = "",
        **sampling: object,
    ) -> RequestKey:
        """Queue a greedy request of eight tokens unless told otherwise."""
        prompt_token_ids = tuple(prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling)  # type: ignore[arg-type]
        key = self.core.add(
            prompt_token_ids, params, seed=SEED, eos_ids=eos_ids, priority=priority, namespace=namespace
        )
        self.prompts[key] = prompt_token_ids
        return key

    def step(self) -> StepBatch | None:
        """Run one step and take its events; None when there is nothing to do. Where steps overlap, the next one is made before."""
        self.take(self.core.shed())
        batch = self.schedule()
        if batch is None:
            return None
        self.take(self.core.apply(self.compute(batch)))
        self.core.check()
        return batch

    def schedule(self) -> StepBatch | None:
        """Return the step to compute next: one that was made ahead, or a new one."""
        steps = self.core._flight._steps
        return steps[0].batch if steps else self.core.schedule(self.now)

    def compute(self, batch: StepBatch) -> StepOutput:
        """Let the runner compute a step, checking what holds for every step; where steps overlap, the next one is made meanwhile."""
        is_waited_for = any(entry.sequence_id in self.streaming for entry in batch.entries)
        assert 0 < batch.num_tokens <= (self.token_budget if is_waited_for else self.prefill_budget)
        self.streaming = {entry.sequence_id for entry in batch.entries if entry.seeds}
        assert all(entry.token_ids for entry in batch.entries)
        lengths = [len(entry.token_ids) for entry in batch.entries]
        assert len({entry.sequence_id for entry in batch.entries}) == len(lengths)
        if self.plans_ahead:
            self.core.schedule(self.now)
        self.core.check()
        self.previous = self.runner.execute(complete(batch, self.previous))
        return self.previous

    def recall(self) -> bool:
        """Take the step made ahead back; say whether there was one that can be."""
        newest = self.core._flight._steps[-1].batch.step_id
        is_back = self.core.recall(newest)
        self.core.check()
        return is_back

    def run(self, max_steps: int = 5000) -> int:
        """Step until idle; returns the number of steps."""
        for num_steps in range(max_steps):
            if self.step() is None:
                assert self.core.is_idle, "the core has requests and no work"
                return num_steps
        raise AssertionError(f"not idle after {max_steps} steps")

    def take(self, events: list[CoreEvent]) -> None:
        """Record events; everything comes after its start and before its one end."""
        for event in events:
            assert event.key not in self.finished, "an event after the end"
            assert event.key not in self.failed, "an event after the failure"
            if isinstance(event, RequestStarted):
                assert event.key not in self.started, "started twice"
                self.started[event.key] = event
            elif isinstance(event, ChoiceAdvanced):
                self._take_token(event)
            elif isinstance(event, RequestFinished):
                self.finished[event.key] = event
            else:
                assert isinstance(event, RequestFailed)
                self.failed[event.key] = event.error

    def _take_token(self, event: ChoiceAdvanced) -> None:
        assert event.key in self.started, "a token before the start"
        assert event.index not in self.finish_reasons[event.key], "a token after the choice's end"
        self.sequence_ids[event.key][event.index] = event.sequence_id
        self.first_token_step.setdefault(event.key, len(self.runner.batches))
        if event.token is not None:
            self.tokens[event.key][event.index].append(event.token.token_id)
        if event.finish_reason is not None:
            self.finish_reasons[event.key][event.index] = event.finish_reason
            self.stop_reasons[event.key][event.index] = event.stop_reason

    def output(self, key: RequestKey, index: int = 0) -> list[int]:
        """Return the tokens of one choice so far."""
        return self.tokens[key][index]

    def expected(self, key: RequestKey, num_tokens: int, *, seed: int | None = None, index: int = 0) -> list[int]:
        """Return what a request run alone answers; `seed` None means greedy."""
        return continuation(
            self.prompts[key], num_tokens, seed=0 if seed is None else choice_seed(seed, index), choose=choose_by_hash
        )

    def cached(self, key: RequestKey) -> int:
        """Return how many prompt tokens came from the prefix cache."""
        return self.started[key].cached_tokens


def prompt_of(length: int, *, start: int = 10) -> tuple[int, ...]:
    """Return a prompt whose tokens differ from position to position and from `start` to `start`."""
    return tuple(5 + (start * 7919 + position * 31) % 300 for position in range(length))
