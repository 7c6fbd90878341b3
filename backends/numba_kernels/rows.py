"""Kernels that work row by row: norms, rotary embedding, gated activations. Everything is computed in float32 and rounded once.

Widths are multiples of 16 (the callers fall back to torch otherwise). Strides are in bytes. Invariant: a row's result depends on that row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from backends.numba_kernels.activations import emit_gated
from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    I64,
    LANES,
    VF,
    VH,
    VI,
    Builder,
    Value,
    cgutils,
    constant,
    emit_fma,
    emit_load,
    emit_reduce,
    emit_round_bf16,
    emit_splat,
    emit_store,
    intrinsic,
    is_bfloat16,
    read_float,
    read_int64,
    take_next,
)

ROWS_PER_ITEM = 8


def read_vector(b: Builder, is_bf16: bool, row: Value, index: Value) -> Value:
    """Load 16 elements from `index` on, as float32."""
    if not is_bf16:
        return emit_load(b, b.add(row, b.shl(index, ir.Constant(I64, 2))), VF)
    half = emit_load(b, b.add(row, b.shl(index, ir.Constant(I64, 1))), VH)
    return b.bitcast(b.shl(b.zext(half, VI), ir.Constant(VI, [16] * LANES)), VF)


def _write(b: Builder, is_bf16: bool, row: Value, index: Value, value: Value) -> Value:
    """Round and store 16 elements from `index` on."""
    if is_bf16:
        emit_store(b, emit_round_bf16(b, value), b.add(row, b.shl(index, ir.Constant(I64, 1))))
    else:
        emit_store(b, value, b.add(row, b.shl(index, ir.Constant(I64, 2))))


def vectors_of(b: Builder, count: Value) -> Any:
    """Loop over the starts of `count` elements' vectors."""
    return cgutils.for_range_slice(b, ir.Constant(I64, 0), count, ir.Constant(I64, LANES), intp=I64)


@intrinsic
def _sum_squares(typing_context: Any, tag: Any, row: Any, count: Any) -> Any:
    """Return the sum of squares of a row."""
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, row, count = arguments
        total = cgutils.alloca_once_value(b, constant(0.0))
        with vectors_of(b, count) as (i, _):
            x = read_vector(b, is_bf16, row, i)
            b.store(emit_fma(b, x, x, b.load(total)), total)
        return emit_reduce(b, b.load(total), lambda x, y: b.fadd(x, y))

    return types.float32(tag, types.int64, types.int64), generate


@intrinsic
def _add_row(typing_context: Any, tag: Any, source: Any, target: Any, count: Any) -> Any:
    """target += source, rounded."""
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, source, target, count = arguments
        with vectors_of(b, count) as (i, _):
            _write(
                b, is_bf16, target, i, b.fadd(read_vector(b, is_bf16, source, i), read_vector(b, is_bf16, target, i))
            )
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.int64), generate


@intrinsic
def _weigh(typing_context: Any, tag: Any, source: Any, weight: Any, target: Any, count: Any, factor: Any) -> Any:
    """target = source * factor * weight (float32)."""
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, source, weight, target, count, factor = arguments
        wide = emit_splat(b, factor, VF)
        with vectors_of(b, count) as (i, _):
            x = b.fmul(read_vector(b, is_bf16, source, i), wide)
            _write(b, is_bf16, target, i, b.fmul(x, read_vector(b, False, weight, i)))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 4, types.float32), generate


@intrinsic
def _rotate(typing_context: Any, tag: Any, row: Any, cos: Any, sin: Any, half: Any) -> Any:
    """Rotate the pairs (i, i + half) of a head in place."""
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, row, cos, sin, half = arguments
        with vectors_of(b, half) as (i, _):
            j = b.add(i, half)
            low, high = read_vector(b, is_bf16, row, i), read_vector(b, is_bf16, row, j)
            c, s = read_vector(b, False, cos, i), read_vector(b, False, sin, i)
            _write(b, is_bf16, row, i, b.fsub(b.fmul(low, c), b.fmul(high, s)))
            _write(b, is_bf16, row, j, b.fadd(b.fmul(high, c), b.fmul(low, s)))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 4), generate


@intrinsic
def _activate(typing_context: Any, tag: Any, gate: Any, up: Any, target: Any, count: Any, kind: Any) -> Any:
    """target = activation(gate) * up."""
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, gate, up, target, count, kind = arguments
        with vectors_of(b, count) as (i, _):
            x, factor = read_vector(b, is_bf16, gate, i), read_vector(b, is_bf16, up, i)
            _write(b, is_bf16, target, i, emit_gated(b, x, factor, kind))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 5), generate


@intrinsic
def _scale(typing_context: Any, tag: Any, row: Any, count: Any, factor: Any) -> Any:
    """row *= factor."""
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, row, count, factor = arguments
        wide = emit_splat(b, factor, VF)
        with vectors_of(b, count) as (i, _):
            _write(b, is_bf16, row, i, b.fmul(read_vector(b, is_bf16, row, i), wide))
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.float32), generate


