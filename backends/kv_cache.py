"""The paged KV cache: one tensor per pool, one layout for every backend, so that a backend swap moves no data.

Layout "lbkhsd-1": [layer, block, 2 (key, value), kv head, slot, head size]; one head's block is one contiguous run. Invariant: block 0 is
the null block, the target of padding; nothing reads it for a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.errors import BlockCopyError

LAYOUT_ID = "lbkhsd-1"


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of a pool; `num_heads` is needed by backends to judge query groups."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    def faults(self) -> list[str]:
        """Return what makes this shape impossible for any backend, by field; an empty list means nothing does."""
        faults = [
            f"{name} is {getattr(self, name)}; at least 1 is needed"
            for name in ("num_layers", "num_heads", "num_kv_heads", "head_size", "block_size")
            if getattr(self, name) < 1
        ]
        if not faults and self.num_heads % self.num_kv_heads:
            faults.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        return faults

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_size
        return elements * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, keys and values."""
        return self.bytes_per_block // self.block_size


class KVCache:
    """The pool's memory: `layer(i)` is the view [num_blocks, 2, Hkv, B, D] that backends and kernels get."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        """Allocate `num_blocks` blocks (the null block included) of zeros, lazily committed by the system on a CPU."""
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_size)
        if device.type == "cpu":
            # numpy asks the system for zero pages, which take no memory before they are written; torch writes zeros itself.
            zeros = torch.from_numpy(np.zeros(math.prod(shape) * spec.dtype.itemsize, dtype=np.uint8))
            self._data = zeros.view(spec.dtype).view(shape)
        else:
            self._data = torch.zeros(shape, dtype=spec.dtype, device=device)

    def layer(self, index: int) -> Tensor:
        """Return layer `index` of the pool, [num_blocks, 2, Hkv, B, D]."""
        return self._data[index]

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
        if self._data.device.type == "cpu":
            # One block of one layer is one run of memory: plain copies are fastest, and need a buffer only where a source is overwritten.
            sources = {s: self._data[:, s].clone() if s in destinations else self._data[:, s] for s, _ in copies}
            for source, destination in copies:
                self._data[:, destination].copy_(sources[source])
        elif copies:
            pairs = torch.tensor(list(copies), device=self._data.device)
            self._data.index_copy_(1, pairs[:, 1], self._data.index_select(1, pairs[:, 0]))
