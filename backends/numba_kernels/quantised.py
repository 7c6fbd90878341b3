"""Rows of 8-bit elements with a scale: reading them as the kernels' types, and quantising new ones. `backends.kv_cache` is the definition.

A `kind` argument selects the elements at compile time: an int8 stands for int8, a uint8 for float8 e4m3fn, anything else for a pool that is
not quantised. Every element of either type is exact in bfloat16, so that products with it lose nothing before the scale is applied.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.vectors import (
    F32,
    HAS_BF16_DOT,
    I64,
    LANES,
    VF,
    VH,
    VI,
    Builder,
    Value,
    cgutils,
    constant,
    emit_load,
    emit_reduce,
    emit_round_pair,
    emit_splat,
    emit_store,
    has_scales,
    intrinsic,
    is_bfloat16,
)

_VB = ir.VectorType(ir.IntType(8), LANES)
_ROUND = 1.5 * 2**23  # adding it leaves the nearest integer, ties to even, in the low bits of a float32
INT8_LIMIT, FP8_LIMIT = 127.0, 448.0
# Elements of a pool, as the kernels name them.
PLAIN, INT8, FP8 = "", "int8", "fp8"


def is_int8(kind: Any) -> bool:
    return bool(kind == types.int8)


def _integers(value: int) -> Value:
    return ir.Constant(VI, [value] * LANES)


@intrinsic
def is_quantised(typing_context: Any, kind: Any) -> Any:
    """Say whether `kind` has scales, as a constant that folds away the branch it decides."""
    answer = has_scales(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        return ir.Constant(ir.IntType(1), int(answer))

    return types.boolean(kind), generate


@intrinsic
def widen_row(typing_context: Any, tag: Any, kind: Any, source: Any, target: Any, count: Any) -> Any:
    """Write `count` 8-bit elements (a multiple of 16) in the type of `tag`; nothing is lost and no scale is applied."""
    is_bf16 = is_bfloat16(tag)
    reads_int8 = is_int8(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, _, source, target, count = arguments
        step = LANES
        if is_bf16 and HAS_BF16_DOT:
            step = 2 * LANES  # by one instruction, which is exact here
            with cgutils.for_range_slice(b, I64(0), b.and_(count, I64(-step)), I64(step), intp=I64) as (i, _):
                low, high = (emit_widen(b, reads_int8, b.add(source, b.add(i, I64(at)))) for at in (0, LANES))
                emit_store(b, emit_round_pair(b, low, high), b.add(target, b.shl(i, I64(1))))
        rest = I64(0) if step == LANES else b.and_(count, I64(-step))
        with cgutils.for_range_slice(b, rest, count, I64(LANES), intp=I64) as (i, _):
            x = emit_widen(b, reads_int8, b.add(source, i))
            if is_bf16:
                half = b.trunc(b.lshr(b.bitcast(x, VI), _integers(16)), VH)
                emit_store(b, half, b.add(target, b.shl(i, I64(1))))
            else:
                emit_store(b, x, b.add(target, b.shl(i, I64(2))))
        return context.get_dummy_value()

    return types.void(tag, kind, types.int64, types.int64, types.int64), generate


def emit_widen(b: Builder, is_int8: bool, address: Value) -> Value:
    """Load 16 elements as float32."""
    element = emit_load(b, address, _VB)
    return b.sitofp(b.sext(element, VI), VF) if is_int8 else _widen_fp8(b, element)


def _widen_fp8(b: Builder, element: Value) -> Value:
    """float8 e4m3fn → float32. The two codes of NaN read as ±480: a row with a NaN has a scale of NaN, which says it."""
    code = b.zext(element, VI)
    magnitude = b.and_(code, _integers(0x7F))
    sign = b.shl(b.and_(code, _integers(0x80)), _integers(24))
    normal = b.add(b.shl(magnitude, _integers(20)), _integers(120 << 23))
    # Exponent 0: mantissa * 2**-9, by a conversion; float32 denormals would cost a microcode assist each.
    small = b.fmul(b.sitofp(magnitude, VF), constant(2.0**-9))
    bits = b.select(b.icmp_signed("<", magnitude, _integers(8)), b.bitcast(small, VI), normal)
    return b.bitcast(b.or_(bits, sign), VF)


@intrinsic
def quantise_row(typing_context: Any, tag: Any, kind: Any, source: Any, target: Any, count: Any) -> Any:
    """Write `count` numbers of the type of `tag` (a multiple of 16) as elements of `kind`; returns the row's scale.

    A number that is not finite makes the scale NaN or infinite.
    """
    is_bf16 = is_bfloat16(tag)
    writes_int8 = is_int8(kind)
    limit = INT8_LIMIT if writes_int8 else FP8_LIMIT

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, _, source, target, count = arguments
        zero, step = ir.Constant(I64, 0), ir.Constant(I64, LANES)

        def read(i: Value) -> Value:
            if not is_bf16:
                return emit_load(b, b.add(source, b.shl(i, ir.Constant(I64, 2))), VF)
            half = emit_load(b, b.add(source, b.shl(i, ir.Constant(I64, 1))), VH)
            return b.bitcast(b.shl(b.zext(half, VI), _integers(16)), VF)

        # Magnitudes are compared as integers, where the order is that of the numbers and a NaN is above infinity.
        best = cgutils.alloca_once_value(b, _integers(0))
        with cgutils.for_range_slice(b, zero, count, step, intp=I64) as (i, _):
            magnitude = b.and_(b.bitcast(read(i), VI), _integers(0x7FFFFFFF))
            kept = b.load(best)
            b.store(b.select(b.icmp_signed(">", magnitude, kept), magnitude, kept), best)
        highest = emit_reduce(b, b.load(best), lambda x, y: b.select(b.icmp_signed(">", x, y), x, y))
        scale = b.fdiv(b.bitcast(highest, F32), ir.Constant(F32, limit))
        is_zero = b.fcmp_ordered("==", scale, ir.Constant(F32, 0.0))
        divisor = emit_splat(b, b.select(is_zero, ir.Constant(F32, 1.0), scale), VF)
        with cgutils.for_range_slice(b, zero, count, step, intp=I64) as (i, _):
            x = b.fdiv(read(i), divisor)
            # A scale that is a float32 denormal is coarse, and the quotient may pass the limit.
            x = b.select(b.fcmp_ordered(">", x, constant(limit)), constant(limit), x)
            x = b.select(b.fcmp_ordered("<", x, constant(-limit)), constant(-limit), x)
            code = b.bitcast(b.fadd(x, constant(_ROUND)), VI) if writes_int8 else _narrow_fp8(b, x)
            emit_store(b, b.trunc(code, _VB), b.add(target, i))
        return scale

    return types.float32(tag, kind, types.int64, types.int64, types.int64), generate


def _narrow_fp8(b: Builder, x: Value) -> Value:
    """float32 of at most 448 in magnitude → the codes of float8 e4m3fn, ties to even."""
    bits = b.bitcast(x, VI)
    sign = b.lshr(b.and_(bits, ir.Constant(VI, [0x80000000] * LANES)), _integers(24))
    magnitude = b.and_(bits, _integers(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, _integers(20)), _integers(1))
    normal = b.sub(b.lshr(b.add(magnitude, b.add(odd, _integers(0x7FFFF))), _integers(20)), _integers(120 << 3))
    # Below 2**-6 the steps are 2**-9 wide; 8 of them round up to the code of 2**-6 itself.
    steps = b.fadd(b.fmul(b.bitcast(magnitude, VF), constant(2.0**9)), constant(_ROUND))
    small = b.and_(b.bitcast(steps, VI), _integers(0xF))
    code = b.select(b.icmp_signed("<", magnitude, _integers(121 << 23)), small, normal)
    return b.or_(code, sign)
