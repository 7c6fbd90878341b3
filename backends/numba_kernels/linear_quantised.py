"""x @ weight.T on vectors, for weights of integers in strips (see `groups`). x is bfloat16 and is quantised here, by groups.

Arguments: counter, x, x row stride, packed, bias (float32, 16 for each strip; zero for none), y, y row stride, T, strips, groups.
One item: a few strips for up to ROWS_AT_ONCE rows of x; a thread quantises these rows for itself when it first takes an item of theirs,
which costs a hundredth of the product and spares a second launch. Invariant: how rows are shared out never changes a result's bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.group_kinds import KINDS, SIDE_BYTES, group_bytes, group_size, tail_bytes
from backends.numba_kernels.groups import MAX_STRIP_ROWS, multiply_strip, quantise_groups
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import LANES, keep, read_int64, take_next, write_float

ROWS_AT_ONCE = 128
ITEM_BYTES = 1 << 15  # of packed strips
MIN_ITEMS = 16


@njit(nogil=True, error_model="numpy")
def _linear(arguments: int, kind: Any) -> None:
    x, x_stride = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, bias = read_int64(arguments + 24), read_int64(arguments + 32)
    y, y_stride = read_int64(arguments + 40), read_int64(arguments + 48)
    T, num_strips, groups = read_int64(arguments + 56), read_int64(arguments + 64), read_int64(arguments + 72)
    strip_bytes = groups * group_bytes(kind) + tail_bytes(kind)
    strips_per_item = max(1, min(ITEM_BYTES // strip_bytes, num_strips // MIN_ITEMS))
    strip_items = (num_strips + strips_per_item - 1) // strips_per_item
    num_items = strip_items * ((T + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
    row_bytes, side_bytes = groups * group_size(kind), groups * SIDE_BYTES
    rows_held = min(T, ROWS_AT_ONCE)
    memory = np.empty(rows_held * (row_bytes + side_bytes) + 2 * 64, np.uint8)
    zeros = (memory.ctypes.data + 63) // 64 * 64
    codes = zeros + 64
    sides = codes + rows_held * row_bytes
    for i in range(LANES):
        write_float(zeros + 4 * i, np.float32(0))
    held = -1  # the first of the rows that are quantised
    while True:
        item = take_next(arguments)
        if item >= num_items:
            break
        first_row = item // strip_items * ROWS_AT_ONCE
        num_rows = min(ROWS_AT_ONCE, T - first_row)
        if held != first_row:
            held = first_row
            for r in range(num_rows):
                source = x + (first_row + r) * x_stride
                quantise_groups(kind, source, codes + r * row_bytes, sides + r * side_bytes, groups)
        first_strip = item % strip_items * strips_per_item
        for strip in range(first_strip, min(first_strip + strips_per_item, num_strips)):
            shift = bias + strip * LANES * 4 if bias else zeros
            here, where = packed + strip * strip_bytes, y + first_row * y_stride + strip * LANES * 2
            chunks = (num_rows + MAX_STRIP_ROWS - 1) // MAX_STRIP_ROWS
            for chunk in range(chunks):
                row = chunk * num_rows // chunks
                count = (chunk + 1) * num_rows // chunks - row
                multiply_strip(
                    kind,
                    count,
                    codes + row * row_bytes,
                    row_bytes,
                    sides + row * side_bytes,
                    side_bytes,
                    here,
                    groups,
                    shift,
                    where + row * y_stride,
                    y_stride,
                )
    keep(memory)


@lru_cache(maxsize=len(KINDS))
def quantised_linear_kernel(kind: str) -> Kernel:
    """Compile the product for one format of `groups.KINDS`, or load it from the cache."""
    key = source_key()

    def linear_q4_0(arguments: int) -> None:
        if key:
            _linear(arguments, np.int16(0))

    def linear_q4_1(arguments: int) -> None:
        if key:
            _linear(arguments, np.uint16(0))

    def linear_q8_0(arguments: int) -> None:
        if key:
            _linear(arguments, np.uint8(0))

    def linear_int8(arguments: int) -> None:
        if key:
            _linear(arguments, np.int8(0))

    bodies = {"q4_0": linear_q4_0, "q4_1": linear_q4_1, "q8_0": linear_q8_0, "int8": linear_int8}
    return Kernel(bodies[kind], 9)
