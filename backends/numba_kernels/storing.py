"""Writes new keys and values into their slots, as they are or quantised. Knows addresses and strides; the slots are the plan's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.parts import NUM_TOKENS, SLOTS
from backends.numba_kernels.quantised import FP8, INT8, quantise_row
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import copy_bytes, read_int64, take_next, write_float


@njit(nogil=True, error_model="numpy")
def _store(arguments: int) -> None:
    """Copy keys and values into their slots. One item: 16 tokens.

    Arguments: counter, k, k row stride, k head stride, v, v row stride, v head stride, cache, block stride, value offset, head stride,
    slot stride, plan header, Hkv, B, bytes of a head's row.
    """
    k, k_row, k_head = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    v, v_row, v_head = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    cache, block_stride = read_int64(arguments + 56), read_int64(arguments + 64)
    value_offset, head_stride, slot_stride = (
        read_int64(arguments + 72),
        read_int64(arguments + 80),
        read_int64(arguments + 88),
    )
    header, Hkv = read_int64(arguments + 96), read_int64(arguments + 104)
    B, length = read_int64(arguments + 112), read_int64(arguments + 120)
    slots, T = read_int64(header + SLOTS), read_int64(header + NUM_TOKENS)
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
    header, Hkv = read_int64(arguments + 96), read_int64(arguments + 104)
    B, D = read_int64(arguments + 112), read_int64(arguments + 120)
    scales, scale_block_stride = read_int64(arguments + 128), read_int64(arguments + 136)
    scale_value_offset, scale_head_stride = read_int64(arguments + 144), read_int64(arguments + 152)
    slots, T = read_int64(header + SLOTS), read_int64(header + NUM_TOKENS)
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
    return Kernel(bodies[elements][is_bf16], 19)


@lru_cache(maxsize=1)
def store_kernel() -> Kernel:
    """Compile the writing of keys and values, or load it from the cache."""
    key = source_key()

    def store_rows(arguments: int) -> None:
        if key:
            _store(arguments)

    return Kernel(store_rows, 15)
