"""The formats of integer weights as kernels read them. `backends.quantised_weights` is what they stand for.

A *strip* is 16 outputs with all their groups, one behind the other, read in address order; for matrix tiles two strips lie together, 32 k of
each in turn. In a group a 32-bit word holds, for
one output, 4 neighbouring codes (a byte each) or 4 + 4 codes (a byte's low half: k + 0 … 3, its high half: 16 further on, as in GGUF):

    q4_0   4 rows of 16 words, then 16 d                     288 bytes    k: 32
    q4_1   4 rows of 16 words, 16 d, 16 m                    320
    q8_0   8 rows of 16 words, 16 d                          544
    int8   16 rows of 16 words (and a float32 d once, behind the last group)   1024    k: 64

A `kind` argument of a compiled function selects the format at compile time, by the types in KINDS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from backends.numba_kernels.vectors import I64, LANES, Builder, Value, intrinsic

UNIT = 32  # k
SIDE_BYTES = 8  # of a group of a row of x


@dataclass(frozen=True, slots=True)
class Kind:
    """What sets a format apart. `offset` is subtracted from every code; `tag` stands for the format in Numba's types."""

    group: int  # codes of an output in a group
    bits: int
    has_scales: bool  # d in every group, not once
    has_minima: bool
    offset: int
    tag: Any

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's codes in a strip."""
        return self.group * self.bits // 8 * LANES

    @property
    def group_bytes(self) -> int:
        """Bytes of a group in a strip."""
        return self.code_bytes + 2 * LANES * (self.has_scales + self.has_minima)

    @property
    def unit_bytes(self) -> int:
        """Bytes of 32 k of a strip: a group, or a part of one that has no scales of its own."""
        return self.group_bytes * UNIT // self.group

    @property
    def unit_code_bytes(self) -> int:
        """Bytes of the codes of 32 k of a strip."""
        return self.code_bytes * UNIT // self.group

    @property
    def tail_bytes(self) -> int:
        """Bytes behind the last group of a strip."""
        return 0 if self.has_scales else 4 * LANES


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "q4_0": Kind(32, 4, True, False, 8, np.int16(0)),
        "q4_1": Kind(32, 4, True, True, 0, np.uint16(0)),
        "q8_0": Kind(32, 8, True, False, 0, np.uint8(0)),
        "int8": Kind(64, 8, False, False, 0, np.int8(0)),
    }
)


def kind_of(tag: Any) -> Kind:
    return next(kind for kind in KINDS.values() if str(tag) == kind.tag.dtype.name)


def _fact(read: Callable[[Kind], int]) -> Any:
    """Make an intrinsic that returns a number of a kind, as a constant."""

    @intrinsic
    def fact(typing_context: Any, kind: Any) -> Any:
        number = read(kind_of(kind))

        def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
            return ir.Constant(I64, int(number))

        return types.int64(kind), generate

    return fact


group_bytes = _fact(lambda kind: kind.group_bytes)
group_size = _fact(lambda kind: kind.group)
unit_bytes = _fact(lambda kind: kind.unit_bytes)
tail_bytes = _fact(lambda kind: kind.tail_bytes)
