"""Builds step entries, and a one-layer model small enough to think about, for the tests of sampler, packing and runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from backends.interface import AttentionBackend, AttentionLayer
from backends.kv_cache import KVCache, KVCacheSpec
from service.engine.batch import SequenceId, StepEntry
from service.messages import SamplingParams

CPU = torch.device("cpu")


def make_entry(
    token_ids: Sequence[int] = (1,),
    *,
    start: int = 0,
    block_ids: Sequence[int] = (1, 2, 3, 4),
    seeds: Sequence[int] = (7,),
    num_drafts: int = 0,
    sequence_id: int = 1,
    num_output_tokens: int = 0,
    eos_ids: Sequence[int] = (),
    prompt: Sequence[int] | None = None,
    output: Sequence[int] | None = None,
    targets: Sequence[int] | None = None,
    **sampling: Any,
) -> StepEntry:
    """Build an entry; further arguments are sampling parameters, checked as a wire would check them."""
    return StepEntry(
        sequence_id=SequenceId(sequence_id),
        token_ids=tuple(token_ids),
        start=start,
        block_ids=tuple(block_ids),
        sampling=msgspec.convert(sampling, SamplingParams),
        seeds=tuple(seeds),
        num_drafts=num_drafts,
        num_output_tokens=num_output_tokens,
        eos_ids=tuple(eos_ids),
        prompt_token_ids=None if prompt is None else tuple(prompt),
        output_token_ids=None if output is None else tuple(output),
        prompt_logprob_targets=None if targets is None else tuple(targets),
    )


class AttentionModel:
    """One attention layer over an embedding: every logit depends on every earlier token, its order and where its KV was stored."""

    num_heads, num_kv_heads, head_size, vocab_size = 4, 2, 8, 61

    def __init__(self, poisoned_id: int | None = None) -> None:
        """Draw seeded weights. `poisoned_id`: a token whose hidden state is NaN."""
        generator = torch.Generator().manual_seed(5)
        width = self.num_heads * self.head_size
        self.embedding = torch.randn(self.vocab_size, width, generator=generator)
        self.to_keys = torch.randn(width, self.num_kv_heads * self.head_size, generator=generator) / 4
        self.to_values = torch.randn(width, self.num_kv_heads * self.head_size, generator=generator) / 2
        self.head = torch.randn(width, self.vocab_size, generator=generator)
        self.poisoned_id = poisoned_id
        self.layers: list[AttentionLayer] = []
        self.rows_of_logits: list[int] = []

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        return self.layers

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec(1, self.num_heads, self.num_kv_heads, self.head_size, block_size, torch.float32)

    def bind_cache(self, cache: KVCache) -> None:
        scale = self.head_size**-0.5
        self.layers = [AttentionLayer(0, self.num_heads, self.num_kv_heads, self.head_size, scale, cache.layer(0))]

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, backend: AttentionBackend[Any]) -> Tensor:
        width = self.num_heads * self.head_size
        angles = positions[:, None] / torch.arange(1, width + 1)
        hidden = self.embedding[token_ids] + torch.sin(angles)
        keys = (hidden @ self.to_keys).view(-1, self.num_kv_heads, self.head_size)
        values = (hidden @ self.to_values).view(-1, self.num_kv_heads, self.head_size)
        queries = hidden.view(-1, self.num_heads, self.head_size)
        out = torch.empty_like(queries)
        backend.store_kv(keys, values, self.layers[0], plan)
        backend.run(queries, self.layers[0], plan, out)
        result = hidden + out.view(-1, width)
        if self.poisoned_id is not None:
            result[token_ids == self.poisoned_id] = torch.nan
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows_of_logits.append(len(hidden))
        return hidden @ self.head
