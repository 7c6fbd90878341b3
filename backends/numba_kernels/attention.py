"""Attention over blocks, and the writing of new keys and values. Knows addresses and strides; what they mean is decided by the plan.

One item: a *tile* (some queries of one sequence and a range of its keys) for one kv head, so that the group of query heads which share
the head reads its keys and values once. Keys are taken 64 at a time, at multiples of 64 from the start of the sequence:

    pack    16-key transposes put the head dimension into words x keys; values are paired (bfloat16) or copied (float32)
    scores  rows of (query, head) x 64 keys by `multiply_tile`
    softmax online, per row: running maximum and sum; weights in the type of the pool
    sum     rows x head size, again by `multiply_tile`, kept in float32

Products of bfloat16 are exact in float32; weights are rounded to bfloat16 before they meet the values, their sum is not. Invariant: a
row's result depends on its own sequence alone: blocks of 64 keys have fixed places, and masked keys add an exact zero.

A quantised pool's rows are first widened into a buffer, without their scales: those of the keys multiply the scores, those of the values
the weights.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.parts import (
    MAX_QUERIES,
    NO_SCORE,
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
from backends.numba_kernels.quantised import FP8, INT8, PLAIN, is_quantised, scale_vector, widen_row
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    MAX_ROWS,
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
    weigh_row,
    write_float,
    write_int64,
)

KEYS = 64  # keys of one pass
LOG2_E = np.float32(1 / math.log(2))  # maxima are natural logarithms


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
    length = D * size  # bytes of a key or value in the pool
    widened = 0  # bytes of the buffers that only a quantised pool needs
    if is_quantised(kind):
        length = D
        widened = KEYS * (2 * D * size + 8 + 8)
    area = np.empty(
        64
        + max_rows * (D * size + KEYS * (4 + size) + 2 * D * 4 + 16 + 64)
        + 2 * KEYS * D * 4
        + 2 * KEYS * 8
        + widened,
        np.uint8,
    )
    queries = (area.ctypes.data + 63) // 64 * 64  # [rows, D]
    keys = queries + max_rows * D * size  # [words, KEYS] 32-bit words
    values = keys + KEYS * D * 4  # [KEYS or KEYS / 2, D] 32-bit words
    scores = values + KEYS * D * 4  # [rows, KEYS] float32
    sums = scores + max_rows * KEYS * 4  # [rows, D] float32, of the part under way
    folded_sums = sums + max_rows * D * 4  # the same of the parts before it
    weights = folded_sums + max_rows * D * 4  # [rows, KEYS]
    states = weights + max_rows * KEYS * size  # [rows, 2] float32: maximum, sum
    folded_states = states + max_rows * 8
    sources = folded_states + max_rows * 8  # [KEYS] int64 addresses of keys
    sources_ahead = sources + KEYS * 8  # the same of the next pass
    key_scales = sources_ahead + KEYS * 8  # [KEYS] float32
    value_scales = key_scales + KEYS * 4
    scale_sources = value_scales + KEYS * 4  # [KEYS] int64 addresses of the keys' scales
    wide_keys = scale_sources + KEYS * 8  # [KEYS, D]
    wide_values = wide_keys + KEYS * D * size

    while True:
        item = take_next(arguments)
        if item >= num_items:
            break
        head = item % Hkv
        head_cache = cache + head * head_stride
        tile = read_int64(header + TILES) + item // Hkv * (TILE_FIELDS * 8)
        query = read_int64(header + QUERIES) + read_int64(tile + TILE_QUERY) * (QUERY_FIELDS * 8)
        count, part = read_int64(tile + TILE_COUNT), read_int64(tile + TILE_PART)
        table = read_int64(header + TABLES) + read_int64(tile + TILE_TABLE)
        rows = count * G
        for r in range(rows):
            row = read_int64(query + r // G * (QUERY_FIELDS * 8) + QUERY_ROW)
            copy_bytes(queries + r * D * size, q + row * q_row + (head * G + r % G) * q_head, D * size)
        _clear(sums, states, rows, D)
        lowest, highest = key_range(tile, query, window)
        is_folded = False
        for start in range(lowest // KEYS * KEYS, highest, KEYS):
            if start % PART_KEYS == 0 and start > lowest:
                if is_folded:
                    for r in range(rows):
                        fold(
                            folded_sums + r * D * 4, folded_states + r * 8, sums + r * D * 4, states + r * 8, D, LOG2_E
                        )
                else:
                    sums, folded_sums, states, folded_states = folded_sums, sums, folded_states, states
                    is_folded = True
                _clear(sums, states, rows, D)
            vectors = (min(KEYS, highest - start) + 15) // 16
            _locate(sources, vectors * 16, start, lowest, highest, table, B, head_cache, block_stride, slot_stride)
            ahead = min(KEYS, highest - start - KEYS)
            if ahead > 0:
                _locate(
                    sources_ahead, ahead, start + KEYS, lowest, highest, table, B, head_cache, block_stride, slot_stride
                )
                for t in range(ahead):
                    prefetch(read_int64(sources_ahead + t * 8), length)
            value_rows = value_offset
            if is_quantised(kind):
                _locate(
                    scale_sources, vectors * 16, start, lowest, highest, table, B,
                    scales + head * scale_head_stride, scale_block_stride, 4,
                )  # fmt: skip
                for t in range(vectors * 16):
                    scale_at, source = read_int64(scale_sources + t * 8), read_int64(sources + t * 8)
                    write_float(key_scales + t * 4, read_float(scale_at))
                    write_float(value_scales + t * 4, read_float(scale_at + scale_value_offset))
                    widen_row(tag, kind, source, wide_keys + t * D * size, D)
                    widen_row(tag, kind, source + value_offset, wide_values + t * D * size, D)
                    write_int64(sources + t * 8, wide_keys + t * D * size)
                value_rows = wide_values - wide_keys
            for group in range(vectors):
                for word in range(0, words, 16):
                    transpose_words(
                        sources + group * 128,
                        word * 4,
                        min(16, words - word),
                        keys + word * (KEYS * 4) + group * 64,
                        KEYS * 4,
                    )
            _multiply(tag, rows, queries, D * size, keys, KEYS * 4, scores, KEYS * 4, vectors, words, False)
            for r in range(rows):
                at = read_int64(query + r // G * (QUERY_FIELDS * 8) + QUERY_POSITION)
                first = lowest
                if window:
                    first = max(first, at - window + 1)
                first = min(max(first - start, 0), KEYS)
                last = min(max(min(at + 1, highest) - start, 0), KEYS)
                if is_quantised(kind):
                    scale_vector(kind, scores + r * KEYS * 4, key_scales, vectors)
                shrink = weigh_row(
                    tag,
                    kind,
                    scores + r * KEYS * 4,
                    weights + r * KEYS * size,
                    vectors,
                    first,
                    last,
                    scale,
                    cap,
                    states + r * 8,
                    value_scales,
                )
                if shrink != np.float32(1):
                    scale_row(sums + r * D * 4, D, shrink)
            for t in range(ahead):
                prefetch(read_int64(sources_ahead + t * 8) + value_offset, length)
            if size == 2:
                for t in range(0, vectors * 16, 2):
                    first_value = read_int64(sources + t * 8) + value_rows
                    pair_rows(first_value, read_int64(sources + t * 8 + 8) + value_rows, values + t // 2 * D * 4, D)
            else:
                for t in range(vectors * 16):
                    copy_bytes(values + t * D * 4, read_int64(sources + t * 8) + value_rows, D * 4)
            _multiply(
                tag, rows, weights, KEYS * size, values, D * 4, sums, D * 4, D // 16, vectors * 16 * size // 4, True
            )
        for r in range(rows):
            if is_folded:
                fold(folded_sums + r * D * 4, folded_states + r * 8, sums + r * D * 4, states + r * 8, D, LOG2_E)
            found, state = (folded_sums, folded_states) if is_folded else (sums, states)
            own = query + r // G * (QUERY_FIELDS * 8)
            deliver(
                tag, header, own, head * G + r % G, part, G * Hkv, D, found + r * D * 4, state + r * 8,
                out, out_row, out_head, lse, lse_row, LOG2_E,
            )  # fmt: skip
        if part:
            for i in range(count):
                own = query + i * (QUERY_FIELDS * 8)
                merge_if_last(tag, header, own, head, Hkv, G, D, out, out_row, out_head, lse, lse_row, LOG2_E)
    keep(area)


@njit(nogil=True, error_model="numpy")
def _clear(sums: int, states: int, rows: int, D: int) -> None:
    """Begin a part."""
    for r in range(rows):
        write_float(states + r * 8, np.float32(NO_SCORE))
        write_float(states + r * 8 + 4, np.float32(0))
    for d in range(0, rows * D * 4, 8):
        write_int64(sums + d, 0)


@njit(nogil=True, error_model="numpy")
def _locate(
    sources: int,
    count: int,
    start: int,
    lowest: int,
    highest: int,
    table: int,
    B: int,
    cache: int,
    block_stride: int,
    slot_stride: int,
) -> None:
    """Write the addresses of keys start … start + count - 1 to `sources`; in place of a key outside lowest … highest - 1 stands a neighbour
    inside: unwritten slots may hold anything, and zero times NaN is NaN.

    The blocks are walked, because a 64-bit division for each key costs as much as the key's products.
    """
    key = max(start, lowest)
    index, slot = key // B, key % B
    address = cache + np.int64(read_int32(table + index * 4)) * block_stride + slot * slot_stride
    for t in range(count):
        if t > 0 and lowest < start + t < highest:
            slot += 1
            address += slot_stride
            if slot == B:
                index, slot = index + 1, 0
                address = cache + np.int64(read_int32(table + index * 4)) * block_stride
        write_int64(sources + t * 8, address)


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
