"""Turn the blocks of GGUF tensor types into numbers. Knows block layouts, not names or models.

The types of the built-in model (Q4_1, Q8_0) have a torch form that takes a quarter of the time of the library's numpy code and rounds
straight into the target's dtype; the library serves every other type. Invariant: both give the same float32 values, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
# 32 768 elements: temporaries stay in the cache, and torch does not hand so small an operation to its thread pool, whose threads wait for
# each other at every operation (ten times slower when another process holds a core).
BLOCKS_AT_ONCE = 1 << 10


def dequantise(data: NDArray[np.uint8], kind: GGMLQuantizationType, out: Tensor) -> None:
    """Fill contiguous `out` from a tensor's bytes [any], rounding once to its dtype; raises NotImplementedError for an unknown type."""
    if kind in PLAIN_TYPES:
        out.copy_(torch.from_numpy(data).view(PLAIN_TYPES[kind]).view(out.shape))
    elif kind == GGMLQuantizationType.Q4_1:
        _by_blocks(torch.from_numpy(data).view(-1, 20), out.view(-1, 32), _q4_1)
    elif kind == GGMLQuantizationType.Q8_0:
        _by_blocks(torch.from_numpy(data).view(-1, 34), out.view(-1, 32), _q8_0)
    else:
        out.copy_(torch.from_numpy(dequantize(data.reshape(out.shape[0], -1), kind)).view(out.shape))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """blocks [n, 20]: scale and minimum as float16, then 16 bytes whose low halves are elements 0-15 and high halves 16-31."""
    scale_min = blocks[:, :4].contiguous().view(torch.float16).float()
    scale, minimum = scale_min[:, :1], scale_min[:, 1:]
    nibbles = blocks[:, 4:]
    out[:, :16] = torch.addcmul(
        minimum, (nibbles & 15).float(), scale
    )  # the product is exact, so fused or not it rounds once
    out[:, 16:] = torch.addcmul(minimum, (nibbles >> 4).float(), scale)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """blocks [n, 34]: scale as float16, then 32 signed bytes."""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    out.copy_(blocks[:, 2:].view(torch.int8).float().mul_(scale))


def _by_blocks(blocks: Tensor, out: Tensor, convert: Callable[[Tensor, Tensor], None]) -> None:
    """Convert in runs that stay in the cache; on a GPU the packed bytes travel, not the numbers."""
    for first in range(0, blocks.shape[0], BLOCKS_AT_ONCE):
        last = first + BLOCKS_AT_ONCE
        convert(blocks[first:last].to(out.device), out[first:last])
