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
    F32,
    I32,
    I64,
    LANES,
    VF,
    Builder,
    Value,
    cgutils,
    copy_bytes,
    emit_at,
    emit_exp2,
    emit_fma,
    emit_load,
    emit_maximum,
    emit_splat,
    emit_store,
    intrinsic,
    read_float,
    read_int64,
    write_float,
    write_row,
)

PART_KEYS = 256
HEADER_FIELDS = 11
# Byte offsets of the header's fields. IS_TOGETHER: whether a thread takes a tile for all kv heads in turn, which attention on vectors looks at.
SLOTS, TABLES, TILES, NUM_TILES, QUERIES, PART_SUMS, PART_STATES, PARTS_DONE, NUM_TOKENS, MAX_QUERIES, IS_TOGETHER = (
    range(0, 8 * HEADER_FIELDS, 8)
)
TILE_FIELDS = 6
# Byte offsets of a tile's fields. TILE_PART: 0, the tile sees all keys of its queries; else one more than the number of the part it writes.
TILE_QUERY, TILE_COUNT, TILE_FIRST_KEY, TILE_LAST_KEY, TILE_TABLE, TILE_PART = range(0, 8 * TILE_FIELDS, 8)
QUERY_FIELDS = 4
QUERY_ROW, QUERY_POSITION, QUERY_PLACE, QUERY_PARTS = range(0, 8 * QUERY_FIELDS, 8)

LN_2 = math.log(2)
NO_SCORE = -1e30  # the maximum of a row that has seen no key


@intrinsic
def fold(typing_context: Any, sums: Any, state: Any, other_sums: Any, other_state: Any, count: Any) -> Any:
    """Add the next part of a row to what the earlier ones gave. A part without keys changes nothing, nor is it changed.

    `sums`: `count` float32, a multiple of 16. `state`: maximum (base 2) and sum of weights.
    """

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        sums, state, other_sums, other_state, count = arguments
        old, other = (
            [emit_splat(b, emit_load(b, emit_at(b, at, offset), F32), VF) for offset in (0, 4)]
            for at in (state, other_state)
        )
        highest, total, factor, other_factor = emit_fold_states(b, old[0], other[0], old[1], other[1])
        for at, x in ((state, highest), (emit_at(b, state, 4), total)):
            emit_store(b, b.extract_element(x, I32(0)), at)
        emit_fold_row(b, sums, other_sums, count, factor, other_factor)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def emit_fold_states(
    b: Builder, maximum: Value, other_maximum: Value, total: Value, other_total: Value
) -> tuple[Value, Value, Value, Value]:
    """Fold 16 states, and return the factors of the two sums after the new maximum and sum of weights."""
    highest = emit_maximum(b, maximum, other_maximum)
    factor = emit_exp2(b, b.fsub(maximum, highest))
    other_factor = emit_exp2(b, b.fsub(other_maximum, highest))
    return highest, b.fadd(b.fmul(total, factor), b.fmul(other_total, other_factor)), factor, other_factor


def emit_fold_row(b: Builder, row: Value, other: Value, count: Value, factor: Value, other_factor: Value) -> None:
    """row = row * factor + other * other_factor."""
    with cgutils.for_range_slice(b, I64(0), count, I64(LANES), intp=I64) as (i, _):
        at = b.shl(i, I64(2))
        kept = b.fmul(emit_load(b, b.add(row, at), VF), factor)
        emit_store(b, emit_fma(b, emit_load(b, b.add(other, at), VF), other_factor, kept), b.add(row, at))


@njit(nogil=True, error_model="numpy")
def finish(tag: Any, sums: int, state: int, target: int, D: int, log_sum: int) -> None:
    """Divide by the sum of the weights and write, and the natural log-sum-exp at `log_sum` unless that is 0. Zeros and -inf without keys."""
    total = read_float(state + 4)
    if total == np.float32(0):
        write_row(tag, sums, target, D, np.float32(0), 0)
        if log_sum:
            write_float(log_sum, np.float32(-np.inf))
        return
    write_row(tag, sums, target, D, np.float32(1) / total, 0)
    if log_sum:
        write_float(log_sum, np.float32(read_float(state) * LN_2 + math.log(total)))


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
) -> None:
    """Write what a tile found for one head of a query: the result itself, or a part of it."""
    if part:
        place = (read_int64(query + QUERY_PLACE) + part - 1) * H + q_head
        copy_bytes(read_int64(header + PART_SUMS) + place * D * 4, sums, D * 4)
        copy_bytes(read_int64(header + PART_STATES) + place * 8, state, 8)
        return
    row = read_int64(query + QUERY_ROW)
    log_sum = lse + row * lse_row + q_head * 4 if lse else 0
    finish(tag, sums, state, out + row * out_row + q_head * out_head, D, log_sum)


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
            fold(sums, state, sums + part * H * D * 4, state + part * H * 8, D)
        log_sum = lse + row * lse_row + q_head * 4 if lse else 0
        finish(tag, sums, state, out + row * out_row + q_head * out_head, D, log_sum)
