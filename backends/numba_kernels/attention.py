"""Attention over blocks, on vectors. Knows addresses and strides; what they mean is decided by the plan.

One item: a *tile* (some queries of one sequence and a range of its keys) for one kv head, so that the group of query heads which share
the head reads its keys and values once. Keys are taken 64 at a time, at multiples of 64 from the start of the sequence:

    scores  rows of (query, head) x 64 keys
    softmax online, per row: running maximum and sum; weights in the type of the queries
    sum     rows x head size, kept in float32

Up to DIRECT_ROWS rows read keys and values where they lie (`key_vectors`). For more, 16-key transposes put the head dimension into words x
keys, values are paired (bfloat16) or copied (float32), and both products are those of `multiply_tile`.

Products of bfloat16 are exact in float32; weights are rounded to bfloat16 before they meet the values, their sum is not. Invariant: a
row's result depends on its own sequence alone: blocks of 64 keys have fixed places, and masked keys add an exact zero.

A quantised pool's rows are first widened into a buffer, without their scales: those of the keys multiply the scores, those of the values
the weights. What the next pass or the next item reads is asked for meanwhile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.key_vectors import FEW_ROWS, add_few, score_few
from backends.numba_kernels.parts import (
    IS_TOGETHER,
    MAX_QUERIES,
    NUM_TILES,
    PART_KEYS,
    QUERIES,
    QUERY_FIELDS,
    QUERY_POSITION,
    QUERY_ROW,
    TABLES,
    TILE_COUNT,
    TILE_FIELDS,
    TILE_PART,
    TILE_QUERY,
    TILE_TABLE,
    TILES,
    deliver,
    fold,
    key_range,
    merge_if_last,
)
from backends.numba_kernels.quantised import FP8, INT8, PLAIN, is_quantised, widen_row
from backends.numba_kernels.softmax import ROW_KEYS, STATE_BYTES, begin_row, end_row, weigh_row
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    MAX_ROWS,
    RUN_BYTES,
    copy_bytes,
    keep,
    multiply_tile,
    pair_rows,
    prefetch,
    read_float,
    read_int32,
    read_int64,
    scale_row,
    take_next,
    transpose_words,
    write_float,
    write_int64,
    write_run,
)

KEYS = ROW_KEYS  # of one pass
DIRECT_ROWS = 3 * FEW_ROWS
# The *places* of a pass say where its keys lie: KEYS int64 addresses of keys, then of their scales, and room behind either that `write_run` may use.
SCALES_AT = KEYS * 8 + RUN_BYTES
PLACES_BYTES = 2 * SCALES_AT


@njit(nogil=True, error_model="numpy")
def _multiply(
    tag: Any,
    rows: int,
    a: int,
    a_stride: int,
    b: int,
    b_stride: int,
    c: int,
    c_stride: int,
    vectors: int,
    steps: int,
    adds: bool,
) -> None:
    """c [rows, 16 vectors] (+)= a [rows, steps] @ b [steps, 16 vectors]: cut into tiles of nearly equal height."""
    groups = (rows + MAX_ROWS - 1) // MAX_ROWS
    for group in range(groups):
        first = group * rows // groups
        count = (group + 1) * rows // groups - first
        for vector in range(0, vectors, 2):
            multiply_tile(
                tag,
                count,
                min(2, vectors - vector),
                a + first * a_stride,
                a_stride,
                b + vector * 64,
                b_stride,
                c + first * c_stride + vector * 64,
                c_stride,
                steps,
                adds,
                0,
            )


@njit(nogil=True, error_model="numpy")
def _attend(arguments: int, tag: Any, size: int, kind: Any) -> None:
    """Attend over tiles. `tag` and `size` (bytes) are the type of the queries, `kind` that of the pool's elements.

    Arguments: counter, q, its row and head strides, out, its row and head strides, lse, its row stride, cache, block stride, value offset,
    head stride, slot stride, plan header, B, D, G, Hkv, window, scale, cap; scales, block stride, value offset, head stride (all 0 unless
    the pool is quantised).
    """
    q, q_row, q_head = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    out, out_row, out_head = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    lse, lse_row = read_int64(arguments + 56), read_int64(arguments + 64)
    cache, block_stride = read_int64(arguments + 72), read_int64(arguments + 80)
    value_offset, head_stride, slot_stride = (
        read_int64(arguments + 88),
        read_int64(arguments + 96),
        read_int64(arguments + 104),
    )
    header, B, D = read_int64(arguments + 112), read_int64(arguments + 120), read_int64(arguments + 128)
    G, Hkv, window = read_int64(arguments + 136), read_int64(arguments + 144), read_int64(arguments + 152)
    scale, cap = read_float(arguments + 160), read_float(arguments + 168)
    scales, scale_block_stride = read_int64(arguments + 176), read_int64(arguments + 184)
    scale_value_offset, scale_head_stride = read_int64(arguments + 192), read_int64(arguments + 200)
    num_items = read_int64(header + NUM_TILES) * Hkv
    max_rows = read_int64(header + MAX_QUERIES) * G

    words = D * size // 4  # inner steps of a score
    length = D if is_quantised(kind) else D * size  # bytes of a key or value in the pool
    widened = 2 * KEYS * D * size if is_quantised(kind) else 0
    area = np.empty(
        64
        + max_rows * (D * size + KEYS * (4 + size) + 2 * D * 4 + 2 * STATE_BYTES)
        + 2 * KEYS * D * 4
        + 2 * PLACES_BYTES + KEYS * 8 + 2 * KEYS * 4
        + widened,
        np.uint8,
    )  # fmt: skip
    queries = (area.ctypes.data + 63) // 64 * 64  # [rows, D]
    keys = queries + max_rows * D * size  # [words, KEYS] 32-bit words
    values = keys + KEYS * D * 4  # [KEYS or KEYS / 2, D] 32-bit words
    scores = values + KEYS * D * 4  # [rows, KEYS] float32
    sums = scores + max_rows * KEYS * 4  # [rows, D] float32, of the part under way
    folded_sums = sums + max_rows * D * 4  # the same of the parts before it
    weights = folded_sums + max_rows * D * 4  # [rows, KEYS]
    states = weights + max_rows * KEYS * size  # [rows, STATE_BYTES]
    folded_states = states + max_rows * STATE_BYTES
    near = folded_states + max_rows * STATE_BYTES  # where this pass's keys lie, and
    far = near + PLACES_BYTES  # those of the next
    wide_places = far + PLACES_BYTES  # [KEYS] int64 addresses
    scale_rows = wide_places + KEYS * 8  # [2, KEYS] float32
    wide_keys = scale_rows + 2 * KEYS * 4  # [KEYS, D]
    wide_values = wide_keys + widened // 2  # [KEYS, D]
    if is_quantised(kind):
        for t in range(KEYS):
            write_int64(wide_places + t * 8, wide_keys + t * D * size)

    together: Any = Hkv if read_int64(header + IS_TOGETHER) else np.int64(1)
    item, located = take_next(arguments) * together, np.int64(-1)  # the second: whose first pass `far` is of
    while item < num_items:
        later = np.int64(-1)  # the next item, taken during the last pass of this one: its keys are asked for meanwhile
        head = item % Hkv
        tile = read_int64(header + TILES) + item // Hkv * (TILE_FIELDS * 8)
        query = read_int64(header + QUERIES) + read_int64(tile + TILE_QUERY) * (QUERY_FIELDS * 8)
        count, part = read_int64(tile + TILE_COUNT), read_int64(tile + TILE_PART)
        rows = count * G
        g, own = 0, query
        for r in range(rows):
            copy_bytes(
                queries + r * D * size, q + read_int64(own + QUERY_ROW) * q_row + (head * G + g) * q_head, D * size
            )
            g += 1
            if g == G:
                g, own = 0, own + QUERY_FIELDS * 8
        _clear(sums, states, rows, D)
        lowest, highest = key_range(tile, query, window)
        is_folded = False
        for start in range(lowest // KEYS * KEYS, highest, KEYS):
            if start % PART_KEYS == 0 and start > lowest:
                _end_part(sums, states, folded_sums, folded_states, rows, D, is_folded)
                if not is_folded:
                    sums, folded_sums, states, folded_states = folded_sums, sums, folded_states, states
                    is_folded = True
                _clear(sums, states, rows, D)
            if start <= lowest and located != item:
                _locate(
                    kind, far, header, item, Hkv, window, start, B, cache, block_stride, slot_stride, head_stride,
                    scales, scale_block_stride, scale_head_stride,
                )  # fmt: skip
            near, far = far, near
            next_start = start + KEYS
            if next_start >= highest:
                later = _item_after(arguments, item, together)
                located = later
                next_start = -1
            _locate(
                kind, far, header, item if next_start >= 0 else min(later, num_items - 1), Hkv, window, next_start, B,
                cache, block_stride, slot_stride, head_stride, scales, scale_block_stride, scale_head_stride,
            )  # fmt: skip
            vectors = (min(KEYS, highest - start) + 15) // 16
            places, value_rows = near, value_offset
            if is_quantised(kind):
                for t in range(vectors * 16):
                    place, scale_at = read_int64(near + t * 8), read_int64(near + SCALES_AT + t * 8)
                    write_float(scale_rows + t * 4, read_float(scale_at))
                    write_float(scale_rows + (KEYS + t) * 4, read_float(scale_at + scale_value_offset))
                    widen_row(tag, kind, place, wide_keys + t * D * size, D)
                    widen_row(tag, kind, place + value_offset, wide_values + t * D * size, D)
                for t in range(0, KEYS, 16):
                    scale_at = read_int64(far + SCALES_AT + t * 8)
                    prefetch(scale_at, 64)
                    prefetch(scale_at + scale_value_offset, 64)
                places, value_rows = wide_places, wide_values - wide_keys
            if rows <= DIRECT_ROWS:
                for first in range(0, rows, FEW_ROWS):
                    score_few(
                        tag, min(FEW_ROWS, rows - first), queries + first * D * size, D * size, places, vectors, words,
                        scores + first * KEYS * 4, KEYS * 4, far, length if first == 0 else 0,
                    )  # fmt: skip
            else:
                for t in range(KEYS):
                    prefetch(read_int64(far + t * 8), length)
                for group in range(vectors):
                    for word in range(0, words, 16):
                        transpose_words(
                            places + group * 128,
                            word * 4,
                            min(16, words - word),
                            keys + word * (KEYS * 4) + group * 64,
                            KEYS * 4,
                        )
                _multiply(tag, rows, queries, D * size, keys, KEYS * 4, scores, KEYS * 4, vectors, words, False)
            g, own = 0, query
            at = read_int64(query + QUERY_POSITION)
            for r in range(rows):
                first = lowest
                if window:
                    first = max(first, at - window + 1)
                last = min(at + 1, highest) - start
                shrink = weigh_row(
                    tag, kind, scores + r * KEYS * 4, weights + r * KEYS * size, first - start, last, scale, cap,
                    states + r * STATE_BYTES, scale_rows,
                )  # fmt: skip
                if shrink != np.float32(1):
                    scale_row(sums + r * D * 4, D, shrink)
                g += 1
                if g == G:
                    g, own = 0, own + QUERY_FIELDS * 8
                    at = read_int64(own + QUERY_POSITION)
            if rows <= DIRECT_ROWS:
                for first in range(0, rows, FEW_ROWS):
                    add_few(
                        tag, min(FEW_ROWS, rows - first), weights + first * KEYS * size, KEYS * size, places, value_rows,
                        vectors * 16, D // 16, sums + first * D * 4, D * 4, far, value_offset, length if first == 0 else 0,
                    )  # fmt: skip
                continue
            for t in range(KEYS):
                prefetch(read_int64(far + t * 8) + value_offset, length)
            if size == 2:
                for t in range(0, vectors * 16, 2):
                    first_value = read_int64(places + t * 8) + value_rows
                    pair_rows(first_value, read_int64(places + t * 8 + 8) + value_rows, values + t // 2 * D * 4, D)
            else:
                for t in range(vectors * 16):
                    copy_bytes(values + t * D * 4, read_int64(places + t * 8) + value_rows, D * 4)
            _multiply(
                tag, rows, weights, KEYS * size, values, D * 4, sums, D * 4, D // 16, vectors * 16 * size // 4, True
            )
        _end_part(sums, states, folded_sums, folded_states, rows, D, is_folded)
        found, state = (folded_sums, folded_states) if is_folded else (sums, states)
        g, own = 0, query
        for r in range(rows):
            deliver(
                tag, header, own, head * G + g, part, G * Hkv, D, found + r * D * 4, state + r * STATE_BYTES,
                out, out_row, out_head, lse, lse_row,
            )  # fmt: skip
            g += 1
            if g == G:
                g, own = 0, own + QUERY_FIELDS * 8
        if part:
            for i in range(count):
                own = query + i * (QUERY_FIELDS * 8)
                merge_if_last(tag, header, own, head, Hkv, G, D, out, out_row, out_head, lse, lse_row)
        item = later if later >= 0 else _item_after(arguments, item, together)
    keep(area)


@njit(nogil=True, error_model="numpy")
def _item_after(arguments: int, item: int, together: int) -> Any:
    """Return the next of the `together` items that were taken at once, or the first of as many more."""
    if (item + 1) % together:
        return item + 1
    return take_next(arguments) * together


@njit(nogil=True, error_model="numpy")
def _clear(sums: int, states: int, rows: int, D: int) -> None:
    """Begin a part."""
    for r in range(rows):
        begin_row(states + r * STATE_BYTES)
    for d in range(0, rows * D * 4, 8):
        write_int64(sums + d, 0)


@njit(nogil=True, error_model="numpy")
def _end_part(sums: int, states: int, folded_sums: int, folded_states: int, rows: int, D: int, is_folded: bool) -> None:
    """Complete the states of a part, and fold it into those before it if there are any."""
    for r in range(rows):
        state = states + r * STATE_BYTES
        end_row(state)
        if is_folded:
            fold(folded_sums + r * D * 4, folded_states + r * STATE_BYTES, sums + r * D * 4, state, D)


@njit(nogil=True, error_model="numpy")
def _locate(
    kind: Any,
    places: int,
    header: int,
    item: int,
    Hkv: int,
    window: int,
    start: int,
    B: int,
    cache: int,
    block_stride: int,
    slot_stride: int,
    head_stride: int,
    scales: int,
    scale_block_stride: int,
    scale_head_stride: int,
) -> None:
    """Write where the keys of an item's pass at `start` lie (of its first pass if that is negative), and their scales.

    In place of a key that no query of the item sees stands a neighbour that one sees: unwritten slots may hold anything, and zero times NaN is NaN. An item
    without keys leaves things as they are.
    """
    tile = read_int64(header + TILES) + item // Hkv * (TILE_FIELDS * 8)
    query = read_int64(header + QUERIES) + read_int64(tile + TILE_QUERY) * (QUERY_FIELDS * 8)
    lowest, highest = key_range(tile, query, window)
    if lowest >= highest:
        return
    if start < 0:
        start = lowest // KEYS * KEYS
    table = read_int64(header + TABLES) + read_int64(tile + TILE_TABLE)
    cache, scales = cache + item % Hkv * head_stride, scales + item % Hkv * scale_head_stride
    key, end = max(start, lowest), min(start + KEYS, highest)
    # Blocks are walked, because a 64-bit division for each key costs as much as the key's products; a block's keys are written at once.
    index, slot = key // B, key % B
    block = np.int64(read_int32(table + index * 4))
    place, scale_at = cache + block * block_stride + slot * slot_stride, scales + block * scale_block_stride + slot * 4
    _write_places(kind, places, place, 0, scale_at, 0, key - start)
    while True:
        count = min(B - slot, end - key)
        _write_places(kind, places + (key - start) * 8, place, slot_stride, scale_at, 4, count)
        key += count
        if key == end:
            break
        index, slot = index + 1, 0
        block = np.int64(read_int32(table + index * 4))
        place, scale_at = cache + block * block_stride, scales + block * scale_block_stride
    last = count - 1
    _write_places(
        kind, places + (end - start) * 8, place + last * slot_stride, 0, scale_at + last * 4, 0, start + KEYS - end
    )


@njit(nogil=True, error_model="numpy")
def _write_places(
    kind: Any, places: int, place: int, stride: int, scale_at: int, scale_stride: int, count: int
) -> None:
    """Write the places of `count` keys, `stride` bytes apart, and of their scales."""
    write_run(places, place, stride, count)
    if is_quantised(kind):
        write_run(places + SCALES_AT, scale_at, scale_stride, count)


@lru_cache(maxsize=6)
def attend_kernel(is_bf16: bool, elements: str = PLAIN) -> Kernel:
    """Compile the attention body for one type of queries and pool, or load it from the cache."""
    key = source_key()

    def attend_bf16(arguments: int) -> None:
        if key:
            _attend(arguments, np.uint16(0), 2, np.uint16(0))

    def attend_f32(arguments: int) -> None:
        if key:
            _attend(arguments, np.float32(0), 4, np.float32(0))

    def attend_bf16_int8(arguments: int) -> None:
        if key:
            _attend(arguments, np.uint16(0), 2, np.int8(0))

    def attend_f32_int8(arguments: int) -> None:
        if key:
            _attend(arguments, np.float32(0), 4, np.int8(0))

    def attend_bf16_fp8(arguments: int) -> None:
        if key:
            _attend(arguments, np.uint16(0), 2, np.uint8(0))

    def attend_f32_fp8(arguments: int) -> None:
        if key:
            _attend(arguments, np.float32(0), 4, np.uint8(0))

    bodies = {
        PLAIN: (attend_f32, attend_bf16),
        INT8: (attend_f32_int8, attend_bf16_int8),
        FP8: (attend_f32_fp8, attend_bf16_fp8),
    }
    return Kernel(bodies[elements][is_bf16], 25)
