"""Plans: one step cut for every kind of layer a model has, and where that work lies on the device. Launches nothing.

Invariant: how a sequence is cut, and which kernel serves it, depends on that sequence and the layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from backends.interface import AttentionLayer, AttentionMetadata
from backends.kernels import launch
from backends.kernels.dispatch import Shape
from backends.kernels.variants import Variant
from backends.kernels.work import Work


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What decides how a layer's work is cut."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One step: the metadata, and for each kind of layer its launches' shapes and work. Owns the workspace, which all layers share."""

    meta: AttentionMetadata
    passes: dict[LayerKind, tuple[tuple[Shape, launch.WorkOnDevice], ...]]
    num_rows: int  # rows of q that belong to a sequence


Cut = dict[LayerKind, list[tuple[Shape, Work]]]  # on the host


def kernel_dtype(layer: AttentionLayer) -> torch.dtype:
    """Return the type that queries, keys and values must have."""
    return layer.dtype or layer.cache.dtype


def kind_of(layer: AttentionLayer) -> LayerKind:
    """Return what of a layer decides its work."""
    dtypes = (kernel_dtype(layer), layer.cache.dtype)
    return LayerKind(layer.num_heads, layer.num_kv_heads, layer.head_size, layer.window, *dtypes)


def cut_step(
    attention: Callable[[LayerKind], Variant],
    query_lens: NDArray[np.integer],
    seq_lens: NDArray[np.integer],
    layers: Sequence[AttentionLayer],
) -> Cut:
    """Cut a step once for each kind of layer. `attention` names the variant that serves a kind."""
    cut: Cut = {}
    for layer in layers:
        kind = kind_of(layer)
        if kind not in cut:
            group = layer.num_heads // layer.num_kv_heads
            cut[kind] = launch.passes(attention(kind), query_lens, seq_lens, group, layer.window)
    return cut


def workspace_sizes(parts: Sequence[tuple[int, LayerKind]]) -> tuple[int, int]:
    """Return the float32 numbers that partial results and their sums take, for the largest of `parts` (partial rows per kv head, kind).

    Layers run one after another on one stream: they can share a workspace.
    """
    return (
        max((count * kind.num_kv_heads * kind.head_size for count, kind in parts), default=0),
        max((count * kind.num_kv_heads for count, kind in parts), default=0),
    )
