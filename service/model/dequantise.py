"""Turn the blocks of GGUF tensor types into numbers. Knows block layouts, not names or models.

The common types have a torch form here that takes a quarter of the time of the gguf library's numpy code and rounds straight into the
target's dtype; the library serves every other type. For those that can be held as integers the CPU has compiled kernels, too. Invariant: all
give the same float32 values, bit for bit (in each formula all products but the last are exact, so it rounds once, fused or not).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from backends.quantised_weights import Format, decode_q4_0, decode_q4_1, decode_q8_0, halves

PLAIN_TYPES: Mapping[GGMLQuantizationType, torch.dtype] = MappingProxyType(
    {
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
        GGMLQuantizationType.BF16: torch.bfloat16,
        GGMLQuantizationType.F64: torch.float64,
    }
)
BLOCK_FORMATS: Mapping[GGMLQuantizationType, Format] = MappingProxyType(
    {
        GGMLQuantizationType.Q4_0: "q4_0",
        GGMLQuantizationType.Q4_1: "q4_1",
        GGMLQuantizationType.Q8_0: "q8_0",
    }
)
# Elements of an operation: so many that temporaries stay in the cache, and that torch does not hand it to its thread pool, whose threads wait
# for each other at every operation (ten times slower when another process holds a core). Fewer operations also wait less for the interpreter.
ELEMENTS_AT_ONCE = 1 << 15
BY_HALVES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)  # no operation takes more than half of a block


def dequantise(data: NDArray[np.uint8], kind: GGMLQuantizationType, out: Tensor) -> None:
    """Fill contiguous `out` from a tensor's bytes [any], rounding once to its dtype; raises NotImplementedError for an unknown type."""
    if kind in PLAIN_TYPES:
        out.copy_(torch.from_numpy(data).view(PLAIN_TYPES[kind]).view(out.shape))
    elif kind in BLOCK_FORMATS and out.device.type == "cpu" and _by_kernel(data, BLOCK_FORMATS[kind], out):
        return
    elif kind in DECODERS:
        _by_blocks(data, kind, out)
    else:
        out.copy_(torch.from_numpy(dequantize(data.reshape(out.shape[0], -1), kind)).view(out.shape))


def _by_kernel(data: NDArray[np.uint8], form: Format, out: Tensor) -> bool:
    """Decode with a compiled kernel if there is one here for `out`; says whether there was."""
    try:
        from backends.numba_blocks import decode_blocks
    except ImportError:  # a machine without Numba
        return False
    return decode_blocks(torch.from_numpy(data), form, out)


def _by_blocks(data: NDArray[np.uint8], kind: GGMLQuantizationType, out: Tensor) -> None:
    """Decode in runs that stay in the cache; on a GPU the packed bytes travel, not the numbers."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks, rows = torch.from_numpy(data).view(-1, block_bytes), out.view(-1, block_size)
    step = ELEMENTS_AT_ONCE // block_size * (2 if kind in BY_HALVES else 1)
    for first in range(0, blocks.shape[0], step):
        DECODERS[kind](blocks[first : first + step].to(out.device), rows[first : first + step])


# Each decoder takes blocks [n, bytes] and fills out [n, elements of a block].


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, 4 bytes with the fifth bit of each of 32 elements, then halves of bytes as in Q4_0, offset by 16."""
    scale, nibbles = halves(blocks, 0, 1), blocks[:, 6:]
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = ((blocks[:, 2:6, None] >> bits) & 1).view(-1, 32) << 4  # bit b of byte B belongs to element 8 B + b
    out[:, :16] = ((nibbles & 15) | fifth[:, :16]).float().sub_(16).mul_(scale)
    out[:, 16:] = ((nibbles >> 4) | fifth[:, 16:]).float().sub_(16).mul_(scale)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """Eight groups of 32 under 6-bit scales and minima; 32 bytes hold one group in their low halves and the next in their high ones."""
    scale, minimum = _group_scales(blocks)
    nibbles = blocks[:, 16:].view(-1, 4, 32)
    groups = out.view(-1, 4, 2, 32)
    groups[:, :, 0] = torch.addcmul(minimum[:, :, 0], (nibbles & 15).float(), scale[:, :, 0])
    groups[:, :, 1] = torch.addcmul(minimum[:, :, 1], (nibbles >> 4).float(), scale[:, :, 1])


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with 32 more bytes: bit g of byte i is the fifth bit of element i of group g."""
    scale, minimum = _group_scales(blocks)
    nibbles = blocks[:, 48:].view(-1, 4, 32)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(4, 2, 1)
    fifth = ((blocks[:, None, None, 16:48] >> bits) & 1) << 4  # [n, 4, 2, 32]
    groups = out.view(-1, 4, 2, 32)
    groups[:, :, 0] = torch.addcmul(minimum[:, :, 0], ((nibbles & 15) | fifth[:, :, 0]).float(), scale[:, :, 0])
    groups[:, :, 1] = torch.addcmul(minimum[:, :, 1], ((nibbles >> 4) | fifth[:, :, 1]).float(), scale[:, :, 1])


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """Sixteen groups of 16 under signed 8-bit scales. In each half of the block 64 bytes hold the low four bits of 128 elements and 32
    bytes their high two: element 32 j + i has bits 2 j of byte i, and its low bits in half j // 2 of byte 32 (j % 2) + i.
    """
    low = blocks[:, :128].view(-1, 2, 2, 32)  # [n, half, j % 2, i]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = ((blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3) << 4  # [n, half, j, i]
    scale = blocks[:, 192:208].view(torch.int8).float() * halves(blocks, 208, 1)  # [n, 16]
    numbers = (torch.cat([low & 15, low >> 4], dim=2) | high).float().sub_(32)  # [n, half, j, i]
    out.view(-1, 16, 16).copy_(numbers.view(-1, 16, 16).mul_(scale[:, :, None]))


def _group_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the negated minima of a K block's eight groups, [n, 4, 2, 1] each.

    Twelve bytes hold sixteen 6-bit numbers: the first four groups' in the low six bits of bytes 0-3 (scales) and 4-7 (minima), the
    others' with four bits in bytes 8-11 and the top two in what those bytes leave free.
    """
    first, second, third = blocks[:, 4:16].split_with_sizes([4, 4, 4], 1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1).float()
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1).float()
    whole = halves(blocks, 0, 2)
    return (scales * whole[:, :1]).view(-1, 4, 2, 1), (minima * -whole[:, 1:]).view(-1, 4, 2, 1)


DECODERS: Mapping[GGMLQuantizationType, Callable[[Tensor, Tensor], None]] = MappingProxyType(
    {
        GGMLQuantizationType.Q4_0: decode_q4_0,
        GGMLQuantizationType.Q4_1: decode_q4_1,
        GGMLQuantizationType.Q5_0: _q5_0,
        GGMLQuantizationType.Q8_0: decode_q8_0,
        GGMLQuantizationType.Q4_K: _q4_k,
        GGMLQuantizationType.Q5_K: _q5_k,
        GGMLQuantizationType.Q6_K: _q6_k,
    }
)
