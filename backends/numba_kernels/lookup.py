"""Kernels that copy rows of a table by their numbers: embeddings and rotations. Nothing is computed; strides and sizes are in bytes.

Invariant: nothing outside the table is read: for a number that the table does not have, every byte becomes 255, which is NaN in any float.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.linear import PANEL
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import copy_bytes, read_float, read_int64, take_next, write_float

ROWS_PER_ITEM = 8
_NO_NUMBER = np.array([0xFFFFFFFF], np.uint32).view(np.float32)[0]


@njit(nogil=True, error_model="numpy")
def _copy_rows(arguments: int) -> None:
    """Arguments: counter, ids (int64), T, table, its row stride, its rows, out, its row stride, bytes of a row (a multiple of 4)."""
    ids, T = read_int64(arguments + 8), read_int64(arguments + 16)
    table, stride, num_rows = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    out, out_stride, length = read_int64(arguments + 48), read_int64(arguments + 56), read_int64(arguments + 64)
    while True:
        first = take_next(arguments) * ROWS_PER_ITEM
        if first >= T:
            break
        for t in range(first, min(first + ROWS_PER_ITEM, T)):
            row = read_int64(ids + t * 8)
            if 0 <= row < num_rows:
                copy_bytes(out + t * out_stride, table + row * stride, length)
            else:
                fill_with_nan(out + t * out_stride, length)


@njit(nogil=True, error_model="numpy")
def fill_with_nan(target: int, length: int) -> None:
    """Set `length` bytes, a multiple of 4, to 255."""
    for i in range(0, length, 4):
        write_float(target + i, _NO_NUMBER)


@njit(nogil=True, error_model="numpy")
def _copy_panel_rows(arguments: int) -> None:
    """Rows of a weight in panels (see `linear`). Arguments: counter, ids (int64), T, packed, N, K / 2, out, its row stride."""
    ids, T = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, N, steps = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    out, out_stride = read_int64(arguments + 48), read_int64(arguments + 56)
    while True:
        first = take_next(arguments) * ROWS_PER_ITEM
        if first >= T:
            break
        for t in range(first, min(first + ROWS_PER_ITEM, T)):
            row = read_int64(ids + t * 8)
            if not 0 <= row < N:
                fill_with_nan(out + t * out_stride, steps * 4)
                continue
            column = row // PANEL * PANEL
            width = min(PANEL, N - column)
            source = packed + (column * steps + row - column) * 4
            for step in range(steps):  # a word is two bfloat16; as a float32 it is only carried over
                write_float(out + t * out_stride + step * 4, read_float(source + step * width * 4))


@lru_cache(maxsize=1)
def copy_rows_kernel() -> Kernel:
    """Compile the look-up in a plain table, or load it from the cache."""
    key = source_key()

    def copy_rows(arguments: int) -> None:
        if key:
            _copy_rows(arguments)

    return Kernel(copy_rows, 8)


@lru_cache(maxsize=1)
def copy_panel_rows_kernel() -> Kernel:
    """Compile the look-up in a packed weight, or load it from the cache."""
    key = source_key()

    def copy_panel_rows(arguments: int) -> None:
        if key:
            _copy_panel_rows(arguments)

    return Kernel(copy_panel_rows, 7)
