"""x @ weight.T for bfloat16 weights in panels of 32 outputs, on vectors. Not for float32: there exactness comes first and torch's BLAS is fast.

Layout of a packed weight [N, K] (N a multiple of 16, K even): panel p holds outputs 32 p … 32 p + 31 (the last may hold 16) as K/2 rows
of one 32-bit word per output, two neighbouring values of k in a word. So a launch reads every weight once, in address order, and neither
vectors nor matrix tiles need transposes or sums over lanes. Invariant: an output depends on its own row of x alone, bit for bit.

Arguments: counter, x, x row stride, packed, factors and bias (float32, zero for none), y, y row stride, T, N, K/2, number of threads,
activation. A sum is multiplied by its output's factor before the bias is added. With an activation (not NONE), the first 16 outputs of a panel
gate the others, and y is [T, N / 2] of their products, N a multiple of 32. The body for matrix tiles is in `linear_tiles`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.activations import NONE
from backends.numba_kernels.compiling import source_key
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

NUM_ARGUMENTS = 12  # after the counter
PANEL = 32  # outputs of a panel
# Up to so many rows, an item is one panel.
STREAM_ROWS = 48
BLOCK_PANELS, BLOCK_ROWS = 4, 48


@njit(nogil=True, error_model="numpy")
def _linear_vectors(arguments: int, tag: Any) -> None:
    x, x_stride = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, factors, bias = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    y, y_stride = read_int64(arguments + 48), read_int64(arguments + 56)
    T, N, steps = read_int64(arguments + 64), read_int64(arguments + 72), read_int64(arguments + 80)
    num_threads, activation = read_int64(arguments + 88), read_int64(arguments + 96)
    panels_per_item, rows_per_item = 1, max(T, 1)
    if T > STREAM_ROWS:
        # The speed hardly depends on a block's size, so it is small, to leave every thread a fair share of a prompt of 64 tokens.
        panels_per_item, rows_per_item = BLOCK_PANELS, BLOCK_ROWS
    num_panels = (N + PANEL - 1) // PANEL
    panel_items = (num_panels + panels_per_item - 1) // panels_per_item
    num_items = panel_items * ((T + rows_per_item - 1) // rows_per_item)
    sums = np.empty((MAX_ROWS + 3) * PANEL, np.float32)
    target = (sums.ctypes.data + 63) // 64 * 64
    no_bias = target + MAX_ROWS * PANEL * 4
    no_factor = no_bias + PANEL * 4
    for i in range(PANEL):
        write_float(no_bias + 4 * i, np.float32(-0.0))
        write_float(no_factor + 4 * i, np.float32(1))
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
                factor = factors + column * 4 if factors else no_factor
                shift = bias + column * 4 if bias else no_bias
                where = y + row * y_stride + column * (2 if activation == NONE else 1)
                if activation == NONE:
                    write_rows(count, width // 16, target, PANEL * 4, where, y_stride, factor, shift)
                else:
                    write_gated_rows(activation, count, target, PANEL * 4, where, y_stride, factor, shift)
    keep(sums)


@lru_cache(maxsize=1)
def linear_kernel() -> Kernel:
    """Compile the body for vectors, or load it from the cache."""
    key = source_key()

    def linear_vectors_bf16(arguments: int) -> None:
        if key:
            _linear_vectors(arguments, np.uint16(0))

    return Kernel(linear_vectors_bf16, NUM_ARGUMENTS)
