"""Decides which matrices of a checkpoint are held as integers, and in which format. The formats are `backends.quantised_weights`.

    none     nothing: matrices are floats
    stored   matrices that a GGUF file holds in Q4_0, Q4_1 or Q8_0 blocks stay those blocks; others are floats
    int8     a scale for each row, quantised here from whatever the file holds
    int4     4-bit blocks of the file stay what they are, other matrices become Q4_1 blocks; for tables (embedding and head), where four
             bits cost most, Q8_0 in place of Q4_1

Invariant: blocks of a file are never quantised a second time to as many or more bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from backends.quantised_weights import BLOCK, Format, QuantisedWeight, quantise, stack

if TYPE_CHECKING:
    from service.model.weights import TensorSource, TensorSpec

Quantisation = Literal["none", "stored", "int8", "int4"]
ROW_MULTIPLE = 64  # of int8's inner dimension: the group in which activations are quantised


def quantised_weight(
    source: TensorSource, specs: Sequence[TensorSpec], quantisation: Quantisation, *, is_table: bool
) -> QuantisedWeight | None:
    """Read matrices of one width stacked along their first dimension; None where they stay floats.

    That is so where `stored` finds no blocks, or several formats in what must become one matrix, and where the width is no multiple of 32
    (64 for int8).
    """
    columns = specs[0].shape[1]
    if columns % (ROW_MULTIPLE if quantisation == "int8" else BLOCK):
        return None
    found = [source.blocks(spec) for spec in specs]
    blocks = [part for part in found if part is not None]
    if quantisation != "int8" and len(blocks) == len(found):
        whole = stack(blocks)
        if whole is not None and (quantisation == "stored" or is_table or whole.format != "q8_0"):
            return whole
    if quantisation == "stored":
        return None
    target: Format = "int8" if quantisation == "int8" else "q8_0" if is_table else "q4_1"
    parts = [_quantise(source, spec, part, target) for spec, part in zip(specs, found, strict=True)]
    return stack(parts)


def _quantise(
    source: TensorSource, spec: TensorSpec, blocks: QuantisedWeight | None, target: Format
) -> QuantisedWeight:
    if blocks is not None:
        return blocks if blocks.format == target else _integers(blocks, target)
    numbers = torch.empty(spec.shape, dtype=source.exact_dtype(spec.name))
    source.read(spec, numbers)
    return _integers(numbers, target)


def _integers(weight: Tensor | QuantisedWeight, target: Format) -> QuantisedWeight:
    """Quantise with a compiled kernel where there is one; it gives the integers of `quantise`."""
    found: QuantisedWeight | None = None
    if target == "int8":
        with suppress(ImportError):  # a machine without Numba
            from backends.numba_blocks import quantise_rows

            found = quantise_rows(weight)
    return quantise(weight, target) if found is None else found
