"""The CUDA kernels as an attention backend, whoever compiles and launches them: CuPy on a GPU, the emulation in tests.

Invariant: everything that a launch needs beside the step's own tensors lies in its plan, and nothing here waits for the device: lengths are
read from the host copies that come with the metadata, and what the plan computes goes over in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata
from backends.kernels import launch
from backends.kernels.dispatch import Shape, attention_variant, shared_bytes_limit
from backends.kernels.variants import BLOCK_SIZES, CACHE, SHIPPED, TYPE_NAMES, Variant
from backends.kv_cache import KVCacheSpec

ALIGNMENT = 16  # bytes of the kernels' loads


class KernelModule(Protocol):
    """A compiled variant."""

    def run(self, launch: launch.Launch) -> None:
        """Start a launch on the current stream; the caller keeps its tensors alive."""
        ...


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


class KernelBackend:
    """Plans and launches. `load` compiles a variant for the device or takes it from a cache; it is called once a variant."""

    def __init__(self, load: Callable[[Variant], KernelModule], capability: tuple[int, int]) -> None:
        """Serve devices of compute capability `capability`."""
        self._load = load
        self._capability = capability
        self._modules: dict[Variant, KernelModule] = {}

    def module(self, variant: Variant) -> KernelModule:
        """Return the compiled variant."""
        if variant not in self._modules:
            self._modules[variant] = self._load(variant)
        return self._modules[variant]

    def prepare(self, spec: KVCacheSpec, report: Callable[[str], None]) -> None:
        """Compile or load what `spec` needs."""
        attention = attention_variant(spec.dtype, spec.element_dtype, spec.head_size, self._capability)
        assert attention is not None, "unsupported() refuses what has no variant"
        for variant in (attention, CACHE):
            report(f"preparing kernels: {variant.name}")
            self.module(variant)

    def plan(self, meta: AttentionMetadata, layers: Sequence[AttentionLayer]) -> KernelPlan:
        """Cut the step for every kind of layer and send the work over in one copy."""
        query_lens, seq_lens = host_lengths(meta)
        cut = {}
        for layer in layers:
            kind = _kind(layer)
            if kind not in cut:
                group = layer.num_heads // layer.num_kv_heads
                cut[kind] = launch.passes(self._attention(kind), query_lens, seq_lens, group, layer.window)
        works = [work for pairs in cut.values() for _, work in pairs]
        rows = [*(work.items for work in works), *(work.merges for work in works)]
        device = meta.seq_lens.device
        sent = iter(_send(rows, device))
        items = [next(sent) for _ in works]
        merges = [next(sent) for _ in works]
        # Layers run one after another on one stream: they can share the largest workspace.
        sizes = [(work.num_parts, kind) for kind, pairs in cut.items() for _, work in pairs]
        parts = max((count * kind.num_kv_heads * kind.head_size for count, kind in sizes), default=0)
        heads = max((count * kind.num_kv_heads for count, kind in sizes), default=0)
        part_out = torch.empty(parts, dtype=torch.float32, device=device)
        part_lse = torch.empty(heads, dtype=torch.float32, device=device)
        on_device = iter([launch.WorkOnDevice(i, m, part_out, part_lse) for i, m in zip(items, merges, strict=True)])
        passes = {kind: tuple((shape, next(on_device)) for shape, _ in pairs) for kind, pairs in cut.items()}
        return KernelPlan(meta, passes, int(query_lens.sum()))

    def store_kv(self, k: Tensor, v: Tensor, layer: AttentionLayer, plan: KernelPlan) -> None:
        """Write or quantise k and v into their slots."""
        if not len(plan.meta.slot_mapping):
            return
        wanted = _kernel_dtype(layer)
        k, v = (_aligned(rows.to(wanted)) for rows in (k, v))
        self.module(CACHE).run(launch.store_kv(k, v, plan.meta.slot_mapping, layer.cache, layer.scales))

    def run(self, q: Tensor, layer: AttentionLayer, plan: KernelPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend, then merge what was split. Rows of q past the last sequence (padding) become zeros and -inf."""
        wanted = _kernel_dtype(layer)
        if q.dtype != wanted or out.dtype != wanted:
            converted = torch.empty(out.shape, dtype=wanted, device=out.device)
            self.run(q.to(wanted), layer, plan, converted, lse)
            out.copy_(converted)
            return
        kind = _kind(layer)
        meta, module = plan.meta, self.module(self._attention(kind))
        rows = _aligned(q)
        if rows.stride(1) != rows.shape[2]:
            rows = rows.contiguous()
        assert out.stride(1) == out.shape[2], "the heads of out must be contiguous"
        assert lse is None or lse.is_contiguous(), "lse must be contiguous"
        for shape, work in plan.passes[kind]:
            arguments = (layer.scales, meta.block_tables, meta.seq_lens, meta.query_start_loc, work, out, lse)
            module.run(launch.attention(shape, rows, layer, *arguments))
            if len(work.merges):
                module.run(launch.merge(shape, layer, meta.query_start_loc, work, out, lse))
        if plan.num_rows < q.shape[0]:
            out[plan.num_rows :] = 0
            if lse is not None:
                lse[plan.num_rows :] = -torch.inf

    def refusals(self, spec: KVCacheSpec) -> list[str]:
        """Return what no shipped kernel serves of `spec`, whatever the device."""
        reasons = []
        if spec.block_size not in BLOCK_SIZES:
            reasons.append(f"block_size is {spec.block_size}; kernels exist for {', '.join(map(str, BLOCK_SIZES))}")
        types = (spec.dtype, spec.element_dtype)
        if attention_variant(*types, spec.head_size, self._capability) is None:
            major, minor = self._capability
            sizes = [variant.head_size for variant in SHIPPED if (variant.q_dtype, variant.kv_dtype) == types]
            served = sorted(
                {size for size in sizes if size is not None and attention_variant(*types, size, self._capability)}
            )
            reasons.append(
                f"no kernel is shipped for {_name(spec.dtype)} queries over a {_name(spec.element_dtype)} pool with head_size "
                f"{spec.head_size} on compute capability {major}.{minor} and its {shared_bytes_limit(self._capability) >> 10} KB of shared "
                f"memory a block ({_head_sizes(served)})"
            )
        return reasons

    def _attention(self, kind: LayerKind) -> Variant:
        variant = attention_variant(kind.q_dtype, kind.kv_dtype, kind.head_size, self._capability)
        assert variant is not None, "unsupported() refuses what has no variant"
        return variant


