"""Runs a whole step, store and attention and merge, of the CUDA kernels in the emulation, on the steps that every backend is tested with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backends.interface import AttentionLayer
from backends.kernels import launch
from backends.kernels.variants import SOURCES, attention_variant, cache_variant
from backends.kernels.work import divide
from tests.backends.steps import Step
from tests.cuda_emulation.module import EmulatedModule

AMPERE, TURING = (8, 0), (7, 5)
SPARE_PARTS = 3


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
    cache = cache_variant(q_dtype, kv_dtype)
    assert attention is not None
    assert cache is not None
    return Kernels(EmulatedModule(attention, sources, sanitizer), EmulatedModule(cache, sources, sanitizer))


def run_step(
    kernels: Kernels,
    step: Step,
    layer: AttentionLayer,
    scales: Tensor | None = None,
    seed: int = 0,
    as_decode: bool | None = None,
    idle_items: int = 2,
    store: bool = True,
) -> tuple[Tensor, Tensor]:
    """Store the step's keys and values and attend. Outputs and workspaces were NaN before; idle items follow the real ones, as in a graph."""
    group = layer.num_heads // layer.num_kv_heads
    counts = [count for count, _ in step.sequences]
    is_decode = max(counts, default=0) * group <= 16 if as_decode is None else as_decode
    shape = launch.attention_shape(kernels.attention.variant, group, is_decode)
    work = divide(torch.tensor(counts).numpy(), step.meta.seq_lens.numpy(), group, shape.tile_rows, layer.window)

    def padded(rows: Tensor) -> Tensor:
        idle = torch.full((idle_items, 8), 1 << 30, dtype=torch.int32)
        idle[:, 2] = 0
        return torch.cat([rows, idle])

    on_device = launch.WorkOnDevice(
        padded(torch.from_numpy(work.items)),
        padded(torch.from_numpy(work.merges)),
        torch.full((work.num_parts + SPARE_PARTS, layer.num_kv_heads, layer.head_size), torch.nan),
        torch.full((work.num_parts + SPARE_PARTS, layer.num_kv_heads), torch.nan),
    )
    out = torch.full_like(step.q, torch.nan)
    lse = torch.full(step.q.shape[:2], torch.nan)
    meta = step.meta
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
    memory += [on_device.items, on_device.merges, *([] if scales is None else [scales])]
    if store:
        kernels.cache.run(launch.store_kv(step.k, step.v, meta.slot_mapping, layer.cache, scales), seed, memory)
    arguments = (scales, meta.block_tables, meta.seq_lens, meta.query_start_loc, on_device, out, lse)
    kernels.attention.run(launch.attention(shape, step.q, layer, *arguments), seed, memory)
    kernels.attention.run(launch.merge(shape, layer, meta.query_start_loc, on_device, out, lse), seed, memory)
    assert on_device.part_out[work.num_parts :].isnan().all(), "a part past the workspace was written"
    return out, lse
