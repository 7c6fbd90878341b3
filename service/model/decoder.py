"""The decoder of every family: embedding, layers of attention and gated MLP, final norm, output head. Knows no files and no requests.

    x ── norm ── qkv ── (head norms) ── rotary ── store_kv, run ── o ── (norm) ──┐ + residual
    x ── norm ── gate_up ── activation · up ── down ── (norm) ───────────────────┘ + residual

The norm before a block is fused with the addition before it. Invariant: `forward` keeps nothing of a step; all of a step's state is in
its arguments, the plan and the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from backends.interface import AttentionBackend, AttentionLayer
from backends.kv_cache import KVCache, KVCacheSpec
from backends.ops import Linear, Ops, Weight
from service.errors import ModelLoadError
from service.model.config import DecoderConfig
from service.model.layers import DecoderLayer
from service.model.mixing import mixing_matrix
from service.model.rope import RopeTable, make_rope_table
from service.model.weights import DecoderWeights


@runtime_checkable
class SharedRows(Protocol):
    """A packed linear that can also look rows up, so that a tied embedding needs no second copy."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] of the weight, [T, N], in new memory."""
        ...


class Decoder:
    """A model ready to run on one device. Used from one thread; bind a cache before the first `forward`.

    T tokens of a step, N hidden size, V vocabulary rows.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops, max_model_len: int) -> None:
        """Pack all weights, reading `weights.layers` one at a time. Positions from `max_model_len` on cannot be computed."""
        self.config = config
        self.max_model_len = max_model_len
        self.device = weights.final_norm.device
        self.dtype = weights.dtype
        self.attention_layers: tuple[AttentionLayer, ...] = ()
        self._ops = ops
        # Gemma's factor is rounded to the model's dtype first, as its reference does.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=self.dtype))
        kinds = tuple(dict.fromkeys(config.ropes))
        self._ropes: tuple[RopeTable, ...] = tuple(make_rope_table(rope, max_model_len, self.device) for rope in kinds)
        self._layers = tuple(
            DecoderLayer(layer, kinds.index(rope), config.activation, ops)
            for layer, rope in zip(weights.layers, config.ropes, strict=True)
        )
        # The norm that follows a layer's last addition: the next layer's first, or the final one.
        self._next_norms = (*(layer.attention_norm for layer in self._layers[1:]), weights.final_norm)
        self._head: Linear = ops.pack_linear(weights.head)
        self._embed = self._lookup(weights.embedding)
        self._mix: Linear | None = None  # set where keys are quantised
        self._split = [config.num_heads, config.num_kv_heads, config.num_kv_heads]

    def _lookup(self, embedding: Weight) -> Callable[[Tensor], Tensor]:
        """Return what looks rows of the embedding up: the head that shares it, or a copy of its own."""
        packed: object = self._head
        if self.config.tie_embeddings and isinstance(packed, SharedRows):
            return packed.rows
        if isinstance(embedding, Tensor):
            return partial(self._ops.rows, embedding)
        table: object = self._ops.pack_linear(embedding)
        assert isinstance(table, SharedRows)  # every linear of a quantised weight is
        return table.rows

    def kv_cache_spec(
        self, block_size: int, dtype: torch.dtype | None = None, quantised: torch.dtype | None = None
    ) -> KVCacheSpec:
        """Return the cache this model needs; its dtype is the model's unless given, its elements may be quantised."""
        config = self.config
        return KVCacheSpec(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            block_size=block_size,
            dtype=dtype or self.dtype,
            quantised=quantised,
        )

    def bind_cache(self, cache: KVCache) -> tuple[AttentionLayer, ...]:
        """Make `attention_layers`, each with its view of `cache`; raises `ModelLoadError` if the cache has another shape."""
        config, spec = self.config, cache.spec
        self._mix = None
        if spec.quantised is not None:
            self._mix = self._ops.pack_linear(mixing_matrix(config.head_size, self.dtype, self.device))  # symmetric
        needed = self.kv_cache_spec(spec.block_size, spec.dtype, spec.quantised)
        if spec != needed:
            raise ModelLoadError(f"the cache {spec} does not fit the model {needed}")
        self.attention_layers = tuple(
            AttentionLayer(
                index=index,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                scale=config.attention_scale,
                cache=cache.layer(index),
                scales=cache.scales(index),
                dtype=spec.dtype,
                window=window,
                soft_cap=config.attention_soft_cap,
            )
            for index, window in enumerate(config.windows)
        )
        return self.attention_layers

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, backend: AttentionBackend[Any]) -> Tensor:
        """Compute one step: token_ids, positions [T] int64 → hidden states after the final norm [T, N], and their keys in the cache.

        `plan` is `backend.plan(meta, self.attention_layers)` for these tokens. Positions are below `max_model_len`.
        """
        config, ops = self.config, self._ops
        eps, head_size, split = config.rms_norm_eps, config.head_size, self._split
        rms_norm, add_rms_norm = ops.rms_norm, ops.add_rms_norm
        num_tokens = token_ids.shape[0]
        rotations = [(ops.rows(rope.cos, positions), ops.rows(rope.sin, positions)) for rope in self._ropes]
        residual = self._embed(token_ids)  # [T, N], ours to change
        if self._embedding_scale is not None:
            ops.scale_(residual, self._embedding_scale)
        attended = torch.empty((num_tokens, config.num_heads, head_size), dtype=self.dtype, device=self.device)
        attended_flat = attended.view(num_tokens, config.num_heads * head_size)  # one buffer serves every layer

        normed = rms_norm(residual, self._layers[0].attention_norm, eps)
        for layer, attention, next_norm in zip(self._layers, self.attention_layers, self._next_norms, strict=True):
            qkv = layer.qkv(normed).view(num_tokens, -1, head_size)  # [T, H + 2 Hkv, D]
            q, k, v = qkv.split_with_sizes(split, 1)  # three views of it
            if layer.q_norm is not None and layer.k_norm is not None:
                ops.rms_norm_heads_(q, layer.q_norm, eps)
                ops.rms_norm_heads_(k, layer.k_norm, eps)
            cos, sin = rotations[layer.rope_index]
            ops.rotary_(q, k, cos, sin)
            if self._mix is not None:  # v comes out too and is not used: one product over rows that lie side by side
                q, k, _ = self._mix(qkv.view(-1, head_size)).view(num_tokens, -1, head_size).split_with_sizes(split, 1)
            backend.store_kv(k, v, attention, plan)
            backend.run(q, attention, plan, attended)
            block = layer.o(attended_flat)
            if layer.post_attention_norm is not None:
                block = rms_norm(block, layer.post_attention_norm, eps)
            normed = add_rms_norm(block, residual, layer.mlp_norm, eps)
            block = layer.down(layer.gated(normed))
            if layer.post_mlp_norm is not None:
                block = rms_norm(block, layer.post_mlp_norm, eps)
            normed = add_rms_norm(block, residual, next_norm, eps)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Project the rows whose logits are wanted: [R, N] → [R, V] as the head gives them; capped, in float32, where the family caps."""
        logits = self._head(hidden)
        cap = self.config.logit_soft_cap
        return logits if cap is None else (logits.float() / cap).tanh_().mul_(cap)
