"""Steps for the tests of backends: sequences laid out in blocks at random, poisoned memory around them, and a dense float64 answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from backends.kv_cache import dequantise, quantise

# Largest error of a row, relative to the norm of the row: float32 rounding of a few thousand sums; two roundings to bfloat16 or float16.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Largest error of a log-sum-exp, relative to 1 + |lse|: scores are float32 for every dtype.
LSE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, kv heads, head size and block size of a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}q{self.num_kv_heads}kv-d{self.head_size}-b{self.block_size}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step over sequences of (number of queries, number of keys): what a backend gets, and the dense keys and values behind it."""

    shape: Shape
    sequences: tuple[tuple[int, int], ...]
    meta: AttentionMetadata
    cache: Tensor  # [num_blocks, 2, Hkv, B, D]: earlier keys and values in place, NaN everywhere else
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hkv, D], the step's own
    v: Tensor
    dense: tuple[tuple[Tensor, Tensor], ...]  # per sequence [L, Hkv, D] keys, values; as a quantised pool holds them
    scales: Tensor | None = None  # [num_blocks, 2, Hkv, B] of a quantised pool

    def layer(
        self, window: int | None = None, soft_cap: float | None = None, scale: float | None = None
    ) -> AttentionLayer:
        """Return a layer over the cache."""
        shape = self.shape
        return AttentionLayer(
            index=0,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            scale=shape.head_size**-0.5 if scale is None else scale,
            cache=self.cache,
            window=window,
            soft_cap=soft_cap,
            scales=self.scales,
            dtype=None if self.scales is None else self.q.dtype,
        )


def make_step(
    shape: Shape,
    sequences: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    seed: int = 0,
    magnitude: float = 1.0,
    spare_columns: int = 2,
    spare_rows: int = 0,
    device: torch.device | None = None,
    quantised: torch.dtype | None = None,
) -> Step:
    """Lay out `sequences` in randomly permuted blocks. Each sequence's numbers depend on `seed` and its lengths, not on its neighbours.

    The block table is `spare_columns` wider than the longest sequence needs; its undefined entries name a block that does not exist.
    `spare_rows` tokens of padding write to the null block. In a `quantised` pool what is undefined has a scale of NaN.
    """
    H, Hkv, D, B = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size
    counts = [(length + B - 1) // B for _, length in sequences]
    num_blocks = sum(counts) + 5
    generator = torch.Generator().manual_seed(seed + 1)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    if quantised is None:
        cache = torch.full((num_blocks, 2, Hkv, B, D), torch.nan, dtype=dtype)
        scales = None
    else:
        cache = torch.full((num_blocks, 2, Hkv, B, D), 0x55, dtype=torch.uint8).view(quantised)
        scales = torch.full((num_blocks, 2, Hkv, B), torch.nan)
    tables = torch.full((len(sequences), max(counts, default=0) + spare_columns), 1 << 30, dtype=torch.int32)
    dense, queries, slots, own_keys, own_values = [], [], [], [], []
    for s, (count, length) in enumerate(sequences):
        own = torch.Generator().manual_seed(seed * 7919 + count * 104729 + length)
        kv = (torch.randn(2, length, Hkv, D, generator=own) * magnitude).to(dtype)
        queries.append((torch.randn(count, H, D, generator=own) * magnitude).to(dtype))
        own_keys.append(kv[0, length - count :])
        own_values.append(kv[1, length - count :])
        elements, factors = (kv, None) if quantised is None else quantise(kv, quantised)
        if factors is not None:
            kv = dequantise(elements, factors)
        dense.append((kv[0], kv[1]))
        for index in range(counts[s]):
            block = free.pop()
            tables[s, index] = block
            held = max(0, min(B, length - count - index * B))
            held_rows = slice(index * B, index * B + held)
            if factors is None or scales is None:
                cache[block, :, :, :held] = kv[:, held_rows].transpose(1, 2)
            else:
                cache.view(torch.uint8)[block, :, :, :held] = elements.view(torch.uint8)[:, held_rows].transpose(1, 2)
                scales[block, :, :, :held] = factors[:, held_rows].transpose(1, 2)
        slots += [int(tables[s, p // B]) * B + p % B for p in range(length - count, length)]
    starts = torch.tensor([0, *(count for count, _ in sequences)]).cumsum(0).to(torch.int32)
    k, v = (torch.cat([*rows, torch.ones(spare_rows, Hkv, D, dtype=dtype)]) for rows in (own_keys, own_values))
    q = torch.cat([*queries, torch.ones(spare_rows, H, D, dtype=dtype)])
    where = device or torch.device("cpu")
    meta = AttentionMetadata(
        query_start_loc=starts.to(where),
        seq_lens=torch.tensor([length for _, length in sequences], dtype=torch.int32).to(where),
        block_tables=tables.to(where),
        slot_mapping=torch.tensor(slots + [0] * spare_rows, dtype=torch.int64).to(where),
        max_query_len=max((n for n, _ in sequences), default=0),
        max_seq_len=max((length for _, length in sequences), default=0),
    )
    return Step(
        shape,
        tuple(sequences),
        meta,
        cache.to(where),
        q.to(where),
        k.to(where),
        v.to(where),
        tuple(dense),
        None if scales is None else scales.to(where),
    )


def attend(backend: AttentionBackend[Any], step: Step, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """Store the step's keys and values and run; the outputs were NaN before. Returns out [T, H, D] and lse [T, H] on the CPU."""
    plan = backend.plan(step.meta, [layer])
    backend.store_kv(step.k, step.v, layer, plan)
    out = torch.full_like(step.q, torch.nan)
    lse = torch.full(step.q.shape[:2], torch.nan, dtype=torch.float32, device=step.q.device)
    backend.run(step.q, layer, plan, out, lse)
    return out.cpu(), lse.cpu()


def expected(step: Step, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """Return the same by dense float64 arithmetic, from numbers that never were in blocks."""
    outs, sums = [], []
    start = 0
    group = layer.num_heads // layer.num_kv_heads
    for (count, length), (k, v) in zip(step.sequences, step.dense, strict=True):
        q = step.q[start : start + count].cpu().double()
        start += count
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))  # [L, H, D]
        scores = torch.einsum("nhd,lhd->hnl", q, keys) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        distance = torch.arange(length - count, length).unsqueeze(1) - torch.arange(length)
        hidden = distance < 0
        if layer.window is not None:
            hidden |= distance >= layer.window
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hnl,lhd->nhd", torch.softmax(scores, -1), values))
        sums.append(torch.logsumexp(scores, -1).T)
    return torch.cat(outs), torch.cat(sums)


def assert_rows_agree(actual: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compare row by row: one bad row must not hide in a mean."""
    error = (actual.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    assert not error.isnan().any(), f"NaN in rows {error.isnan().nonzero()[:5].tolist()}"
    assert error.numel() == 0 or error.max() <= tolerance, (
        f"error {error.max():.2e} in row {error.argmax()}, allowed {tolerance:.0e}"
    )
