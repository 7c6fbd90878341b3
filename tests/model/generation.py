"""Generates through the model runner without an engine: a block table per sequence and a plain loop over steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from backends.interface import DeviceInfo
from backends.kv_cache import KVCache
from backends.registry import open_backend, probe
from service.engine.batch import EntryOutput, PromptLogprob, SampledToken, StepBatch, StepEntry
from service.model.loading import LoadedModel
from service.model.runner import ModelRunner
from tests.model.steps import CPU, make_entry


@dataclass
class Generation:
    """One sequence: its prompt, what it has generated, and where its computed tokens lie."""

    prompt: list[int]
    sampling: dict[str, Any]
    num_wanted: int
    seed: int = 0
    samples: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_chunks: int = 0

    @property
    def output(self) -> list[int]:
        return [sample.token_id for sample in self.samples]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return len(self.samples) >= self.num_wanted


class Bench:
    """A runner over a loaded model, and the blocks that are free."""

    def __init__(self, model: LoadedModel, backend: str, *, block_size: int = 16, num_blocks: int = 256) -> None:
        spec = model.decoder.kv_cache_spec(block_size)
        refusals = probe(spec, DeviceInfo("cpu"))[backend]
        if refusals:
            pytest.skip(f"{backend}: {'; '.join(refusals)}")
        self.block_size = block_size
        self.cache = KVCache(spec, num_blocks, CPU)
        self.runner = ModelRunner(
            model.decoder,
            open_backend(backend, spec, DeviceInfo("cpu")),
            self.cache,
            num_valid_ids=model.config.vocab_size,
            max_model_len=model.max_model_len,
            checks_slots=True,
        )
        self.free = list(range(1, num_blocks))
        random.Random(3).shuffle(self.free)  # neighbouring blocks would hide a wrong look-up
        self.num_mixed_steps = 0

    def step(self, generations: Sequence[Generation], budget: int = 10_000) -> None:
        """Compute the next tokens of those that are not done: decodes first, then chunks of prompts, within `budget` tokens."""
        waiting = sorted((g for g in generations if not g.is_done), key=lambda g: len(g.tokens) - g.num_computed > 1)
        entries, taken = [], []
        for generation in waiting:
            count = min(budget, len(generation.tokens) - generation.num_computed)
            if count > 0:
                budget -= count
                entries.append(self._entry(generation, count))
                taken.append(generation)
        self.num_mixed_steps += len({len(entry.token_ids) > 1 for entry in entries}) == 2
        output = self.runner.execute(StepBatch(step_id=1, entries=tuple(entries)))
        for generation, entry, result in zip(taken, entries, output.outputs, strict=True):
            self._apply(generation, entry, result)

    def finish(self, *generations: Generation, budget: int = 10_000) -> None:
        """Run all to their end."""
        while not all(generation.is_done for generation in generations):
            self.step(generations, budget)

    def preempt(self, generation: Generation) -> None:
        """Take the blocks away and ruin what was in them."""
        for layer in range(self.cache.spec.num_layers):
            self.cache.layer(layer)[generation.blocks] = torch.nan
        self.free[:0] = generation.blocks
        generation.blocks, generation.num_computed = [], 0

    def share(self, source: Generation, target: Generation, num_blocks: int) -> None:
        """Let `target` start on whole computed blocks of `source`."""
        assert source.prompt[: num_blocks * self.block_size] == target.prompt[: num_blocks * self.block_size]
        target.blocks = source.blocks[:num_blocks]
        target.num_computed = num_blocks * self.block_size

    def _entry(self, generation: Generation, count: int) -> StepEntry:
        start = generation.num_computed
        tokens = generation.tokens[start : start + count]
        while len(generation.blocks) * self.block_size < start + count:
            generation.blocks.append(self.free.pop())
        samples = start + count == len(generation.tokens)
        targets = None
        if "prompt_logprobs" in generation.sampling and start < len(generation.prompt) - 1:
            targets = generation.prompt[start + 1 : start + count + 1]
        return make_entry(
            tokens,
            start=start,
            block_ids=generation.blocks,
            seeds=(generation.seed,) if samples else (),
            num_output_tokens=len(generation.samples),
            prompt=generation.prompt,
            output=generation.output,
            targets=targets,
            **generation.sampling,
        )

    def _apply(self, generation: Generation, entry: StepEntry, result: EntryOutput) -> None:
        assert result.error is None
        generation.num_computed = entry.seq_len
        generation.num_chunks += len(entry.token_ids) > 1
        generation.samples += result.samples
        generation.prompt_logprobs += result.prompt_logprobs
