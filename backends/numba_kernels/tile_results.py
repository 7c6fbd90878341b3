"""What becomes of a tile of float32 sums: factor, bias, activation, one rounding to bfloat16, stored. Knows rows of a tile, not who summed them.

Strides are in bytes. `factor` and `bias` are addresses of as many float32 values as a row of sums has: ones and minus zeros for none.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.activations import emit_gated
from backends.numba_kernels.vectors import (
    I64,
    LANES,
    VF,
    VI,
    Builder,
    Value,
    cgutils,
    emit_at,
    emit_fma,
    emit_load,
    emit_round_bf16,
    emit_store,
    intrinsic,
)


@intrinsic
def write_rows(
    typing_context: Any,
    rows: Any,
    columns: Any,
    source: Any,
    source_stride: Any,
    target: Any,
    target_stride: Any,
    factor: Any,
    bias: Any,
) -> Any:
    """target[r, :] = source[r, :] * factor + bias for `rows` rows of `columns` (1 or 2) vectors of float32, rounded to bfloat16."""
    signature = types.void(*[types.int64] * 8)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        rows, columns, *rest = arguments
        zero = ir.Constant(I64, 0)
        with b.if_else(b.icmp_signed(">", columns, ir.Constant(I64, 1))) as (wide, narrow):
            with wide:
                emit_write_rows(b, 2, zero, rows, *rest)
            with narrow:
                emit_write_rows(b, 1, zero, rows, *rest)
        return context.get_dummy_value()

    return signature, generate


def emit_write_rows(
    b: Builder,
    columns: int,
    first: Value,
    last: Value,
    source: Value,
    source_stride: Value,
    target: Value,
    target_stride: Value,
    factor: Value,
    bias: Value,
) -> None:
    """Do what `write_rows` does, for rows first … last - 1."""
    with cgutils.for_range_slice(b, first, last, ir.Constant(I64, 1), intp=I64) as (row, _):
        at, to = b.add(source, b.mul(row, source_stride)), b.add(target, b.mul(row, target_stride))
        for n in range(columns):
            emit_store(b, _emit_result(b, n, at, factor, bias), emit_at(b, to, 32 * n))


@intrinsic
def write_gated_rows(
    typing_context: Any,
    activation: Any,
    rows: Any,
    source: Any,
    source_stride: Any,
    target: Any,
    target_stride: Any,
    factor: Any,
    bias: Any,
) -> Any:
    """target[r, i] = activation(source[r, i]) * source[r, 16 + i] for `rows` rows and 16 values of i, both with factor and bias.

    The sums are rounded to bfloat16 first, as they are where a product and an activation come one after the other.
    """
    signature = types.void(*[types.int64] * 8)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        activation, rows, *rest = arguments
        emit_write_gated_rows(b, activation, ir.Constant(I64, 0), rows, *rest)
        return context.get_dummy_value()

    return signature, generate


def emit_write_gated_rows(
    b: Builder,
    activation: Value,
    first: Value,
    last: Value,
    source: Value,
    source_stride: Value,
    target: Value,
    target_stride: Value,
    factor: Value,
    bias: Value,
) -> None:
    """Do what `write_gated_rows` does, for rows first … last - 1."""
    with cgutils.for_range_slice(b, first, last, ir.Constant(I64, 1), intp=I64) as (row, _):
        at, to = b.add(source, b.mul(row, source_stride)), b.add(target, b.mul(row, target_stride))
        gate, up = (_emit_widened(b, _emit_result(b, n, at, factor, bias)) for n in range(2))
        emit_store(b, emit_round_bf16(b, emit_gated(b, gate, up, activation)), to)


def _emit_result(b: Builder, n: int, sums: Value, factor: Value, bias: Value) -> Value:
    """Return vector n of a row: 16 bfloat16."""
    total, scale, shift = (emit_load(b, emit_at(b, at, 64 * n), VF) for at in (sums, factor, bias))
    return emit_round_bf16(b, emit_fma(b, total, scale, shift))


def _emit_widened(b: Builder, halves: Value) -> Value:
    return b.bitcast(b.shl(b.zext(halves, VI), ir.Constant(VI, [16] * LANES)), VF)
