"""The CUDA kernels as an attention backend, whoever compiles and launches them: CuPy on a GPU, the emulation in tests.

Invariant: everything that a launch needs beside the step's own tensors lies in its plan, and nothing here waits for the device: lengths are
read from the host copies that come with the metadata, and what the plan computes goes over in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata
from backends.kernels import launch
from backends.kernels.dispatch import attention_variant, shared_bytes_limit
from backends.kernels.plans import KernelPlan, LayerKind, cut_step, kernel_dtype, kind_of, workspace_sizes
from backends.kernels.static import DecodeCut, Scratch, StaticDecodes, cut_decodes
from backends.kernels.variants import BLOCK_SIZES, CACHE, SHIPPED, TYPE_NAMES, Variant
from backends.kv_cache import KVCacheSpec
from backends.staging import Staging

ALIGNMENT = 16  # bytes of the kernels' loads


class KernelModule(Protocol):
    """A compiled variant."""

    def run(self, launch: launch.Launch) -> None:
        """Start a launch on the current stream; the caller keeps its tensors alive."""
        ...


class KernelBackend:
    """Plans and launches. `load` compiles a variant for the device or takes it from a cache; it is called once a variant."""

    def __init__(self, load: Callable[[Variant], KernelModule], capability: tuple[int, int]) -> None:
        """Serve devices of compute capability `capability`."""
        self._load = load
        self._capability = capability
        self._modules: dict[Variant, KernelModule] = {}
        self._staging: dict[torch.device, Staging] = {}
        self._scratch = Scratch()

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
        cut = cut_step(self._attention, query_lens, seq_lens, layers)
        device = meta.seq_lens.device
        works = [work for pairs in cut.values() for _, work in pairs]
        arrays = [array for work in works for array in (work.items, work.merges)]
        sent = iter(self._staging_of(device).send(arrays))
        sizes = workspace_sizes([(work.num_parts, kind) for kind, pairs in cut.items() for _, work in pairs])
        spaces = [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]
        passes = {
            kind: tuple(
                (shape, launch.WorkOnDevice(next(sent), next(sent), spaces[0], spaces[1])) for shape, _ in pairs
            )
            for kind, pairs in cut.items()
        }
        return KernelPlan(meta, passes, int(query_lens.sum()))

    def cut_decodes(self, seq_lens: NDArray[np.int64], layers: Sequence[AttentionLayer]) -> DecodeCut | None:
        """Cut one token each of sequences for a plan that stays where it is; see `static`. None if that would be too large."""
        return cut_decodes(self._attention, seq_lens, layers)

    def static_decodes(self, like: DecodeCut, table_width: int, device: torch.device) -> StaticDecodes:
        """Return a plan for steps with the room of `like`, which captured launches can read again and again."""
        return StaticDecodes(len(like.seq_lens), like.room, table_width, device, self._scratch)

    def store_kv(self, k: Tensor, v: Tensor, layer: AttentionLayer, plan: KernelPlan) -> None:
        """Write or quantise k and v into their slots."""
        if not len(plan.meta.slot_mapping):
            return
        wanted = kernel_dtype(layer)
        k, v = (_aligned(rows.to(wanted)) for rows in (k, v))
        self.module(CACHE).run(launch.store_kv(k, v, plan.meta.slot_mapping, layer.cache, layer.scales))

    def run(self, q: Tensor, layer: AttentionLayer, plan: KernelPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend, then merge what was split. Rows of q past the last sequence (padding) become zeros and -inf."""
        wanted = kernel_dtype(layer)
        if q.dtype != wanted or out.dtype != wanted:
            converted = torch.empty(out.shape, dtype=wanted, device=out.device)
            self.run(q.to(wanted), layer, plan, converted, lse)
            out.copy_(converted)
            return
        kind = kind_of(layer)
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

    def _staging_of(self, device: torch.device) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging(device)
        return self._staging[device]

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
