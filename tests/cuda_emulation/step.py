"""Runs a whole step, store and attention and merge, of the CUDA kernels in the emulation, on the steps that every backend is tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.interface import AttentionLayer
from backends.kernels import launch
from backends.kernels.dispatch import attention_variant
from backends.kernels.variants import CACHE, SOURCES, store_kernel
from backends.kv_cache import quantise
from tests.backends.steps import LSE_TOLERANCE, Shape, Step, assert_rows_agree, expected, make_step
from tests.cuda_emulation.module import EmulatedModule

AMPERE, ADA, TURING = (8, 0), (8, 9), (7, 5)
SPARE_PARTS = 3
# Largest error of a row, relative to its norm: about twice what rounding weights and outputs costs, so that one wrong key in 200 shows.
# Weights over 8-bit values are bfloat16 whatever the model's type.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
QUANTISED_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 5e-3}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The modules of one combination of types and head size."""

    attention: EmulatedModule
    cache: EmulatedModule


def load(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_size: int,
    capability: tuple[int, int] = AMPERE,
    sources: Path = SOURCES,
    sanitizer: str | None = None,
) -> Kernels:
    """Compile what serves these types; only shipped variants can be asked for."""
    attention = attention_variant(q_dtype, kv_dtype, head_size, capability)
    assert attention is not None
    assert store_kernel(q_dtype, kv_dtype) is not None
    return Kernels(EmulatedModule(attention, sources, sanitizer), EmulatedModule(CACHE, sources, sanitizer))


def run_step(
    kernels: Kernels,
    step: Step,
    layer: AttentionLayer,
    scales: Tensor | None = None,
    seed: int = 0,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Store the step's keys and values and attend. Outputs and workspaces were NaN before; idle items follow the real ones, as in a graph."""
    group = layer.num_heads // layer.num_kv_heads
    meta = step.meta
    out = torch.full_like(step.q, torch.nan)
    lse = torch.full(step.q.shape[:2], torch.nan)
    target = lse if wants_lse else None
    memory = [
        step.q,
        step.k,
        step.v,
        layer.cache,
        meta.block_tables,
        meta.seq_lens,
        meta.query_start_loc,
        meta.slot_mapping,
    ]
    memory += [] if scales is None else [scales]
    kernels.cache.run(launch.store_kv(step.k, step.v, meta.slot_mapping, layer.cache, scales), seed, memory)
    counts = np.array([count for count, _ in step.sequences])
    for shape, work in launch.passes(kernels.attention.variant, counts, meta.seq_lens.numpy(), group, layer.window):
        on_device = launch.WorkOnDevice(
            _with_idle(work.items),
            _with_idle(work.merges),
            torch.full((work.num_parts + SPARE_PARTS, layer.num_kv_heads, layer.head_size), torch.nan),
            torch.full((work.num_parts + SPARE_PARTS, layer.num_kv_heads), torch.nan),
        )
        seen = [*memory, on_device.items, on_device.merges]
        arguments = (scales, meta.block_tables, meta.seq_lens, meta.query_start_loc, on_device, out, target)
        kernels.attention.run(launch.attention(shape, step.q, layer, *arguments), seed, seen)
        kernels.attention.run(launch.merge(shape, layer, meta.query_start_loc, on_device, out, target), seed, seen)
        assert on_device.part_out[work.num_parts :].isnan().all(), "a part past the workspace was written"
    return out, lse


def make_quantised_step(
    shape: Shape, sequences: Sequence[tuple[int, int]], q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Step, Tensor]:
    """Make a step over a quantised cache, and its scales. Its dense keys and values are what the cache's elements stand for.

    Slots that hold nothing have the element 0x7f (NaN as fp8) and the scale NaN.
    """
    step = make_step(shape, sequences, q_dtype)
    B = shape.block_size
    cache = torch.full(step.cache.shape, 0x7F, dtype=torch.uint8).view(kv_dtype)
    scales = torch.full(step.cache.shape[:-1], torch.nan)
    dense = []
    for s, ((count, length), pair) in enumerate(zip(step.sequences, step.dense, strict=True)):
        sides = []
        for side, rows in enumerate(pair):
            elements, factors = quantise(rows, kv_dtype) if length else (rows, rows[..., 0])
            sides.append(elements.float() * factors.unsqueeze(-1))
            for p in range(length - count):
                block = int(step.meta.block_tables[s, p // B])
                cache[block, side, :, p % B] = elements[p]
                scales[block, side, :, p % B] = factors[p]
        dense.append((sides[0], sides[1]))
    return replace(step, cache=cache, dense=tuple(dense)), scales


def check(
    kernels: Kernels, step: Step, layer: AttentionLayer, scales: Tensor | None = None, seeds: Sequence[int] = (0, 1, 2)
) -> None:
    """Run the step in several schedules and compare each row with the dense float64 computation, and the schedules with each other."""
    wanted, wanted_lse = expected(step, layer)
    tolerance = (TOLERANCE if scales is None else QUANTISED_TOLERANCE)[step.q.dtype]
    first = None
    for seed in seeds:
        fresh = replace(layer, cache=layer.cache.clone())
        out, lse = run_step(kernels, step, fresh, None if scales is None else scales.clone(), seed)
        assert_rows_agree(out, wanted, tolerance)
        assert ((lse - wanted_lse).abs() <= LSE_TOLERANCE * (1 + wanted_lse.abs())).all()
        first = first or (out, lse)
        assert torch.equal(out, first[0]), f"the schedule of seed {seed} changes the result"
        assert torch.equal(lse, first[1])


def _with_idle(rows: NDArray[np.int32]) -> Tensor:
    """Append idle items, of which all but their count of rows may be anything."""
    idle = np.full((2, rows.shape[1]), 1 << 30, np.int32)
    idle[:, 2] = 0
    return torch.from_numpy(np.concatenate([rows, idle]))