def host_lengths(meta: AttentionMetadata) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return query and key lengths [S] from the host copies; without them, from the device, which then has to be waited for."""
    if meta.host_lengths is not None:
        return meta.host_lengths
    starts = meta.query_start_loc.cpu().numpy().astype(np.int64)
    return np.diff(starts), meta.seq_lens.cpu().numpy().astype(np.int64)


def _send(rows: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Copy arrays [n, 8] to the device in one transfer that the host does not wait for."""
    if not rows:
        return []
    packed = torch.from_numpy(np.concatenate(rows))
    if device.type == "cuda":
        packed = packed.pin_memory()
    sent = packed.to(device, non_blocking=True)
    ends = np.cumsum([len(part) for part in rows]).tolist()
    return [sent[end - len(part) : end] for part, end in zip(rows, ends, strict=True)]


def _kernel_dtype(layer: AttentionLayer) -> torch.dtype:
    """Return the type that queries, keys and values must have."""
    return layer.dtype or layer.cache.dtype


def _kind(layer: AttentionLayer) -> LayerKind:
    dtypes = (_kernel_dtype(layer), layer.cache.dtype)
    return LayerKind(layer.num_heads, layer.num_kv_heads, layer.head_size, layer.window, *dtypes)


def _aligned(rows: Tensor) -> Tensor:
    """Return rows [T, H, D] whose heads begin at multiples of 16 bytes, in place where they do."""
    size = rows.element_size()
    offsets = (rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size)
    fits = rows.stride(2) == 1 and not any(offset % ALIGNMENT for offset in offsets)
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _head_sizes(served: Sequence[int]) -> str:
    if not served:
        return (
            "none for any head size with these types: run the model in bfloat16, or with the pool in the model's type"
        )
    return f"head sizes with these types are {', '.join(map(str, served))}"


def _name(dtype: torch.dtype) -> str:
    return TYPE_NAMES.get(dtype, str(dtype))
