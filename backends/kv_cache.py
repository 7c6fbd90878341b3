"""The paged KV cache: one tensor per pool, one layout for every backend, so that a backend swap moves no data.

Layout "lbkhsd-2": [layer, block, 2 (key, value), kv head, slot, head size]; one head's block is one contiguous run. A quantised pool (int8
or float8_e4m3fn elements) has a float32 scale for every token, head and side beside it, [layer, block, 2, kv head, slot]: a number is its
element times its scale, and a row's largest magnitude is the largest element. Whoever moves a block moves its scales. Invariant: block 0
is the null block, the target of padding; nothing reads it for a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from backends.errors import BlockCopyError

LAYOUT_ID = "lbkhsd-2"

# Element types that carry scales → the largest magnitude of an element.
QUANTISED_LIMITS: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})
SCALE_DTYPE = torch.float32
# Bytes, of a pool in a CPU's memory: a row that is as long as a cache line is then one, not parts of two.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of a pool; `num_heads` is needed by backends to judge query groups.

    `dtype` is the type in which queries, keys and values arrive; the pool's elements have it too, unless `quantised` names another.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    quantised: torch.dtype | None = None  # a key of QUANTISED_LIMITS

    def faults(self) -> list[str]:
        """Return what makes this shape impossible for any backend, by field; an empty list means nothing does."""
        faults = [
            f"{name} is {getattr(self, name)}; at least 1 is needed"
            for name in ("num_layers", "num_heads", "num_kv_heads", "head_size", "block_size")
            if getattr(self, name) < 1
        ]
        if not faults and self.num_heads % self.num_kv_heads:
            faults.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.quantised is not None and self.quantised not in QUANTISED_LIMITS:
            faults.append(f"quantised is {self.quantised}; {', '.join(map(str, QUANTISED_LIMITS))} have a definition")
        return faults

    @property
    def element_dtype(self) -> torch.dtype:
        """The type of the pool's elements."""
        return self.quantised or self.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys, values and their scales."""
        rows = self.num_layers * 2 * self.num_kv_heads * self.block_size
        scale_bytes = SCALE_DTYPE.itemsize if self.quantised is not None else 0
        return rows * (self.head_size * self.element_dtype.itemsize + scale_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, keys, values and their scales."""
        return self.bytes_per_block // self.block_size


class KVCache:
    """The pool's memory: `layer(i)` is the view [num_blocks, 2, Hkv, B, D] that backends and kernels get, `scales(i)` what goes with it."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        """Allocate `num_blocks` blocks (the null block included) of zeros, lazily committed by the system on a CPU."""
        self.spec = spec
        self.num_blocks = num_blocks
        rows = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, spec.block_size)
        self._data = _zeros((*rows, spec.head_size), spec.element_dtype, device)
        self._scales = _zeros(rows, SCALE_DTYPE, device) if spec.quantised is not None else None

    def layer(self, index: int) -> Tensor:
        """Return layer `index` of the pool, [num_blocks, 2, Hkv, B, D]."""
        return self._data[index]

    def scales(self, index: int) -> Tensor | None:
        """Return the scales of layer `index`, [num_blocks, 2, Hkv, B] float32; None unless the pool is quantised."""
        return None if self._scales is None else self._scales[index]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers; sources are read before any destination is written.

        Raises `BlockCopyError` for a block outside the pool or a destination that is named twice; then nothing was copied.
        """
        destinations = {destination for _, destination in copies}
        if len(destinations) != len(copies):
            raise BlockCopyError(f"a destination is named twice in {list(copies)}")
        for pair in copies:
            if not all(0 <= block < self.num_blocks for block in pair):
                raise BlockCopyError(f"copy {pair} names a block outside the pool of {self.num_blocks}")
        if not copies:
            return
        # Bytes, because not every torch operation knows float8.
        for part in (self._data.view(torch.uint8), self._scales):
            if part is None:
                continue
            if part.device.type == "cpu":
                # One block of one layer is one run of memory: plain copies are fastest, and need a buffer only where a source is overwritten.
                sources = {s: part[:, s].clone() if s in destinations else part[:, s] for s, _ in copies}
                for source, destination in copies:
                    part[:, destination].copy_(sources[source])
            else:
                pairs = torch.tensor(list(copies)).pin_memory().to(part.device, non_blocking=True)  # waits for nothing
                part.index_copy_(1, pairs[:, 1], part.index_select(1, pairs[:, 0]))


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows [..., D] as elements of `dtype` and their scales [...] float32: the definition that kernels must match.

    A row of zeros has the scale 0. A row with a number that is not finite gets a scale that is not finite, so that it shows in every result.
    """
    limit = QUANTISED_LIMITS[dtype]
    wide = rows.float()
    scales = wide.abs().amax(-1) / limit
    elements = (wide / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)).clamp(-limit, limit)
    if dtype == torch.int8:
        elements = elements.round().nan_to_num(0.0)  # ties to even
    return elements.to(dtype), scales


def dequantise(elements: Tensor, scales: Tensor) -> Tensor:
    """Return elements [..., D] times scales [...] as float32."""
    return elements.float() * scales.unsqueeze(-1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages, which take no memory before they are written; torch writes zeros itself.
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)
