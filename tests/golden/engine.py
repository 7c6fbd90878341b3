"""The real core over a real model, step by step without asyncio, with a record of what happened."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allocator import BlockPool, PrefixCache
from backends.interface import DeviceInfo
from backends.kv_cache import KVCache
from backends.registry import open_backend
from service.config import SchedulerConfig
from service.engine.batch import PromptLogprob, SampledToken, StepBatch, StepOutput, complete
from service.engine.core import EngineCore
from service.engine.request import ChoiceAdvanced, RequestFailed, RequestKey, RequestStarted
from service.messages import SamplingParams
from service.model.loading import LoadedModel
from service.model.runner import MAX_CAPTURED_TOKENS, ModelRunner

BLOCK_SIZE = 16
CPU = DeviceInfo(kind="cpu")


@dataclass
class Answer:
    """What one request got, and how."""

    tokens: list[SampledToken] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class GoldenEngine:
    """A core, a runner with slot checks, and the model; one pool."""

    def __init__(
        self,
        model: LoadedModel,
        backend: str,
        *,
        num_blocks: int = 1200,
        token_budget: int = 512,
        has_prefix_cache: bool = True,
        max_num_seqs: int = 64,
        quantised: torch.dtype | None = None,
        device: DeviceInfo = CPU,
        max_captured_tokens: int = MAX_CAPTURED_TOKENS,
        checks_slots: bool = True,
        overlap: bool = False,
        **scheduler: Any,
    ) -> None:
        """`scheduler`: further options of its section."""
        self.makes_ahead = overlap
        spec = model.decoder.kv_cache_spec(BLOCK_SIZE, quantised=quantised)
        self.runner: ModelRunner = ModelRunner(
            model.decoder,
            open_backend(backend, spec, device),
            KVCache(spec, num_blocks, device.torch_device),
            num_valid_ids=model.config.vocab_size,
            max_model_len=model.max_model_len,
            max_captured_tokens=max_captured_tokens,
            checks_slots=checks_slots,
        )
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.core = EngineCore(
            SchedulerConfig(max_num_seqs=max_num_seqs, token_budget=token_budget, overlap=overlap, **scheduler),
            pool,
            PrefixCache(pool) if has_prefix_cache else None,
            max_model_len=model.max_model_len,
        )
        self.batches: list[StepBatch] = []
        self.seconds: list[float] = []  # of each batch

    def run(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
        """Generate for all prompts at once; returns their answers in order. Where steps overlap, each is made before the last is run."""
        keys = [self.core.add(tuple(ids), sampling, seed=0, eos_ids=()) for ids in prompts]
        answers: dict[RequestKey, Answer] = defaultdict(Answer)
        made: deque[StepBatch] = deque()
        output: StepOutput | None = None
        while True:
            while (batch := self.core.schedule(0.0)) is not None:
                made.append(batch)
                if not self.makes_ahead:
                    break
            if not made:
                break
            batch = complete(made.popleft(), output)
            self.batches.append(batch)
            output = self.runner.execute(batch)
            self.seconds.append(output.compute_s)
            for event in self.core.apply(output):
                assert not isinstance(event, RequestFailed), event
                if isinstance(event, RequestStarted):
                    answers[event.key].cached_tokens = event.cached_tokens
                    answers[event.key].prompt_logprobs = event.prompt_logprobs or ()
                elif isinstance(event, ChoiceAdvanced) and event.token is not None:
                    answers[event.key].tokens.append(event.token)
        self.core.check()
        return [answers[key] for key in keys]
