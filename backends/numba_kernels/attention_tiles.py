"""Attention over blocks on matrix tiles (Intel AMX), for bfloat16 queries: the body that `attention` has for processors without them.

One item: a tile of the plan for one kv head. Its rows of (query, head) are taken 16 at a time; keys 64 at a time, at multiples of 64 from
the start of the sequence, in groups of 16 that each lie in one block:

    scores   of 4 groups at once, read from the pool as they lie
    softmax  online, per row: running maximum (base 2) and sum; weights rounded to bfloat16, their sum is not
    values   laid in pairs once, for all rows
    sum      rows x head size, float32

What a row gets does not depend on the number of rows or queries (see `tile_softmax`), so a decode, a chunk of a prompt, the whole prompt
and a prefix that many sequences share give the same bits. Blocks must be a multiple of 16 tokens, the head size one of 32.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.matrix_tiles import CONFIGURATION_BYTES, MAX_TILE_ROWS, configure_tiles, release_tiles
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
    TILE_LAST_KEY,
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
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.tile_softmax import (
    GROUPS,
    PASS_KEYS,
    TILE_BYTES,
    add_values,
    order_columns,
    pair_values,
    score_keys,
    weigh_lanes,
)
from backends.numba_kernels.vectors import (
    LANES,
    copy_bytes,
    keep,
    read_float,
    read_int32,
    read_int64,
    scale_row,
    take_next,
    transpose_words,
    write_float,
    write_int32,
    write_int64,
)

LOG2_E = np.float32(1 / math.log(2))
LN_2 = np.float32(math.log(2))
# Bytes for each 16 rows: limits (2 x 16 int32), state (maxima, sums, factors), and four int64 of what the limits allow.
LIMITS, STATE, FIRST_SEEN, LAST_SEEN, FIRST_WHOLE, LAST_WHOLE, IS_BEGUN = 0, 128, 320, 328, 336, 344, 352
ROWS_BYTES = 384


@njit(nogil=True, error_model="numpy")
def _attend(arguments: int, kind: Any) -> None:
    """Attend over tiles. `kind` is the type of the pool's elements; arguments as in `attention`."""
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
    max_sets = (read_int64(header + MAX_QUERIES) * G + LANES - 1) // LANES  # of 16 rows
    tag = np.uint16(0)
    factor = scale if cap > np.float32(0) else scale * LOG2_E

    steps = D // 32  # tiles of a key
    widened = 2 * PASS_KEYS * D * 2 if is_quantised(kind) else 0
    area = np.empty(
        64 + CONFIGURATION_BYTES + max_sets * (steps * TILE_BYTES + ROWS_BYTES + 2 * LANES * (D * 4 + 8))
        + GROUPS * TILE_BYTES + 2 * TILE_BYTES + TILE_BYTES + PASS_KEYS * D * 2 + 5 * 64 + 2 * PASS_KEYS * 4 + widened,
        np.uint8,
    )  # fmt: skip
    configuration = (area.ctypes.data + 63) // 64 * 64
    queries = configuration + CONFIGURATION_BYTES  # [sets, steps] tiles
    scores = queries + max_sets * steps * TILE_BYTES  # [groups, 16 keys, 16 lanes] float32
    weights = scores + GROUPS * TILE_BYTES  # 2 tiles [16 rows, 32 keys]
    words = weights + 2 * TILE_BYTES
    values = words + TILE_BYTES  # [pairs of keys, D] words
    sums = values + PASS_KEYS * D * 2  # [rows, D] float32, of the part under way
    folded_sums = sums + max_sets * LANES * D * 4  # the same of the parts before it
    sets = folded_sums + max_sets * LANES * D * 4
    states = sets + max_sets * ROWS_BYTES  # [rows, 2] float32, of the part that has ended
    folded_states = states + max_sets * LANES * 8
    sources = folded_states + max_sets * LANES * 8  # [16] int64 addresses of queries
    key_sources = sources + 128  # [groups] int64 addresses of keys
    value_sources = key_sources + 64
    scale_rows = value_sources + 64  # [2, 64] float32
    wide_keys = scale_rows + 2 * PASS_KEYS * 4  # [64, D] bfloat16
    wide_values = wide_keys + PASS_KEYS * D * 2

    configure_tiles(configuration, MAX_TILE_ROWS)
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
        num_sets = (rows + LANES - 1) // LANES
        lowest, highest = key_range(tile, query, window)
        for n in range(num_sets):
            own = sets + n * ROWS_BYTES
            _begin_set(
                own, query, n * LANES, min(LANES, rows - n * LANES), G, window, lowest, read_int64(tile + TILE_LAST_KEY),
                q + head * G * q_head, q_row, q_head, sources, queries + n * steps * TILE_BYTES, steps,
            )  # fmt: skip
            _begin_part(own)
        is_folded = False
        for start in range(lowest // PASS_KEYS * PASS_KEYS, highest, PASS_KEYS):
            if start % PART_KEYS == 0 and start > lowest:
                for n in range(num_sets):
                    _end_part(sets + n * ROWS_BYTES, n, rows, D, sums, states)
                    _begin_part(sets + n * ROWS_BYTES)
                if is_folded:
                    for r in range(rows):
                        fold(folded_sums + r * D * 4, folded_states + r * 8, sums + r * D * 4, states + r * 8, D, LN_2)
                else:
                    sums, folded_sums, states, folded_states = folded_sums, sums, folded_states, states
                    is_folded = True
            is_half = highest - start <= PASS_KEYS // 2
            num_groups = GROUPS // 2 if is_half else GROUPS
            key_stride, value_stride = slot_stride, slot_stride
            for g in range(num_groups):
                # Groups without a key to be seen are those nearest to them: what is read must have been written, though it weighs nothing.
                first = min(max(start + g * LANES, lowest // LANES * LANES), (highest - 1) // LANES * LANES)
                block = np.int64(read_int32(table + first // B * 4))
                source = head_cache + block * block_stride + first % B * slot_stride
                written = min(LANES, highest - first)
                value_source = source + value_offset
                if is_quantised(kind):
                    scale_at = scales + block * scale_block_stride + head * scale_head_stride + first % B * 4
                    for t in range(LANES):
                        at = scale_rows + (g * LANES + t) * 4
                        write_float(at, read_float(scale_at + t * 4) if t < written else np.float32(0))
                        write_float(
                            at + PASS_KEYS * 4,
                            read_float(scale_at + scale_value_offset + t * 4) if t < written else np.float32(0),
                        )
                    for t in range(written):
                        at = (g * LANES + t) * D * 2
                        widen_row(tag, kind, source + t * slot_stride, wide_keys + at, D)
                        widen_row(tag, kind, value_source + t * slot_stride, wide_values + at, D)
                    source, value_source = wide_keys + g * LANES * D * 2, wide_values + g * LANES * D * 2
                    key_stride = value_stride = D * 2
                write_int64(key_sources + g * 8, source)
                for t in range(0, LANES, 2):
                    upper = value_source + min(t, written - 1) * value_stride
                    lower = value_source + min(t + 1, written - 1) * value_stride
                    pair_values(upper, lower, values + (g * LANES + t) // 2 * D * 4, D)
            for n in range(num_sets):
                own = sets + n * ROWS_BYTES
                if start > read_int64(own + LAST_SEEN) or start + PASS_KEYS <= read_int64(own + FIRST_SEEN):
                    continue
                is_masked = start < read_int64(own + FIRST_WHOLE) or start + PASS_KEYS - 1 > read_int64(
                    own + LAST_WHOLE
                )
                set_rows = min(LANES, rows - n * LANES)
                score_keys(key_sources, key_stride, queries + n * steps * TILE_BYTES, steps, scores, is_half)
                shrinks = weigh_lanes(
                    kind, _width(set_rows), scores, weights, words, is_half, is_masked, start, own + LIMITS, factor, cap,
                    own + STATE, scale_rows,
                )  # fmt: skip
                set_sums = sums + n * LANES * D * 4
                is_begun = read_int64(own + IS_BEGUN) != 0
                if shrinks and is_begun:
                    for r in range(set_rows):
                        shrink = read_float(own + STATE + 128 + r * 4)
                        if shrink != np.float32(1):
                            scale_row(set_sums + r * D * 4, D, shrink)
                add_values(weights, values, set_sums, D // 16, is_half, not is_begun)
                write_int64(own + IS_BEGUN, 1)
        for n in range(num_sets):
            _end_part(sets + n * ROWS_BYTES, n, rows, D, sums, states)
        for r in range(rows):
            if is_folded:
                fold(folded_sums + r * D * 4, folded_states + r * 8, sums + r * D * 4, states + r * 8, D, LN_2)
            found, state = (folded_sums, folded_states) if is_folded else (sums, states)
            order_columns(found + r * D * 4, D)
            own = query + r // G * (QUERY_FIELDS * 8)
            deliver(
                tag, header, own, head * G + r % G, part, G * Hkv, D, found + r * D * 4, state + r * 8,
                out, out_row, out_head, lse, lse_row, LN_2,
            )  # fmt: skip
        if part:
            for i in range(count):
                own = query + i * (QUERY_FIELDS * 8)
                merge_if_last(tag, header, own, head, Hkv, G, D, out, out_row, out_head, lse, lse_row, LN_2)
    release_tiles()
    keep(area)


@njit(nogil=True, error_model="numpy")
def _width(rows: int) -> int:
    """Return the lanes that so many rows take, see `tile_softmax`."""
    if rows <= 4:
        return 4
    return 8 if rows <= 8 else 16


@njit(nogil=True, error_model="numpy")
def _begin_set(
    own: int,
    query: int,
    first: int,
    rows: int,
    G: int,
    window: int,
    lowest: int,
    last_key: int,
    q: int,
    q_row: int,
    q_head: int,
    sources: int,
    target: int,
    steps: int,
) -> None:
    """Lay out the queries of up to 16 rows, first … of the tile's, as a right factor, and note which keys they see. `q` is of the kv head."""
    width = _width(rows)
    first_seen, last_seen = 1 << 31, -1
    first_whole, last_whole = 0, 1 << 31
    for lane in range(LANES):
        r = lane % width
        if r >= rows:
            r = 0
        r += first
        one = query + r // G * (QUERY_FIELDS * 8)
        write_int64(sources + lane * 8, q + read_int64(one + QUERY_ROW) * q_row + r % G * q_head)
        position = read_int64(one + QUERY_POSITION)
        low, high = lowest, min(position, last_key - 1)
        if window:
            low = max(low, position - window + 1)
        write_int32(own + LIMITS + lane * 4, low)
        write_int32(own + LIMITS + 64 + lane * 4, high)
        first_seen, last_seen = min(first_seen, low), max(last_seen, high)
        first_whole, last_whole = max(first_whole, low), min(last_whole, high)
    write_int64(own + FIRST_SEEN, first_seen)
    write_int64(own + LAST_SEEN, last_seen)
    write_int64(own + FIRST_WHOLE, first_whole)
    write_int64(own + LAST_WHOLE, last_whole)
    for step in range(steps):
        transpose_words(sources, step * 64, 16, target + step * TILE_BYTES, 64)


@njit(nogil=True, error_model="numpy")
def _begin_part(own: int) -> None:
    """Forget what 16 rows have seen."""
    for lane in range(LANES):
        write_float(own + STATE + lane * 4, np.float32(NO_SCORE))
        write_float(own + STATE + 64 + lane * 4, np.float32(0))
    write_int64(own + IS_BEGUN, 0)


@njit(nogil=True, error_model="numpy")
def _end_part(own: int, n: int, rows: int, D: int, sums: int, states: int) -> None:
    """Turn the state of set `n` into what `parts` folds; the sums of rows that saw no key at all become zeros."""
    for r in range(n * LANES, min((n + 1) * LANES, rows)):
        lane = r - n * LANES
        copy_bytes(states + r * 8, own + STATE + lane * 4, 4)
        copy_bytes(states + r * 8 + 4, own + STATE + 64 + lane * 4, 4)
        if read_int64(own + IS_BEGUN) == 0:
            for d in range(0, D * 4, 8):
                write_int64(sums + r * D * 4 + d, 0)


@lru_cache(maxsize=3)
def attend_tiles_kernel(elements: str = PLAIN) -> Kernel:
    """Compile the attention body for one type of pool, or load it from the cache. Only where `has_matrix_tiles` says so."""
    key = source_key()

    def attend_tiles_plain(arguments: int) -> None:
        if key:
            _attend(arguments, np.uint16(0))

    def attend_tiles_int8(arguments: int) -> None:
        if key:
            _attend(arguments, np.int8(0))

    def attend_tiles_fp8(arguments: int) -> None:
        if key:
            _attend(arguments, np.uint8(0))

    return Kernel({PLAIN: attend_tiles_plain, INT8: attend_tiles_int8, FP8: attend_tiles_fp8}[elements], 25)
