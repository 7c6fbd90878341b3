"""x @ weight.T for bfloat16 weights in panels of 32 outputs. Not for float32: there exactness comes first and torch's BLAS is fast.

Layout of a packed weight [N, K] (N a multiple of 16, K even): panel p holds outputs 32 p … 32 p + 31 (the last may hold 16) as K/2 rows
of one 32-bit word per output, two neighbouring values of k in a word. So a launch reads every weight once, in address order, and a tile
needs neither transposes nor sums over lanes. Invariant: an output depends on its own row of x alone, bit for bit.

Arguments: counter, x, x row stride, packed, bias (float32, zero for none), y, y row stride, T, N, K/2, panels per item, rows per item,
number of threads.
One item: `panels per item` panels for `rows per item` rows of x, in groups of at most MAX_ROWS rows that stay in L1 while the panels
stay in L2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import MAX_ROWS, keep, multiply_tile, read_int64, take_next, write_row

PANEL = 32  # outputs of a panel


@njit(nogil=True, error_model="numpy")
def _linear(arguments: int, tag: Any) -> None:
    x, x_stride = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, bias = read_int64(arguments + 24), read_int64(arguments + 32)
    y, y_stride = read_int64(arguments + 40), read_int64(arguments + 48)
    T, N, steps = read_int64(arguments + 56), read_int64(arguments + 64), read_int64(arguments + 72)
    panels_per_item, rows_per_item = read_int64(arguments + 80), read_int64(arguments + 88)
    num_threads = read_int64(arguments + 96)
    num_panels = (N + PANEL - 1) // PANEL
    panel_items = (num_panels + panels_per_item - 1) // panels_per_item
    num_items = panel_items * ((T + rows_per_item - 1) // rows_per_item)
    sums = np.empty((MAX_ROWS + 1) * PANEL, np.float32)
    target = (sums.ctypes.data + 63) // 64 * 64
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
                # While later rows meet a panel that is already in L2, memory would idle: the thread's next panel is fetched then.
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
                for r in range(count):
                    where = y + (row + r) * y_stride + column * 2
                    write_row(
                        tag, target + r * PANEL * 4, where, width, np.float32(1), bias + column * 4 if bias else 0
                    )
    keep(sums)


@lru_cache(maxsize=1)
def linear_kernel() -> Kernel:
    """Compile the kernel, or load it from the cache."""
    key = source_key()

    def linear_bf16(arguments: int) -> None:
        if key:
            _linear(arguments, np.uint16(0))

    return Kernel(linear_bf16, 12)
