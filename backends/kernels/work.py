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
SPLIT_LIMITS, SPLIT_SIZES = (
    np.array([2048, 32768]),
    np.array([256, 512, 1024]),
)  # keys of a range, and of a split up to that
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
    return SPLIT_SIZES[np.searchsorted(SPLIT_LIMITS, num_keys)]


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
    queries, keys = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    sequence = np.flatnonzero(queries if is_chosen is None else queries * is_chosen)
    queries, keys = queries[sequence], keys[sequence]
    rows = queries * group
    num_tiles = -(-rows // tile_rows)
    past = keys - queries
    row: NDArray[np.int64] | int = 0
    count = rows
    if num_tiles.max(initial=0) > 1:
        owner = np.repeat(np.arange(len(sequence)), num_tiles)
        row = (np.arange(len(owner)) - (np.cumsum(num_tiles) - num_tiles)[owner]) * tile_rows
        count = np.minimum(tile_rows, rows[owner] - row)
        sequence, past, num_tiles = sequence[owner], past[owner], num_tiles[owner]

    # The tile's first query stands at position `past + row // group`, its last at `end - 1`; causality ends the range, the window begins it.
    end = np.maximum(past + (row + count - 1) // group + 1, 0)
    begin: NDArray[np.int64] | int = 0
    length = end
    if window is not None:
        begin = np.maximum(past + row // group - window + 1, 0) // KEY_ALIGNMENT * KEY_ALIGNMENT
        length = end - begin

    size = split_keys(length)
    splits = np.where(num_tiles <= MAX_SPLIT_TILES, np.maximum(-(-length // size), 1), 1)
    tiles = np.zeros((len(sequence), FIELDS), np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3], tiles[:, 4] = sequence, row, count, begin, end
    partial = splits > 1
    if not partial.any():
        return Work(tiles, tiles[:0], 0, tile_rows)
    parts = np.where(partial, splits * count, 0)
    first_part = np.cumsum(parts) - parts

    # A tile is not split, or into ranges of `size` keys: the row of a range is its tile's, moved on by the number of the range.
    tiles[:, 5], tiles[:, 6] = partial, first_part
    items = np.repeat(tiles, splits, axis=0)
    number = np.arange(len(items)) - np.repeat(np.cumsum(splits) - splits, splits)
    reach = np.repeat(np.where(partial, size, length), splits)
    items[:, 3] += number * reach
    np.minimum(items[:, 3] + reach, items[:, 4], out=items[:, 4], casting="unsafe")
    items[:, 6] += number * items[:, 2]

    merges = np.zeros((np.count_nonzero(partial), FIELDS), np.int32)
    merges[:, :3] = tiles[partial, :3]
    merges[:, 3], merges[:, 4], merges[:, 5] = first_part[partial], splits[partial], merges[:, 2]
    return Work(items, merges, int(parts.sum()), tile_rows)
