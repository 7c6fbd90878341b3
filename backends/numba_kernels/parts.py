"""Where a step's facts lie, and how partial results of a row become its result. Knows nothing of keys, values or scores.

The plan of a step is one *header* of int64 at a fixed address, which is all that kernels get of the step: a recorded sequence of launches
serves the next step once that step's header has been copied over this one's.

    header   ──▶ slots [T] int64          where each token's key and value go
             ──▶ tables [S, blocks] int32
             ──▶ tiles [n, 6]             one item of work each: first query, queries, first key, last key + 1, table, part
             ──▶ queries [m, 4]           row of q, position, place of its first part, number of parts
             ──▶ part sums [places, H, D] float32, part states [places, H, 2] float32, parts done [rows, Hkv]

Keys are cut at fixed multiples of PART_KEYS. Each part of a row is computed by itself, and parts are *folded* in order, always

    (…((part 0 + part 1) + part 2) + …)

whether one tile walks them all, or each has a tile of its own and whoever finishes last folds them. So the cutting into tiles never
changes a bit. A tile of several parts must begin with part 0, because only then is what it folded a beginning of the whole.

Invariant: `parts done` is all zero between launches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from backends.numba_kernels.atomics import add, store
from backends.numba_kernels.vectors import (
    I64,
    LANES,
    VF,
    Builder,
    Value,
    cgutils,
    copy_bytes,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    intrinsic,
    read_float,
    read_int64,
    write_float,
    write_row,
)

PART_KEYS = 256
HEADER_FIELDS = 10
# Byte offsets of the header's fields.
SLOTS, TABLES, TILES, NUM_TILES, QUERIES, PART_SUMS, PART_STATES, PARTS_DONE, NUM_TOKENS, MAX_QUERIES = range(
    0, 8 * HEADER_FIELDS, 8
)
TILE_FIELDS = 6
# Byte offsets of a tile's fields. TILE_PART: 0, the tile sees all keys of its queries; else one more than the number of the part it writes.
TILE_QUERY, TILE_COUNT, TILE_FIRST_KEY, TILE_LAST_KEY, TILE_TABLE, TILE_PART = range(0, 8 * TILE_FIELDS, 8)
QUERY_FIELDS = 4
QUERY_ROW, QUERY_POSITION, QUERY_PLACE, QUERY_PARTS = range(0, 8 * QUERY_FIELDS, 8)

NO_SCORE = -1e30  # the maximum of a row that has seen no key


@intrinsic
def _fold_row(typing_context: Any, row: Any, other: Any, count: Any, factor: Any, other_factor: Any) -> Any:
    """row = row * factor + other * other_factor for `count` float32, a multiple of 16."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        row, other, count, factor, other_factor = arguments
        wide, other_wide = emit_splat(b, factor, VF), emit_splat(b, other_factor, VF)
        with cgutils.for_range_slice(b, I64(0), count, I64(LANES), intp=I64) as (i, _):
            at = b.shl(i, I64(2))
            kept = b.fmul(emit_load(b, b.add(row, at), VF), wide)
            emit_store(b, emit_fma(b, emit_load(b, b.add(other, at), VF), other_wide, kept), b.add(row, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.float32), generate


@njit(nogil=True, error_model="numpy")
def fold(sums: int, state: int, other_sums: int, other_state: int, D: int, unit: Any) -> None:
    """Add the next part of a row to what the earlier ones gave. A part without keys changes nothing, nor is it changed.

    `state` is (maximum, sum of weights); `unit` turns a difference of maxima into one of natural logarithms.
    """
    maximum, other_maximum = read_float(state), read_float(other_state)
    highest = max(maximum, other_maximum)
    factor = np.float32(math.exp((maximum - highest) * unit))
    other_factor = np.float32(math.exp((other_maximum - highest) * unit))
    _fold_row(sums, other_sums, D, factor, other_factor)
    total = read_float(state + 4) * factor
    write_float(state, highest)
    write_float(state + 4, np.float32(total + read_float(other_state + 4) * other_factor))


@njit(nogil=True, error_model="numpy")
def finish(tag: Any, sums: int, state: int, target: int, D: int, unit: Any) -> Any:
    """Divide by the sum of the weights and write; returns the natural log-sum-exp. Zeros and -inf where no key was seen."""
    total = read_float(state + 4)
    if total == np.float32(0):
        write_row(tag, sums, target, D, np.float32(0), 0)
        return np.float32(-np.inf)
    write_row(tag, sums, target, D, np.float32(1) / total, 0)
    return np.float32(read_float(state) * unit + np.float32(math.log(total)))


@njit(nogil=True, error_model="numpy")
def key_range(tile: int, query: int, window: int) -> Any:
    """Return the first key that any query of the tile sees, and one more than the last; the first is not below 0."""
    lowest, highest = read_int64(query + QUERY_POSITION), np.int64(-1)
    for i in range(read_int64(tile + TILE_COUNT)):
        position = read_int64(query + i * (QUERY_FIELDS * 8) + QUERY_POSITION)
        lowest, highest = min(lowest, position), max(highest, position)
    first = max(read_int64(tile + TILE_FIRST_KEY), 0)
    if window:
        first = max(first, lowest - window + 1)
    return first, min(read_int64(tile + TILE_LAST_KEY), highest + 1)


@njit(nogil=True, error_model="numpy")
def deliver(
    tag: Any,
    header: int,
    query: int,
    q_head: int,
    part: int,
    H: int,
    D: int,
    sums: int,
    state: int,
    out: int,
    out_row: int,
    out_head: int,
    lse: int,
    lse_row: int,
    unit: Any,
) -> None:
    """Write what a tile found for one head of a query: the result itself, or a part of it."""
    if part:
        place = (read_int64(query + QUERY_PLACE) + part - 1) * H + q_head
        copy_bytes(read_int64(header + PART_SUMS) + place * D * 4, sums, D * 4)
        copy_bytes(read_int64(header + PART_STATES) + place * 8, state, 8)
        return
    row = read_int64(query + QUERY_ROW)
    log_sum = finish(tag, sums, state, out + row * out_row + q_head * out_head, D, unit)
    if lse:
        write_float(lse + row * lse_row + q_head * 4, log_sum)


@njit(nogil=True, error_model="numpy")
def merge_if_last(
    tag: Any,
    header: int,
    query: int,
    head: int,
    Hkv: int,
    G: int,
    D: int,
    out: int,
    out_row: int,
    out_head: int,
    lse: int,
    lse_row: int,
    unit: Any,
) -> None:
    """Count a finished part of kv head `head` of a query; after the last one fold them all, in place, and write the result.

    The count is atomic and orders memory, so whoever sees the last number sees what the others have written.
    """
    row, parts = read_int64(query + QUERY_ROW), read_int64(query + QUERY_PARTS)
    done = read_int64(header + PARTS_DONE) + (row * Hkv + head) * 8
    if add(done, 1) + 1 < parts:
        return
    store(done, 0)
    place = read_int64(query + QUERY_PLACE)
    part_sums, part_states = read_int64(header + PART_SUMS), read_int64(header + PART_STATES)
    H = G * Hkv
    for q_head in range(head * G, head * G + G):
        sums, state = part_sums + (place * H + q_head) * D * 4, part_states + (place * H + q_head) * 8
        for part in range(1, parts):
            fold(sums, state, sums + part * H * D * 4, state + part * H * 8, D, unit)
        log_sum = finish(tag, sums, state, out + row * out_row + q_head * out_head, D, unit)
        if lse:
            write_float(lse + row * lse_row + q_head * 4, log_sum)
