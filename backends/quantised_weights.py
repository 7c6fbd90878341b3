"""Weights as small integers with scales: their formats, what they stand for, and how a float weight is turned into them.

Formats of a weight [N, K]; codes are integers, d and m float16 unless said otherwise:

    q4_0   blocks of 32 along k   d * (code - 8)    codes 0 … 15       18 bytes a block    GGUF's own layout
    q4_1   blocks of 32           d * code + m      codes 0 … 15       20 bytes
    q8_0   blocks of 32           d * code          codes -128 … 127   34 bytes
    int8   rows                   d * code          codes -127 … 127   K bytes and a float32 d

This is the definition that kernels must match; it knows no files, no kernels and no layers.
Invariant: blocks of a GGUF file are kept byte for byte, so nothing is lost between the file and the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

Format = Literal["q4_0", "q4_1", "q8_0", "int8"]
BLOCK = 32  # elements of a block
BLOCK_BYTES: Mapping[Format, int] = MappingProxyType({"q4_0": 18, "q4_1": 20, "q8_0": 34})
# So many that temporaries stay in the cache and torch does not hand them to its thread pool, as in `service.model.dequantise`.
ELEMENTS_AT_ONCE = 1 << 15
# Factors tried on a block's range when it is quantised to four bits: a smaller range is finer for the many and clips the few.
SHRINKS = (1.0, 0.93, 0.86)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [N, K]. `data`: blocks [N, K / 32, bytes of a block] uint8, or codes [N, K] int8 with `scales` [N] float32."""

    format: Format
    data: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        if self.format == "int8":
            return self.data.shape[0], self.data.shape[1]
        return self.data.shape[0], self.data.shape[1] * BLOCK

    def dequantise(self) -> Tensor:
        """Return what the integers stand for, [N, K] float32."""
        if self.scales is not None:
            return self.data.float().mul_(self.scales.unsqueeze(1))
        out = torch.empty(self.shape)
        blocks, numbers = self.data.view(-1, BLOCK_BYTES[self.format]), out.view(-1, BLOCK)
        step = ELEMENTS_AT_ONCE // BLOCK
        for first in range(0, blocks.shape[0], step):
            DECODERS[self.format](blocks[first : first + step], numbers[first : first + step])
        return out


def stack(parts: list[QuantisedWeight]) -> QuantisedWeight | None:
    """Put weights of one format and K on top of each other; None where their formats differ."""
    first = parts[0]
    if len({part.format for part in parts}) > 1:
        return None
    if len(parts) == 1:
        return first
    scales = [part.scales for part in parts if part.scales is not None]
    return QuantisedWeight(
        first.format, torch.cat([part.data for part in parts]), torch.cat(scales) if scales else None
    )


# --- from blocks to numbers: [n, bytes] uint8 → out [n, 32], any float dtype, rounded once ---


def halves(blocks: Tensor, first: int, count: int) -> Tensor:
    """Return `count` float16 numbers from byte `first` of each block, [n, count] float32."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def decode_q4_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, then 16 bytes whose low halves are elements 0-15 and high halves 16-31, offset by 8."""
    scale, nibbles = halves(blocks, 0, 1), blocks[:, 2:]
    out[:, :16] = ((nibbles & 15).float() - 8).mul_(scale)
    out[:, 16:] = ((nibbles >> 4).float() - 8).mul_(scale)


def decode_q4_1(blocks: Tensor, out: Tensor) -> None:
    """Scale and minimum, then halves of bytes as in Q4_0 without an offset."""
    scale, minimum = halves(blocks, 0, 2).split_with_sizes([1, 1], 1)
    nibbles = blocks[:, 4:]
    out[:, :16] = torch.addcmul(minimum, (nibbles & 15).float(), scale)
    out[:, 16:] = torch.addcmul(minimum, (nibbles >> 4).float(), scale)


