"""Attention over blocks on matrix tiles (Intel AMX), for bfloat16 queries: the body that `attention` has for processors without them.

One item: a tile of the plan for one kv head. Its rows of (query, head) are taken 16 at a time; keys 64 at a time, at multiples of 64 from
the start of the sequence, in groups of 16 that each lie in one block:

    scores   of 4 groups at once, read from the pool as they lie (widened first if they have 8 bits, see `tile_layout`)
    softmax  online, per row: running maximum (base 2) and sum; weights rounded to bfloat16, their sum is not
    values   laid in pairs once, for all rows
    sum      rows x head size, float32

What a row gets does not depend on the number of rows or queries (see `tile_softmax`), so a decode, a chunk of a prompt, the whole prompt
and a prefix that many sequences share give the same bits. Blocks must be a multiple of 16 tokens, the head size one of 32.
"""

from __future__ import annotations

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
    key_range,
    merge_if_last,
)
from backends.numba_kernels.quantised import FP8, INT8, PLAIN, is_quantised
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.tile_layout import order_columns, pair_values, widen_group
from backends.numba_kernels.tile_softmax import (
    GROUPS,
    PASS_KEYS,
    TILE_BYTES,
    add_values,
    fold_lanes,
    score_keys,
    weigh_lanes,
)
from backends.numba_kernels.vectors import (
    LANES,
    copy_bytes,
    keep,
    prefetch,
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

# A *set* is what is known of up to 16 rows: the keys they see (2 x 16 int32), states of the part under way and of those before it (maxima,
# sums, factors), the keys that some row sees and those that all see, whether a pass of this part has been computed, whether one of an
# earlier part has, and the addresses of both sums [16, D].
LIMITS, STATE, FOLDED_STATE, FIRST_SEEN, LAST_SEEN, FIRST_WHOLE, LAST_WHOLE = 0, 128, 320, 512, 520, 528, 536
IS_BEGUN, IS_FOLDED, SUMS, FOLDED_SUMS, NUM_ROWS, QUERIES_AT, SET_BYTES = 544, 552, 560, 568, 576, 584, 640
# The *places* of a pass say where its 4 groups lie: int64 addresses of keys, then of their scales.
SCALES_AT, PLACES_BYTES = GROUPS * 8, GROUPS * 16


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

    steps = D // 32  # tiles of a key
    row_bytes = D if is_quantised(kind) else D * 2  # of a key or value in the pool
    widened = PASS_KEYS * D * 2 if is_quantised(kind) else 0
    area = np.empty(
        64 + CONFIGURATION_BYTES + max_sets * (steps * TILE_BYTES + SET_BYTES + 2 * LANES * D * 4)
        + 2 * GROUPS * TILE_BYTES + 2 * TILE_BYTES + TILE_BYTES + PASS_KEYS * D * 2 + 128 + 2 * PLACES_BYTES + 64 + 2 * PASS_KEYS * 4 + widened,
        np.uint8,
    )  # fmt: skip
    configuration = (area.ctypes.data + 63) // 64 * 64
    scores = configuration + CONFIGURATION_BYTES  # [groups, 16 keys, 16 lanes] float32
    other_scores = scores + GROUPS * TILE_BYTES  # of the next rows
    weights = other_scores + GROUPS * TILE_BYTES  # 2 tiles [16 rows, 32 keys]
    words = weights + 2 * TILE_BYTES
    values = words + TILE_BYTES  # [pairs of keys, D] words
    sources = values + PASS_KEYS * D * 2  # [16] int64 addresses of queries
    near = sources + 128  # where this pass's groups lie, and
    far = near + PLACES_BYTES  # those of the next
    wide_sources = far + PLACES_BYTES  # [groups] int64 addresses
    scale_rows = wide_sources + 64  # [2, 64] float32
    wide_keys = scale_rows + 2 * PASS_KEYS * 4  # [64, D] bfloat16
    sets = wide_keys + widened
    set_bytes = SET_BYTES + steps * TILE_BYTES + 2 * LANES * D * 4
    for n in range(max_sets):
        own = sets + n * set_bytes
        write_int64(own + QUERIES_AT, own + SET_BYTES)
        write_int64(own + SUMS, own + SET_BYTES + steps * TILE_BYTES)
        write_int64(own + FOLDED_SUMS, own + SET_BYTES + steps * TILE_BYTES + LANES * D * 4)

    for g in range(GROUPS):
        write_int64(wide_sources + g * 8, wide_keys + g * LANES * D * 2)

    configure_tiles(configuration, MAX_TILE_ROWS)
    item = take_next(arguments)
    while item < num_items:
        later = np.int64(-1)  # the next item, taken during the last pass of this one: its keys are asked for meanwhile
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
            _begin_set(
                sets + n * set_bytes, query, n * LANES, min(LANES, rows - n * LANES), G, window, lowest,
                read_int64(tile + TILE_LAST_KEY), q + head * G * q_head, q_row, q_head, sources, steps,
            )  # fmt: skip
        first_group, last_group = lowest // LANES * LANES, (highest - 1) // LANES * LANES
        head_scales = scales + head * scale_head_stride
        if lowest < highest:
            _find_groups(
                far, table, lowest // PASS_KEYS * PASS_KEYS, first_group, last_group, head_cache, B, block_stride, slot_stride,
                head_scales, scale_block_stride,
            )  # fmt: skip
        for start in range(lowest // PASS_KEYS * PASS_KEYS, highest, PASS_KEYS):
            if start % PART_KEYS == 0 and start > lowest:
                for n in range(num_sets):
                    _end_part(sets + n * set_bytes, D)
            is_half = highest - start <= PASS_KEYS // 2
            near, far = far, near
            if start + PASS_KEYS < highest:
                _find_groups(
                    far, table, start + PASS_KEYS, first_group, last_group, head_cache, B, block_stride, slot_stride,
                    head_scales, scale_block_stride,
                )  # fmt: skip
            else:
                later = take_next(arguments)
                copy_bytes(far, near, PLACES_BYTES)
                if later < num_items:
                    tile_later = read_int64(header + TILES) + later // Hkv * (TILE_FIELDS * 8)
                    query_later = read_int64(header + QUERIES) + read_int64(tile_later + TILE_QUERY) * (
                        QUERY_FIELDS * 8
                    )
                    low, high = key_range(tile_later, query_later, window)
                    if low < high:
                        _find_groups(
                            far, read_int64(header + TABLES) + read_int64(tile_later + TILE_TABLE), low // PASS_KEYS * PASS_KEYS,
                            low // LANES * LANES, (high - 1) // LANES * LANES, cache + later % Hkv * head_stride, B,
                            block_stride, slot_stride, scales + later % Hkv * scale_head_stride, scale_block_stride,
                        )  # fmt: skip
            key_sources, key_stride = near, slot_stride
            if is_quantised(kind):
                for g in range(GROUPS):
                    scale_at = read_int64(far + SCALES_AT + g * 8)
                    prefetch(scale_at, 64)
                    prefetch(scale_at + scale_value_offset, 64)
            num_groups = GROUPS // 2 if is_half else GROUPS
            for g in range(num_groups):
                first = min(max(start + g * LANES, first_group), last_group)
                written = min(LANES, highest - first)
                place, following = read_int64(near + g * 8), read_int64(far + g * 8)
                if is_quantised(kind):
                    scale_at = read_int64(near + SCALES_AT + g * 8)
                    _read_scales(scale_at, scale_at + scale_value_offset, written, scale_rows + g * 64)
                    widen_group(
                        kind, place, place + value_offset, slot_stride, written, wide_keys + g * LANES * D * 2, values + g * 8 * D * 4, D,
                        following,
                    )  # fmt: skip
                    key_sources, key_stride = wide_sources, D * 2
                else:
                    # Half of the next keys here, half while keys are multiplied.
                    asked = read_int64(far + g // 2 * 8) + g % 2 * (LANES * D)
                    pair_values(place + value_offset, slot_stride, written, values + g * 8 * D * 4, D, asked)
            for g in range(num_groups, GROUPS):
                following = read_int64(far + (g if is_quantised(kind) else g // 2) * 8)
                prefetch(following, LANES * row_bytes)
                prefetch(read_int64(far + g * 8) + value_offset, LANES * row_bytes)
            fetched = far
            n = _next_set(sets, set_bytes, 0, num_sets, start)
            if n < num_sets:
                first_queries = read_int64(sets + n * set_bytes + QUERIES_AT)
                score_keys(kind, key_sources, key_stride, first_queries, steps, scores, is_half, far)
            while n < num_sets:
                own = sets + n * set_bytes
                n = _next_set(sets, set_bytes, n + 1, num_sets, start)
                next_queries = read_int64(sets + n * set_bytes + QUERIES_AT) if n < num_sets else 0
                is_masked = start < read_int64(own + FIRST_WHOLE) or start + PASS_KEYS - 1 > read_int64(
                    own + LAST_WHOLE
                )
                set_rows, set_sums = read_int64(own + NUM_ROWS), read_int64(own + SUMS)
                shrinks = weigh_lanes(
                    kind, _width(set_rows), scores, weights, words, is_half, is_masked, start, own + LIMITS, scale, cap,
                    own + STATE, scale_rows, key_sources, key_stride, next_queries, steps, other_scores,
                    fetched, value_offset, row_bytes,
                )  # fmt: skip
                fetched = 0
                scores, other_scores = other_scores, scores
                is_begun = read_int64(own + IS_BEGUN) != 0
                if shrinks and is_begun:
                    for r in range(set_rows):
                        scale_row(set_sums + r * D * 4, D, read_float(own + STATE + 128 + r * 4))
                add_values(weights, values, set_sums, D // 16, is_half, not is_begun)
                write_int64(own + IS_BEGUN, 1)
        g, own = 0, query
        for r in range(rows):
            lane = r % LANES
            one = sets + r // LANES * set_bytes
            if lane == 0:
                _end_part(one, D)
            found = read_int64(one + FOLDED_SUMS) + lane * D * 4
            if not is_quantised(kind):
                order_columns(found, D)
            copy_bytes(sources, one + FOLDED_STATE + lane * 4, 4)
            copy_bytes(sources + 4, one + FOLDED_STATE + 64 + lane * 4, 4)
            deliver(
                tag, header, own, head * G + g, part, G * Hkv, D, found, sources, out, out_row, out_head, lse, lse_row
            )  # fmt: skip
            g += 1
            if g == G:
                g, own = 0, own + QUERY_FIELDS * 8
        if part:
            for i in range(count):
                own = query + i * (QUERY_FIELDS * 8)
                merge_if_last(tag, header, own, head, Hkv, G, D, out, out_row, out_head, lse, lse_row)
        item = later if later >= 0 else take_next(arguments)
    release_tiles()
    keep(area)


@njit(nogil=True, error_model="numpy")
def _next_set(sets: int, set_bytes: int, n: int, num_sets: int, start: int) -> int:
    """Return the first set from `n` on of which some row sees a key of the pass."""
    while n < num_sets:
        own = sets + n * set_bytes
        if read_int64(own + FIRST_SEEN) < start + PASS_KEYS and start <= read_int64(own + LAST_SEEN):
            break
        n += 1
    return n


@njit(nogil=True, error_model="numpy")
def _find_groups(
    places: int,
    table: int,
    start: int,
    first_group: int,
    last_group: int,
    cache: int,
    B: int,
    block_stride: int,
    slot_stride: int,
    scales: int,
    scale_block_stride: int,
) -> None:
    """Write where the 4 groups of the pass at `start` lie: addresses of keys, then of their scales; `cache` and `scales` of a kv head.

    In place of a group without a key to be seen stands the nearest with one: what is read must have been written, though it weighs nothing.
    """
    group = min(max(start, first_group), last_group)
    index, slot = group // B, group % B
    for g in range(GROUPS):
        # Walked, because divisions are slow.
        if group < min(start + g * LANES, last_group):
            group, slot = group + LANES, slot + LANES
            if slot == B:
                index, slot = index + 1, 0
        block = np.int64(read_int32(table + index * 4))
        write_int64(places + g * 8, cache + block * block_stride + slot * slot_stride)
        write_int64(places + SCALES_AT + g * 8, scales + block * scale_block_stride + slot * 4)


@njit(nogil=True, error_model="numpy")
def _read_scales(keys: int, values: int, written: int, target: int) -> None:
    """Copy 16 scales of keys, and of values PASS_KEYS further; zeros in place of those that were not written."""
    if written == LANES:
        copy_bytes(target, keys, 64)
        copy_bytes(target + PASS_KEYS * 4, values, 64)
        return
    for t in range(LANES):
        write_float(target + t * 4, read_float(keys + t * 4) if t < written else np.float32(0))
        write_float(target + (PASS_KEYS + t) * 4, read_float(values + t * 4) if t < written else np.float32(0))


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
    steps: int,
) -> None:
    """Lay out the queries of up to 16 rows, first … of the tile's, as a right factor, and note which keys they see. `q` is of the kv head."""
    width = _width(rows)
    first_seen, last_seen = 1 << 31, -1
    first_whole, last_whole = 0, 1 << 31
    g = first % G
    one = query + first // G * (QUERY_FIELDS * 8)
    for lane in range(width):
        source = q + read_int64(one + QUERY_ROW) * q_row + g * q_head
        position = read_int64(one + QUERY_POSITION)
        low, high = lowest, min(position, last_key - 1)
        if window:
            low = max(low, position - window + 1)
        for copy in range(lane, LANES, width):
            write_int64(sources + copy * 8, source)
            write_int32(own + LIMITS + copy * 4, low)
            write_int32(own + LIMITS + 64 + copy * 4, high)
        first_seen, last_seen = min(first_seen, low), max(last_seen, high)
        first_whole, last_whole = max(first_whole, low), min(last_whole, high)
        if lane + 1 < rows:  # the last row stands for lanes without one
            g += 1
            if g == G:
                g, one = 0, one + QUERY_FIELDS * 8
    write_int64(own + FIRST_SEEN, first_seen)
    write_int64(own + LAST_SEEN, last_seen)
    write_int64(own + FIRST_WHOLE, first_whole)
    write_int64(own + LAST_WHOLE, last_whole)
    write_int64(own + NUM_ROWS, rows)
    write_int64(own + IS_FOLDED, 0)
    _begin_part(own)
    for step in range(steps):
        transpose_words(sources, step * 64, 16, read_int64(own + QUERIES_AT) + step * TILE_BYTES, 64)


@njit(nogil=True, error_model="numpy")
def _begin_part(own: int) -> None:
    """Forget what the rows of a set have seen."""
    for lane in range(LANES):
        write_float(own + STATE + lane * 4, np.float32(NO_SCORE))
        write_float(own + STATE + 64 + lane * 4, np.float32(0))
    write_int64(own + IS_BEGUN, 0)


@njit(nogil=True, error_model="numpy")
def _end_part(own: int, D: int) -> None:
    """Fold the part under way into those before it, and begin another. A part of which the set saw nothing is left out."""
    sums, folded_sums = read_int64(own + SUMS), read_int64(own + FOLDED_SUMS)
    if read_int64(own + IS_FOLDED) == 0:
        # It is the first, or so far nothing at all.
        copy_bytes(own + FOLDED_STATE, own + STATE, 128)
        write_int64(own + SUMS, folded_sums)
        write_int64(own + FOLDED_SUMS, sums)
        if read_int64(own + IS_BEGUN) == 0:
            for d in range(0, LANES * D * 4, 8):
                write_int64(sums + d, 0)
        write_int64(own + IS_FOLDED, read_int64(own + IS_BEGUN))
    elif read_int64(own + IS_BEGUN):
        fold_lanes(folded_sums, own + FOLDED_STATE, sums, own + STATE, read_int64(own + NUM_ROWS), D)
    _begin_part(own)


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
