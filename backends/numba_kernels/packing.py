"""Rearranges a bfloat16 weight into the panels that `linear` multiplies by: two passes over memory instead of a strided copy's many.

A panel's layout stands in `linear`. Arguments: counter, weight, weight row stride, packed, N, K/2, distance. One item is a panel. With a
distance that is not 0, panel p takes rows 16 p … 16 p + 15 and those `distance` rows further: a gate and what it gates.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.linear import PANEL
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import LANES, copy_bytes, read_int64, take_next, transpose_words


@njit(nogil=True, error_model="numpy")
def _pack(arguments: int) -> None:
    weight, stride, packed = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    N, words, distance = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    num_panels = (N + PANEL - 1) // PANEL
    sources = np.empty(LANES, np.int64)
    while True:
        panel = take_next(arguments)
        if panel >= num_panels:
            break
        column = panel * PANEL
        width = min(PANEL, N - column)
        target = packed + column * words * 4
        for first in range(0, width, LANES):
            row = column + first
            if distance:
                row = panel * LANES + (distance if first else 0)
            for lane in range(LANES):
                sources[lane] = weight + (row + lane) * stride
            word = 0
            for size in (LANES, LANES // 2):
                while word + size <= words:
                    where = target + (word * width + first) * 4
                    transpose_words(sources.ctypes.data, word * 4, size, where, width * 4)
                    word += size
            for rest in range(word, words):
                for lane in range(LANES):
                    copy_bytes(target + (rest * width + first + lane) * 4, sources[lane] + rest * 4, 4)


@lru_cache(maxsize=1)
def pack_kernel() -> Kernel:
    """Compile the kernel, or load it from the cache."""
    key = source_key()

    def pack_bf16(arguments: int) -> None:
        if key:
            _pack(arguments)

    return Kernel(pack_bf16, 6)
