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
from backends.numba_kernels.quantised import is_quantised, quantise_row, scale_vector, widen_row
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    MAX_ROWS,
    copy_bytes,
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
    write_row,
)

KEYS = 64  # keys of one pass
TILE_FIELDS = 7  # int64 fields of a tile, see `_attend`
NO_SCORE = -1e30


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
    head stride, slot stride, tiles, number of tiles, tables, B, D, G, Hkv, window, scale, cap, part sums, part states, most rows of a tile;
    scales, block stride, value offset, head stride (all 0 unless the pool is quantised).
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
    tiles, num_tiles = read_int64(arguments + 112), read_int64(arguments + 120)
    tables, B, D = read_int64(arguments + 128), read_int64(arguments + 136), read_int64(arguments + 144)
    G, Hkv, window = read_int64(arguments + 152), read_int64(arguments + 160), read_int64(arguments + 168)
    scale, cap = read_float(arguments + 176), read_float(arguments + 184)
    part_sums, part_states, max_rows = (
        read_int64(arguments + 192),
        read_int64(arguments + 200),
        read_int64(arguments + 208),
    )
    scales, scale_block_stride = read_int64(arguments + 216), read_int64(arguments + 224)
    scale_value_offset, scale_head_stride = read_int64(arguments + 232), read_int64(arguments + 240)

    words = D * size // 4  # inner steps of a score
    length = D * size  # bytes of a key or value in the pool
    widened = 0  # bytes of the buffers that only a quantised pool needs
    if is_quantised(kind):
        length = D
        widened = KEYS * (2 * D * size + 8 + 8)
    area = np.empty(
        64 + max_rows * (D * size + KEYS * (4 + size) + D * 4 + 8 + 64) + 2 * KEYS * D * 4 + 2 * KEYS * 8 + widened,
        np.uint8,
    )
    queries = (area.ctypes.data + 63) // 64 * 64  # [rows, D]
    keys = queries + max_rows * D * size  # [words, KEYS] 32-bit words
    values = keys + KEYS * D * 4  # [KEYS or KEYS / 2, D] 32-bit words
    scores = values + KEYS * D * 4  # [rows, KEYS] float32
    sums = scores + max_rows * KEYS * 4  # [rows, D] float32
    weights = sums + max_rows * D * 4  # [rows, KEYS]
    states = weights + max_rows * KEYS * size  # [rows, 2] float32: maximum, sum
    sources = states + max_rows * 8  # [KEYS] int64 addresses of keys
    sources_ahead = sources + KEYS * 8  # the same of the next pass
    key_scales = sources_ahead + KEYS * 8  # [KEYS] float32
    value_scales = key_scales + KEYS * 4
    scale_sources = value_scales + KEYS * 4  # [KEYS] int64 addresses of the keys' scales
    wide_keys = scale_sources + KEYS * 8  # [KEYS, D]
    wide_values = wide_keys + KEYS * D * size

    while True:
        item = take_next(arguments)
        if item >= num_tiles * Hkv:
            break
        head = item % Hkv
        head_cache = cache + head * head_stride
        tile = tiles + item // Hkv * (TILE_FIELDS * 8)
        row, count = read_int64(tile), read_int64(tile + 8)  # rows of q
        position = read_int64(tile + 16)  # of the first query
        key_first, key_last = read_int64(tile + 24), read_int64(tile + 32)
        table = tables + read_int64(tile + 40)
        part = read_int64(tile + 48)  # 0: the tile is whole; otherwise one more than its place among the parts
        rows = count * G
        for r in range(rows):
            source = q + (row + r // G) * q_row + (head * G + r % G) * q_head
            copy_bytes(queries + r * D * size, source, D * size)
            write_float(states + r * 8, np.float32(NO_SCORE))
            write_float(states + r * 8 + 4, np.float32(0))
            for d in range(0, D * 4, 8):
                write_int64(sums + r * D * 4 + d, 0)
        lowest = max(key_first, 0)
        if window:
            lowest = max(lowest, position - window + 1)
        highest = min(key_last, position + count)
        for start in range(lowest // KEYS * KEYS, highest, KEYS):
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
                at = position + r // G
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
            q_head_index = head * G + r % G
            if part:
                place = (part - 1 + r // G) * Hkv * G + q_head_index
                copy_bytes(part_sums + place * D * 4, sums + r * D * 4, D * 4)
                copy_bytes(part_states + place * 8, states + r * 8, 8)
            else:
                target = out + (row + r // G) * out_row + q_head_index * out_head
                log_sum = _finish(
                    tag, sums + r * D * 4, target, D, read_float(states + r * 8), read_float(states + r * 8 + 4)
                )
                if lse:
                    write_float(lse + (row + r // G) * lse_row + q_head_index * 4, log_sum)


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


@njit(nogil=True, error_model="numpy")
def _finish(tag: Any, sums: int, target: int, D: int, maximum: Any, total: Any) -> Any:
    """Divide by the sum of the weights and write; returns the natural log-sum-exp. Zeros and -inf where no key was seen."""
    if total == np.float32(0):
        write_row(tag, sums, target, D, np.float32(0), 0)
        return np.float32(-np.inf)
    write_row(tag, sums, target, D, np.float32(1) / total, 0)
    return np.float32(maximum + math.log(total))


@njit(nogil=True, error_model="numpy")
def _merge(arguments: int, tag: Any) -> None:
    """Merge the parts of split tiles, in order. One item: one query head of one row.

    Arguments: counter, out, out row stride, out head stride, lse, lse row stride, merges, number of merges, H, D, part sums, part states.
    A merge is (row of q, first part, number of parts, parts' distance); part i of it is at first + i * distance.
    """
    out, out_row, out_head = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    lse, lse_row = read_int64(arguments + 32), read_int64(arguments + 40)
    merges, num_merges = read_int64(arguments + 48), read_int64(arguments + 56)
    H, D = read_int64(arguments + 64), read_int64(arguments + 72)
    part_sums, part_states = read_int64(arguments + 80), read_int64(arguments + 88)
    total_row = np.empty(D + 16, np.float32)
    while True:
        item = take_next(arguments)
        if item >= num_merges * H:
            break
        head = item % H
        merge = merges + item // H * 32
        row, first = read_int64(merge), read_int64(merge + 8)
        count, distance = read_int64(merge + 16), read_int64(merge + 24)
        maximum = np.float32(NO_SCORE)
        for i in range(count):
            maximum = max(maximum, read_float(part_states + ((first + i * distance) * H + head) * 8))
        total = np.float32(0)
        total_row[:] = np.float32(0)
        for i in range(count):
            place = (first + i * distance) * H + head
            factor = np.float32(math.exp(read_float(part_states + place * 8) - maximum))
            total += factor * read_float(part_states + place * 8 + 4)
            for d in range(D):
                total_row[d] += factor * read_float(part_sums + (place * D + d) * 4)
        log_sum = _finish(tag, total_row.ctypes.data, out + row * out_row + head * out_head, D, maximum, total)
        if lse:
            write_float(lse + row * lse_row + head * 4, log_sum)


@njit(nogil=True, error_model="numpy")
def _store(arguments: int) -> None:
    """Copy keys and values into their slots. One item: 16 tokens.

    Arguments: counter, k, k row stride, k head stride, v, v row stride, v head stride, cache, block stride, value offset, head stride,
    slot stride, slots (int64), T, Hkv, B, bytes of a head's row.
    """
    k, k_row, k_head = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    v, v_row, v_head = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    cache, block_stride = read_int64(arguments + 56), read_int64(arguments + 64)
    value_offset, head_stride, slot_stride = (
        read_int64(arguments + 72),
        read_int64(arguments + 80),
        read_int64(arguments + 88),
    )
    slots, T, Hkv = read_int64(arguments + 96), read_int64(arguments + 104), read_int64(arguments + 112)
    B, length = read_int64(arguments + 120), read_int64(arguments + 128)
    while True:
        first = take_next(arguments) * 16
        if first >= T:
            break
        for t in range(first, min(first + 16, T)):
            slot = read_int64(slots + t * 8)
            target = cache + slot // B * block_stride + slot % B * slot_stride
            for h in range(Hkv):
                copy_bytes(target + h * head_stride, k + t * k_row + h * k_head, length)
                copy_bytes(target + h * head_stride + value_offset, v + t * v_row + h * v_head, length)


@njit(nogil=True, error_model="numpy")
def _store_quantised(arguments: int, tag: Any, kind: Any) -> None:
    """Quantise keys and values into their slots. One item: 16 tokens.

    Arguments: those of `_store` with D for the bytes of a row, then scales, their block stride, value offset and head stride.
    """
    k, k_row, k_head = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    v, v_row, v_head = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    cache, block_stride = read_int64(arguments + 56), read_int64(arguments + 64)
    value_offset, head_stride, slot_stride = (
        read_int64(arguments + 72),
        read_int64(arguments + 80),
        read_int64(arguments + 88),
    )
    slots, T, Hkv = read_int64(arguments + 96), read_int64(arguments + 104), read_int64(arguments + 112)
    B, D = read_int64(arguments + 120), read_int64(arguments + 128)
    scales, scale_block_stride = read_int64(arguments + 136), read_int64(arguments + 144)
    scale_value_offset, scale_head_stride = read_int64(arguments + 152), read_int64(arguments + 160)
    while True:
        first = take_next(arguments) * 16
        if first >= T:
            break
        for t in range(first, min(first + 16, T)):
            slot = read_int64(slots + t * 8)
            for h in range(Hkv):
                target = cache + slot // B * block_stride + slot % B * slot_stride + h * head_stride
                scale = scales + slot // B * scale_block_stride + slot % B * 4 + h * scale_head_stride
                write_float(scale, quantise_row(tag, kind, k + t * k_row + h * k_head, target, D))
                write_float(
                    scale + scale_value_offset,
                    quantise_row(tag, kind, v + t * v_row + h * v_head, target + value_offset, D),
                )


# Elements of a pool, as the kernels name them.
PLAIN, INT8, FP8 = "", "int8", "fp8"


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
    return Kernel(bodies[elements][is_bf16], 30)


@lru_cache(maxsize=4)
def store_quantised_kernel(is_bf16: bool, elements: str) -> Kernel:
    """Compile the quantising writes for one type of keys and pool, or load it from the cache."""
    key = source_key()

    def store_bf16_int8(arguments: int) -> None:
        if key:
            _store_quantised(arguments, np.uint16(0), np.int8(0))

    def store_f32_int8(arguments: int) -> None:
        if key:
            _store_quantised(arguments, np.float32(0), np.int8(0))

    def store_bf16_fp8(arguments: int) -> None:
        if key:
            _store_quantised(arguments, np.uint16(0), np.uint8(0))

    def store_f32_fp8(arguments: int) -> None:
        if key:
            _store_quantised(arguments, np.float32(0), np.uint8(0))

    bodies = {INT8: (store_f32_int8, store_bf16_int8), FP8: (store_f32_fp8, store_bf16_fp8)}
    return Kernel(bodies[elements][is_bf16], 20)


@lru_cache(maxsize=2)
def merge_kernel(is_bf16: bool) -> Kernel:
    """Compile the merge of split tiles for one type of output, or load it from the cache."""
    key = source_key()

    def merge_bf16(arguments: int) -> None:
        if key:
            _merge(arguments, np.uint16(0))

    def merge_f32(arguments: int) -> None:
        if key:
            _merge(arguments, np.float32(0))

    return Kernel(merge_bf16 if is_bf16 else merge_f32, 11)


@lru_cache(maxsize=1)
def store_kernel() -> Kernel:
    """Compile the writing of keys and values, or load it from the cache."""
    key = source_key()

    def store_rows(arguments: int) -> None:
        if key:
            _store(arguments)

    return Kernel(store_rows, 16)
