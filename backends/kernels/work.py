"""Divides a step's attention among thread blocks: the items and merges that the kernels read. Host arithmetic in numpy, no tensors.

A sequence's rows are its (query token, head of the group) pairs, row = token * group + head. An item is a tile of rows times a range of keys.
Invariant: every (row, visible key) pair lies in exactly one item, and how a sequence is cut depends on that sequence alone, so that a row's
bits do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIELDS = 8  # int32 each: items and merges are read as two 16-byte loads
KEY_ALIGNMENT = 8  # ranges begin at multiples of the smallest block, so that no 16-byte load of scales straddles blocks
MAX_SPLIT_TILES = 4  # more tiles than that fill the device together with the kv heads


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of layer in one step.

    `items` [n, 8] int32: sequence, first row, rows (0: idle), first key, last key + 1, 1 if partial else 0, first part, 0.
    `merges` [m, 8] int32: sequence, first row, rows (0: idle), first part, number of parts, parts from one split to the next, 0, 0.
    """

    items: NDArray[np.int32]
    merges: NDArray[np.int32]
    num_parts: int  # rows of the workspace for partial results, per kv head
    tile_rows: int


def split_keys(num_keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the size of a split for ranges of that many keys: small enough that one long sequence fills the device,
    large enough that filling the ring once per split costs little of a full one.
    """
    return np.where(num_keys <= 2048, 256, np.where(num_keys <= 32768, 512, 1024)).astype(np.int64)


def divide(
    query_lens: NDArray[np.integer],
    seq_lens: NDArray[np.integer],
    group: int,
    tile_rows: int,
    window: int | None = None,
    is_chosen: NDArray[np.bool_] | None = None,
) -> Work:
    """Cut a step, or its chosen sequences, into items. A sequence with more than `MAX_SPLIT_TILES` tiles is not split along its keys.

    `query_lens`, `seq_lens`, `is_chosen` [S]. A sequence with queries but without keys gets an item with an empty range: it writes zeros and -inf.
    """
    queries = np.asarray(query_lens, np.int64)
    if is_chosen is not None:
        queries = np.where(is_chosen, queries, 0)
    keys = np.asarray(seq_lens, np.int64)
    rows = queries * group
    num_tiles = -(-rows // tile_rows)
    sequence = np.repeat(np.arange(len(queries)), num_tiles)
    first_tile = np.cumsum(num_tiles) - num_tiles
    row = (np.arange(len(sequence)) - first_tile[sequence]) * tile_rows
    count = np.minimum(tile_rows, rows[sequence] - row)

    # The tile's first query stands at position `start`, its last at `end - 1`; causality ends the range and the window begins it.
    past = keys[sequence] - queries[sequence]
    end = np.maximum(past + (row + count - 1) // group + 1, 0)
    begin = np.zeros_like(end)
    if window is not None:
        begin = np.maximum(past + row // group - window + 1, 0) // KEY_ALIGNMENT * KEY_ALIGNMENT
    length = end - begin

    size = split_keys(length)
    splits = np.where(num_tiles[sequence] <= MAX_SPLIT_TILES, np.maximum(-(-length // size), 1), 1)
    partial = splits > 1
    parts = np.where(partial, splits * count, 0)
    first_part = np.cumsum(parts) - parts

    tile = np.repeat(np.arange(len(sequence)), splits)
    split = np.arange(len(tile)) - (np.cumsum(splits) - splits)[tile]
    items = np.zeros((len(tile), FIELDS), np.int32)
    items[:, 0] = sequence[tile]
    items[:, 1] = row[tile]
    items[:, 2] = count[tile]
    items[:, 3] = begin[tile] + split * size[tile]
    items[:, 4] = np.where(split == splits[tile] - 1, end[tile], begin[tile] + (split + 1) * size[tile])
    items[:, 5] = partial[tile]
    items[:, 6] = first_part[tile] + split * count[tile]

    merges = np.zeros((int(partial.sum()), FIELDS), np.int32)
    for column, values in enumerate((sequence, row, count, first_part, splits, count)):
        merges[:, column] = values[partial]
    return Work(items, merges, int(parts.sum()), tile_rows)
