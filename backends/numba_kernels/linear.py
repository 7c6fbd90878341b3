"""x @ weight.T for bfloat16 weights in panels of 32 outputs. Not for float32: there exactness comes first and torch's BLAS is fast.

Layout of a packed weight [N, K] (N a multiple of 16, K even): panel p holds outputs 32 p … 32 p + 31 (the last may hold 16) as K/2 rows
of one 32-bit word per output, two neighbouring values of k in a word. So a launch reads every weight once, in address order, and neither
vectors nor matrix tiles need transposes or sums over lanes. Invariant: an output depends on its own row of x alone, bit for bit.

Arguments: counter, x, x row stride, packed, bias (float32, zero for none), y, y row stride, T, N, K/2, number of threads, activation. With
an activation (not NONE), the first 16 outputs of a panel gate the others, and y is [T, N / 2] of their products, N a multiple of 32. There
are two bodies: one for matrix tiles, K a multiple of 32, and one for vectors.

With few rows, an item is a panel, which is read from memory once and in order. With many, it is a block that stays in the second-level
cache, and memory would idle while later rows meet a panel that is there already. So the thread's next panels are fetched meanwhile; with
few rows only their beginnings, from where the processor's own prefetching takes over (a tenth faster than without, or with all of it).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.activations import NONE
from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.matrix_tiles import (
    CONFIGURATION_BYTES,
    LINE_BYTES,
    MAX_TILE_ROWS,
    configure_tiles,
    multiply_tiles_and_write,
    release_tiles,
)
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.tile_results import write_gated_rows, write_rows
from backends.numba_kernels.vectors import (
    MAX_ROWS,
    keep,
    multiply_tile,
    read_int64,
    take_next,
    write_float,
)

PANEL = 32  # outputs of a panel
STEP_WORDS = 16  # words of k in a step of matrix tiles

# Vectors: up to so many rows, an item is one panel.
STREAM_ROWS = 48
BLOCK_PANELS, BLOCK_ROWS = 4, 48
# Matrix tiles: rows x steps of a block of x are at most 768 KiB of second-level cache, beside 2 panels of as many steps (200 KiB).
TILE_BLOCK_PANELS, TILE_BLOCK_ROWS, TILE_BLOCK_STEPS = 2, 256, 48
FETCHED_LINES = 16  # of the 32 lines of a step, at most
TILE_BLOCK_CELLS = TILE_BLOCK_ROWS * TILE_BLOCK_STEPS


@njit(nogil=True, error_model="numpy")
def _part(index: int, count: int, total: int) -> int:
    """Return where part `index` begins when `total` is divided as evenly as it goes into `count` parts."""
    return index * total // count


@njit(nogil=True, error_model="numpy")
def _linear_tiles(arguments: int, tag: Any) -> None:
    x, x_stride = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, bias = read_int64(arguments + 24), read_int64(arguments + 32)
    y, y_stride = read_int64(arguments + 40), read_int64(arguments + 48)
    T, N, words = read_int64(arguments + 56), read_int64(arguments + 64), read_int64(arguments + 72)
    num_threads, activation = read_int64(arguments + 80), read_int64(arguments + 88)
    num_panels = (N + PANEL - 1) // PANEL
    num_groups = (T + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    steps = words // STEP_WORDS

    # The blocks: of panels, of groups of rows, and of steps.
    panel_blocks, row_blocks, step_blocks = num_panels, 1, 1
    if num_groups > 1:
        step_blocks = (steps + TILE_BLOCK_STEPS - 1) // TILE_BLOCK_STEPS
        block_groups = max(1, TILE_BLOCK_CELLS * step_blocks // (steps * MAX_TILE_ROWS))
        row_blocks = (num_groups + block_groups - 1) // block_groups
        panel_blocks = (num_panels + TILE_BLOCK_PANELS - 1) // TILE_BLOCK_PANELS
        # As many items for each thread.
        panel_blocks = min(num_panels, (panel_blocks + num_threads - 1) // num_threads * num_threads)
        if panel_blocks == num_panels and panel_blocks * row_blocks < 2 * num_threads:
            row_blocks = max(row_blocks, min(num_groups, (2 * num_threads + num_panels - 1) // num_panels))
    y_width = 2 if activation == NONE else 1  # bytes of y for an output
    num_items = panel_blocks * row_blocks
    fetches = num_items >= 2 * num_threads

    most_groups = (num_groups + row_blocks - 1) // row_blocks
    most_panels = (num_panels + panel_blocks - 1) // panel_blocks
    tile_bytes = MAX_TILE_ROWS * PANEL * 4
    num_tiles = 2 if step_blocks == 1 else most_groups * most_panels
    area = np.empty(LINE_BYTES + CONFIGURATION_BYTES + PANEL * 4 + num_tiles * tile_bytes, np.uint8)
    configuration = (area.ctypes.data + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    no_bias = configuration + CONFIGURATION_BYTES  # minus zeros: adding them changes no number
    for i in range(PANEL):
        write_float(no_bias + 4 * i, np.float32(-0.0))
    sums = no_bias + PANEL * 4
    configured = 0
    # A tile of sums is rounded and written while the next one is computed.
    pending_rows, pending, where, shift = 0, sums, y, no_bias
    item = take_next(arguments)
    while item < num_items:
        # Drawn ahead, to be fetched meanwhile.
        upcoming = take_next(arguments) if fetches else num_items
        panel, last_panel = (
            _part(item % panel_blocks, panel_blocks, num_panels),
            _part(item % panel_blocks + 1, panel_blocks, num_panels),
        )
        first_group, last_group = (
            _part(item // panel_blocks, row_blocks, num_groups),
            _part(item // panel_blocks + 1, row_blocks, num_groups),
        )
        groups = max(1, last_group - first_group)  # none for no rows
        lines = min(FETCHED_LINES, (2 * STEP_WORDS + groups - 1) // groups)
        for block in range(step_blocks):
            step = _part(block, step_blocks, steps)
            block_steps = _part(block + 1, step_blocks, steps) - step
            next_panel, next_step = panel, _part(block + 1, step_blocks, steps)
            if block == step_blocks - 1:
                next_panel, next_step = _part(upcoming % panel_blocks, panel_blocks, num_panels), 0
            fetched_lines = lines if fetches and (block < step_blocks - 1 or upcoming < num_items) else 0
            for group in range(first_group, last_group):
                row = group * MAX_TILE_ROWS
                count = min(MAX_TILE_ROWS, T - row)
                if count != configured:
                    configure_tiles(configuration, count)
                    configured = count
                for index in range(last_panel - panel):
                    column = (panel + index) * PANEL
                    width = min(PANEL, N - column)
                    if step_blocks == 1:
                        target = sums + tile_bytes if pending == sums else sums
                    else:
                        target = sums + ((group - first_group) * most_panels + index) * tile_bytes
                    following = packed + (next_panel + index) * PANEL * words * 4 + next_step * STEP_WORDS * PANEL * 4
                    multiply_tiles_and_write(
                        tag,
                        count,
                        width // 16,
                        x + row * x_stride + step * STEP_WORDS * 4,
                        x_stride,
                        packed + column * words * 4 + step * STEP_WORDS * width * 4,
                        width * 4,
                        target,
                        PANEL * 4,
                        block_steps,
                        block > 0,
                        following + (group - first_group) * block_steps * lines * LINE_BYTES,
                        fetched_lines,
                        pending_rows,
                        pending,
                        where,
                        y_stride,
                        shift,
                        activation,
                    )
                    pending_rows = 0
                    if block == step_blocks - 1:
                        pending, where = target, y + row * y_stride + column * y_width
                        shift = bias + column * 4 if bias else no_bias
                        if width == PANEL:
                            pending_rows = count
                        else:
                            write_rows(count, 1, pending, PANEL * 4, where, y_stride, shift)
        item = upcoming if fetches else take_next(arguments)
    if activation == NONE:
        write_rows(pending_rows, 2, pending, PANEL * 4, where, y_stride, shift)
    else:
        write_gated_rows(activation, pending_rows, pending, PANEL * 4, where, y_stride, shift)
    release_tiles()
    keep(area)


@njit(nogil=True, error_model="numpy")
def _linear_vectors(arguments: int, tag: Any) -> None:
    x, x_stride = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, bias = read_int64(arguments + 24), read_int64(arguments + 32)
    y, y_stride = read_int64(arguments + 40), read_int64(arguments + 48)
    T, N, steps = read_int64(arguments + 56), read_int64(arguments + 64), read_int64(arguments + 72)
    num_threads, activation = read_int64(arguments + 80), read_int64(arguments + 88)
    panels_per_item, rows_per_item = 1, max(T, 1)
    if T > STREAM_ROWS:
        # The speed hardly depends on a block's size, so it is small, to leave every thread a fair share of a prompt of 64 tokens.
        panels_per_item, rows_per_item = BLOCK_PANELS, BLOCK_ROWS
    num_panels = (N + PANEL - 1) // PANEL
    panel_items = (num_panels + panels_per_item - 1) // panels_per_item
    num_items = panel_items * ((T + rows_per_item - 1) // rows_per_item)
    sums = np.empty((MAX_ROWS + 2) * PANEL, np.float32)
    target = (sums.ctypes.data + 63) // 64 * 64
    no_bias = target + MAX_ROWS * PANEL * 4
    for i in range(PANEL):
        write_float(no_bias + 4 * i, np.float32(-0.0))
    while True:
        item = take_next(arguments)
        if item >= num_items:
            break
        first_panel = item % panel_items * panels_per_item
        first_row = item // panel_items * rows_per_item
        num_rows = min(rows_per_item, T - first_row)
        groups = (num_rows + MAX_ROWS - 1) // MAX_ROWS
        for group in range(groups):
            row = first_row + group * num_rows // groups
            count = first_row + (group + 1) * num_rows // groups - row
            for panel in range(first_panel, min(first_panel + panels_per_item, num_panels)):
                column = panel * PANEL
                width = min(PANEL, N - column)
                ahead = num_threads * PANEL * steps * 4 if group > 0 and column + num_threads * PANEL < N else 0
                multiply_tile(
                    tag,
                    count,
                    width // 16,
                    x + row * x_stride,
                    x_stride,
                    packed + column * steps * 4,
                    width * 4,
                    target,
                    PANEL * 4,
                    steps,
                    False,
                    ahead,
                )
                shift = bias + column * 4 if bias else no_bias
                where = y + row * y_stride + column * (2 if activation == NONE else 1)
                if activation == NONE:
                    write_rows(count, width // 16, target, PANEL * 4, where, y_stride, shift)
                else:
                    write_gated_rows(activation, count, target, PANEL * 4, where, y_stride, shift)
    keep(sums)


@lru_cache(maxsize=2)
def linear_kernel(has_tiles: bool) -> Kernel:
    """Compile one of the two bodies, or load it from the cache. Tiles must have been granted, see `has_matrix_tiles`."""
    key = source_key()

    def linear_tiles_bf16(arguments: int) -> None:
        if key:
            _linear_tiles(arguments, np.uint16(0))

    def linear_vectors_bf16(arguments: int) -> None:
        if key:
            _linear_vectors(arguments, np.uint16(0))

    return Kernel(linear_tiles_bf16 if has_tiles else linear_vectors_bf16, 11)