def decode_q8_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, then 32 signed bytes."""
    out.copy_(blocks[:, 2:].view(torch.int8).float().mul_(halves(blocks, 0, 1)))


DECODERS = MappingProxyType({"q4_0": decode_q4_0, "q4_1": decode_q4_1, "q8_0": decode_q8_0})


# --- from numbers to integers ---


def quantise(weight: Tensor | QuantisedWeight, to: Format) -> QuantisedWeight:
    """Quantise weight [N, K] of any float dtype, or what other integers stand for, some rows at a time; K is a multiple of 32 except for "int8".

    int8 and q8_0: the largest magnitude of a row (a block) becomes 127, nearest codes. q4_1: of a few ranges around the block's minimum
    and maximum the one whose codes, with d and m fitted to them by least squares, lose least (as llama.cpp's `make_qkx2_quants`).
    Blocks are rounded with d and m as float16 holds them. Raises ValueError for q4_0, whose range q4_1 covers better.
    """
    if to == "q4_0":
        raise ValueError("weights are quantised to q4_1, int8 or q8_0; q4_0 is only read")
    N, K = weight.shape
    rows = max(1, ELEMENTS_AT_ONCE // K)
    if to == "int8":
        codes, scales = torch.empty((N, K), dtype=torch.int8), torch.empty(N)
        for first in range(0, N, rows):
            part = _floats(weight, first, first + rows)
            scale = part.abs().amax(1) / 127
            codes[first : first + rows] = _nearest(part, scale.unsqueeze(1), -127, 127)
            scales[first : first + rows] = scale
        return QuantisedWeight("int8", codes, scales)
    blocks = torch.empty((N, K // BLOCK, BLOCK_BYTES[to]), dtype=torch.uint8)
    encode = _encode_q8_0 if to == "q8_0" else _encode_q4_1
    for first in range(0, N, rows):
        part = _floats(weight, first, first + rows).reshape(-1, BLOCK)
        encode(part, blocks[first : first + rows].view(-1, BLOCK_BYTES[to]))
    return QuantisedWeight(to, blocks)


def _floats(weight: Tensor | QuantisedWeight, first: int, last: int) -> Tensor:
    """Return rows first … last - 1 in float32."""
    if isinstance(weight, Tensor):
        return weight[first:last].float()
    scales = None if weight.scales is None else weight.scales[first:last]
    return QuantisedWeight(weight.format, weight.data[first:last], scales).dequantise()


def _nearest(numbers: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Round numbers / scale to integers; 0 where the scale is."""
    return (numbers / torch.where(scale == 0, 1.0, scale)).round_().clamp_(low, high)


def _store_halves(blocks: Tensor, first: int, numbers: Tensor) -> Tensor:
    """Write numbers [n, 1] as float16 at byte `first`; returns what was stored, in float32."""
    stored = numbers.clamp(-65504, 65504).half()
    blocks[:, first : first + 2] = stored.view(torch.uint8)
    return stored.float()


def _encode_q8_0(numbers: Tensor, blocks: Tensor) -> None:
    scale = _store_halves(blocks, 0, numbers.abs().amax(1, keepdim=True) / 127)
    blocks[:, 2:] = _nearest(numbers, scale, -127, 127).to(torch.int8).view(torch.uint8)


def _encode_q4_1(numbers: Tensor, blocks: Tensor) -> None:
    low, high = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
    middle, spread = (low + high) / 2, high - low
    best_scale, best_minimum = spread / 15, low
    best_loss = torch.full_like(low, torch.inf)
    mean = numbers.mean(1, keepdim=True)
    for shrink in SHRINKS:
        scale, minimum = spread * (shrink / 15), middle - spread * (shrink / 2)
        codes = _nearest(numbers - minimum, scale, 0, 15)
        # The line through (code, number) with the least squares of its errors.
        centred = codes - codes.mean(1, keepdim=True)
        variance = centred.square().sum(1, keepdim=True)
        slope = (centred * numbers).sum(1, keepdim=True) / torch.where(variance == 0, 1.0, variance)
        scale = torch.where(slope > 0, slope, scale)
        minimum = mean - scale * codes.mean(1, keepdim=True)
        loss = (codes * scale + minimum - numbers).square_().sum(1, keepdim=True)
        is_better = loss < best_loss
        best_loss = torch.where(is_better, loss, best_loss)
        best_scale, best_minimum = (
            torch.where(is_better, scale, best_scale),
            torch.where(is_better, minimum, best_minimum),
        )
    scale, minimum = _store_halves(blocks, 0, best_scale), _store_halves(blocks, 2, best_minimum)
    codes = _nearest(numbers - minimum, scale, 0, 15).to(torch.uint8)
    blocks[:, 4:] = codes[:, :16] | (codes[:, 16:] << 4)
