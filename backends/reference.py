"""Attention over blocks in plain torch, on any device: the definition that the other backends must match. Not meant to be fast.

Scores, softmax and sums are float32 (float64 for a float64 pool) whatever the dtype of the pool. Invariant: every sequence is computed
with shapes that depend on it alone, so that neighbours in the batch cannot change a bit of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata, DeviceInfo
from backends.kv_cache import KVCacheSpec, dequantise, quantise

# Queries are taken in runs, so that the score matrix of a long prompt stays under 64 MiB of float32.
MAX_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step: rows first … first + count - 1 of q, and the blocks that hold its keys."""

    first: int
    count: int
    num_keys: int
    blocks: Tensor  # [ceil(num_keys / B)] int64


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The step with its lengths on the host."""

    spans: tuple[Span, ...]
    num_rows: int  # rows of q that belong to a sequence
    slots: Tensor  # [T] int64


class ReferenceBackend:
    """Gathers each sequence's keys and values by its block table and computes dense attention."""

    name = "reference"

    def unsupported(self, spec: KVCacheSpec, device: DeviceInfo) -> list[str]:
        """Return why `spec` cannot be served on `device`: impossible head counts, a non-float pool, or a missing device."""
        reasons = spec.faults()
        if not spec.dtype.is_floating_point:
            reasons.append(f"dtype {spec.dtype} is not a floating-point type")
        if device.kind == "cuda" and not torch.cuda.is_available():
            reasons.append("device is cuda, but torch sees no usable CUDA device")
        return reasons

    def describe(self) -> dict[str, str]:
        """Say that torch computes everything, with how many threads."""
        return {"implementation": f"torch {torch.__version__}", "threads": str(torch.get_num_threads())}

    def prepare(self, spec: KVCacheSpec, report: Callable[[str], None]) -> None:
        """Do nothing: torch brings its kernels."""

    def plan(self, meta: AttentionMetadata, layers: Sequence[AttentionLayer]) -> ReferencePlan:
        """Bring lengths to the host and cut each block table to the blocks its sequence has."""
        block_size = layers[0].cache.shape[3] if layers else 1
        starts: list[int] = meta.query_start_loc.tolist()
        lengths: list[int] = meta.seq_lens.tolist()
        spans = tuple(
            Span(
                first=starts[s],
                count=starts[s + 1] - starts[s],
                num_keys=length,
                blocks=meta.block_tables[s, : (length + block_size - 1) // block_size].long(),
            )
            for s, length in enumerate(lengths)
        )
        return ReferencePlan(spans, starts[-1], meta.slot_mapping)

    def store_kv(self, k: Tensor, v: Tensor, layer: AttentionLayer, plan: ReferencePlan) -> None:
        """Write k, v [T, Hkv, D] into the slots of the step, converted to the dtype of the pool or quantised."""
        block_size = layer.cache.shape[3]
        blocks, offsets = plan.slots // block_size, plan.slots % block_size
        for side, rows in enumerate((k, v)):
            if layer.scales is None:
                layer.cache[blocks, side, :, offsets] = rows.to(layer.cache.dtype)
                continue
            elements, scales = quantise(rows, layer.cache.dtype)
            # Bytes, because torch cannot scatter float8.
            layer.cache.view(torch.uint8)[blocks, side, :, offsets] = elements.view(torch.uint8)
            layer.scales[blocks, side, :, offsets] = scales

    def run(
        self, q: Tensor, layer: AttentionLayer, plan: ReferencePlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend sequence by sequence. Rows of q past the last sequence (padding) become zeros and -inf."""
        for span in plan.spans:
            for first in range(0, span.count, run := max(1, MAX_SCORES // max(1, layer.num_heads * span.num_keys))):
                _attend(q, layer, span, first, min(first + run, span.count), out, lse)
        out[plan.num_rows :] = 0
        if lse is not None:
            lse[plan.num_rows :] = -torch.inf


def _attend(
    q: Tensor, layer: AttentionLayer, span: Span, first: int, last: int, out: Tensor, lse: Tensor | None
) -> None:
    """Compute the span's queries first … last - 1."""
    H, Hkv, D, B = layer.num_heads, layer.num_kv_heads, layer.head_size, layer.cache.shape[3]
    n = last - first
    dtype = torch.float32 if layer.scales is not None else torch.promote_types(layer.cache.dtype, torch.float32)
    rows = slice(span.first + first, span.first + last)
    # The queries of this run stand at positions p0 … p1 - 1 and see keys k0 … p1 - 1. Nothing outside is read: a block that has
    # left the window may hold anything, and a weight of zero times NaN would still be NaN.
    p0, p1 = span.num_keys - span.count + first, span.num_keys - span.count + last
    k0 = max(0, p0 - layer.window + 1) if layer.window is not None else 0
    k0 = min(k0, max(p1, 0))
    blocks = span.blocks[k0 // B : (max(p1, 0) + B - 1) // B]
    kv = _gather(layer, blocks).to(dtype)  # [blocks, 2, Hkv, B, D]
    skipped = k0 % B
    kv = kv.permute(1, 2, 0, 3, 4).reshape(2, Hkv, -1, D)[:, :, skipped : skipped + max(p1, 0) - k0]
    k, v = kv  # each [Hkv, L, D]
    queries = q[rows].to(dtype).view(n, Hkv, H // Hkv, D).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    scores = (queries * layer.scale) @ k.unsqueeze(1).transpose(-1, -2)  # [Hkv, G, n, L]
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    positions = torch.arange(p0, p1, device=q.device).unsqueeze(1)
    keys = torch.arange(k0, k0 + k.shape[1], device=q.device)
    visible = keys <= positions  # [n, L]
    if layer.window is not None:
        visible &= keys > positions - layer.window
    scores = scores.masked_fill(~visible, -torch.inf)
    sums = torch.logsumexp(scores, dim=-1)  # -inf for a row that sees no key
    # Subtracting 0 from such a row's scores keeps its weights exp(-inf) = 0; -inf - -inf would be NaN.
    weights = torch.exp(scores - sums.masked_fill(sums == -torch.inf, 0).unsqueeze(-1))
    result = weights @ v.unsqueeze(1)  # [Hkv, G, n, D]
    out[rows] = result.permute(2, 0, 1, 3).reshape(n, H, D).to(out.dtype)
    if lse is not None:
        lse[rows] = sums.permute(2, 0, 1).reshape(n, H).float()


def _gather(layer: AttentionLayer, blocks: Tensor) -> Tensor:
    """Return the keys and values of `blocks`, dequantised if the pool is quantised."""
    if layer.scales is None:
        return layer.cache[blocks]
    elements = layer.cache.view(torch.uint8)[blocks].view(layer.cache.dtype)
    return dequantise(elements, layer.scales[blocks])