@njit(nogil=True, error_model="numpy")
def _norm(arguments: int, tag: Any) -> None:
    """Arguments: counter, x, x row stride, x head stride, y, y row stride, y head stride, residual (0: none), its row stride, weight, T, H, N, eps."""
    x, x_row, x_head = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    y, y_row, y_head = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    residual, residual_row = read_int64(arguments + 56), read_int64(arguments + 64)
    weight, T, H = read_int64(arguments + 72), read_int64(arguments + 80), read_int64(arguments + 88)
    N, eps = read_int64(arguments + 96), read_float(arguments + 104)
    while True:
        first = take_next(arguments) * ROWS_PER_ITEM
        if first >= T:
            break
        for t in range(first, min(first + ROWS_PER_ITEM, T)):
            for h in range(H):
                source = x + t * x_row + h * x_head
                if residual:
                    _add_row(tag, source, residual + t * residual_row, N)
                    source = residual + t * residual_row
                mean = _sum_squares(tag, source, N) / np.float32(N)
                factor = np.float32(1) / np.sqrt(np.float32(mean + eps))
                _weigh(tag, source, weight, y + t * y_row + h * y_head, N, np.float32(factor))


@njit(nogil=True, error_model="numpy")
def _rotary(arguments: int, tag: Any) -> None:
    """Arguments: counter, q, row stride, head stride, H, k, row stride, head stride, Hkv, cos, row stride, sin, row stride, T, R / 2."""
    q, q_row, q_head, H = (
        read_int64(arguments + 8),
        read_int64(arguments + 16),
        read_int64(arguments + 24),
        read_int64(arguments + 32),
    )
    k, k_row, k_head, Hkv = (
        read_int64(arguments + 40),
        read_int64(arguments + 48),
        read_int64(arguments + 56),
        read_int64(arguments + 64),
    )
    cos, cos_row, sin, sin_row = (
        read_int64(arguments + 72),
        read_int64(arguments + 80),
        read_int64(arguments + 88),
        read_int64(arguments + 96),
    )
    T, half = read_int64(arguments + 104), read_int64(arguments + 112)
    while True:
        first = take_next(arguments) * ROWS_PER_ITEM
        if first >= T:
            break
        for t in range(first, min(first + ROWS_PER_ITEM, T)):
            for h in range(H):
                _rotate(tag, q + t * q_row + h * q_head, cos + t * cos_row, sin + t * sin_row, half)
            for h in range(Hkv):
                _rotate(tag, k + t * k_row + h * k_head, cos + t * cos_row, sin + t * sin_row, half)


@njit(nogil=True, error_model="numpy")
def _gate(arguments: int, tag: Any) -> None:
    """Arguments: counter, gate, row stride, distance of up from gate, y, row stride, T, I, activation."""
    gate, gate_row, up = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    y, y_row, T = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    width, kind = read_int64(arguments + 56), read_int64(arguments + 64)
    while True:
        first = take_next(arguments) * ROWS_PER_ITEM
        if first >= T:
            break
        for t in range(first, min(first + ROWS_PER_ITEM, T)):
            source = gate + t * gate_row
            _activate(tag, source, source + up, y + t * y_row, width, kind)


@njit(nogil=True, error_model="numpy")
def _scale_rows(arguments: int, tag: Any) -> None:
    """Arguments: counter, x, x row stride, T, N, factor."""
    x, x_row, T = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    N, factor = read_int64(arguments + 32), read_float(arguments + 40)
    while True:
        first = take_next(arguments) * ROWS_PER_ITEM
        if first >= T:
            break
        for t in range(first, min(first + ROWS_PER_ITEM, T)):
            _scale(tag, x + t * x_row, N, factor)


@lru_cache(maxsize=2)
def norm_kernel(is_bf16: bool) -> Kernel:
    """Compile the norms for one element type, or load them from the cache."""
    key = source_key()

    def norm_bf16(arguments: int) -> None:
        if key:
            _norm(arguments, np.uint16(0))

    def norm_f32(arguments: int) -> None:
        if key:
            _norm(arguments, np.float32(0))

    return Kernel(norm_bf16 if is_bf16 else norm_f32, 13)


@lru_cache(maxsize=2)
def rotary_kernel(is_bf16: bool) -> Kernel:
    """Compile the rotary embedding for one element type, or load it from the cache."""
    key = source_key()

    def rotary_bf16(arguments: int) -> None:
        if key:
            _rotary(arguments, np.uint16(0))

    def rotary_f32(arguments: int) -> None:
        if key:
            _rotary(arguments, np.float32(0))

    return Kernel(rotary_bf16 if is_bf16 else rotary_f32, 14)


@lru_cache(maxsize=2)
def gate_kernel(is_bf16: bool) -> Kernel:
    """Compile the gated activations for one element type, or load them from the cache."""
    key = source_key()

    def gate_bf16(arguments: int) -> None:
        if key:
            _gate(arguments, np.uint16(0))

    def gate_f32(arguments: int) -> None:
        if key:
            _gate(arguments, np.float32(0))

    return Kernel(gate_bf16 if is_bf16 else gate_f32, 8)


@lru_cache(maxsize=2)
def scale_kernel(is_bf16: bool) -> Kernel:
    """Compile the multiplication by a number for one element type, or load it from the cache."""
    key = source_key()

    def scale_bf16(arguments: int) -> None:
        if key:
            _scale_rows(arguments, np.uint16(0))

    def scale_f32(arguments: int) -> None:
        if key:
            _scale_rows(arguments, np.float32(0))

    return Kernel(scale_bf16 if is_bf16 else scale_f32, 5)
