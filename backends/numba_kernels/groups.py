"""Products of integer weights with rows that are quantised on the spot, group by group of the inner dimension.

    y[n] = Σ over groups g of  x_scale[g] * (d[n, g] * Σ code[n, k] * x_code[k]  +  m[n, g] * Σ x_code[k])

The inner sums are of integers and therefore exact in any order and on any instructions; the outer one runs over the groups in turn. So a
row's result is the same, bit for bit, whatever computes it and whatever rows stand beside it.

Strips are those of `group_kinds`. A row of x becomes its codes (int8, the largest magnitude of a group is 127) and, for each group,
8 bytes of *side*: the scale and what the kind needs of the sum of the codes.
Invariant: a NaN or an infinity in a group of x gives a scale that is one, and shows in the result.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from backends.numba_kernels.group_kinds import SIDE_BYTES, Kind, kind_of
from backends.numba_kernels.matrix_tiles import LINE_BYTES
from backends.numba_kernels.vectors import (
    F32,
    FEATURES,
    HAS_WIDE,
    I32,
    I64,
    LANES,
    VF,
    VH,
    VI,
    Builder,
    Value,
    cgutils,
    constant,
    emit_at,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_reduce,
    emit_round_bf16,
    emit_splat,
    emit_store,
    get_function,
    intrinsic,
)

_TAKES_BYTES = llvm.llvm_version_info[0] >= 22  # LLVM changed the instruction's types
HAS_BYTE_DOT = "avx512vnni" in FEATURES and HAS_WIDE
HAS_HALF = bool({"f16c", "avx512f", "neon"} & FEATURES)
# Two sums of 16 for each row stay in registers.
MAX_STRIP_ROWS = 8 if HAS_WIDE else 2
AHEAD = 2048  # bytes; of 1, 2, 4 and 8 KiB the one that was faster than none in every comparison
_MAGIC = 1.5 * 2**23  # adding it leaves the nearest integer, ties to even, in the low bits of a float32
_MAGIC_BITS = 0x4B40_0000
_SMALLEST = 1e-30  # below it a group of x counts as zero: its reciprocal would overflow
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_DOT_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)


def _integers(value: int) -> Value:
    return ir.Constant(VI, [value] * LANES)


@intrinsic
def quantise_groups(typing_context: Any, kind: Any, source: Any, codes: Any, sides: Any, groups: Any) -> Any:
    """Turn `groups` groups of bfloat16 numbers at `source` into codes and sides."""
    facts = kind_of(kind)
    vectors = facts.group // LANES
    # Eight-bit codes are multiplied as code + 128 (see `emit_codes`), and the excess is taken off here.
    offset = 128 if facts.bits == 8 and HAS_BYTE_DOT else facts.offset

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, source, codes, sides, groups = arguments
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), groups, ir.Constant(I64, 1), intp=I64) as (g, _):
            first = b.mul(g, ir.Constant(I64, facts.group))
            words = []
            for v in range(vectors):
                at = emit_at(b, b.add(source, b.shl(first, ir.Constant(I64, 1))), 2 * LANES * v)
                words.append(b.shl(b.zext(emit_load(b, at, VH), VI), _integers(16)))
            # Magnitudes are compared as integers, where the order is that of the numbers and a NaN is above infinity.
            highest = _integers(0)
            for word in words:
                magnitude = b.and_(word, _integers(0x7FFF_FFFF))
                highest = b.select(b.icmp_signed(">", magnitude, highest), magnitude, highest)
            top = b.bitcast(emit_reduce(b, highest, lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)), F32)
            is_nothing = b.fcmp_ordered("<", top, ir.Constant(F32, _SMALLEST))
            limit, none = ir.Constant(F32, 127.0), ir.Constant(F32, 0.0)
            scale = b.select(is_nothing, none, b.fmul(top, ir.Constant(F32, 1 / 127)))
            inverse = emit_splat(b, b.select(is_nothing, none, b.fdiv(limit, top)), VF)
            total = _integers(0)
            for v, word in enumerate(words):
                code = b.bitcast(emit_fma(b, b.bitcast(word, VF), inverse, constant(_MAGIC)), VI)
                emit_store(b, b.trunc(code, _BYTES), emit_at(b, b.add(codes, first), LANES * v))
                total = b.add(total, b.sub(code, _integers(_MAGIC_BITS)))
            side = b.add(sides, b.mul(g, ir.Constant(I64, SIDE_BYTES)))
            emit_store(b, scale, side)
            if facts.has_minima or offset:
                of_codes = emit_reduce(b, total, lambda x, y: b.add(x, y))
                if facts.has_minima:
                    emit_store(b, b.fmul(scale, b.sitofp(of_codes, F32)), emit_at(b, side, 4))
                else:
                    emit_store(b, b.mul(of_codes, ir.Constant(I32, -offset)), emit_at(b, side, 4))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), generate


def _emit_dot(b: Builder, total: Value, codes: Value, x: Value) -> Value:
    """Add the products of 4 codes (unsigned bytes where there is an instruction for it, else signed) with 4 signed bytes of x, in each lane."""
    if HAS_BYTE_DOT:
        name = "llvm.x86.avx512.vpdpbusd.512"
        if _TAKES_BYTES:
            dot = get_function(b, name, VI, [VI, _DOT_BYTES, _DOT_BYTES])
            return b.call(dot, [total, b.bitcast(codes, _DOT_BYTES), b.bitcast(x, _DOT_BYTES)])
        return b.call(get_function(b, name, VI, [VI, VI, VI]), [total, codes, x])
    for byte in range(4):
        up = _integers(24 - 8 * byte)
        parts = [b.ashr(b.shl(word, up) if byte < 3 else word, _integers(24)) for word in (codes, x)]
        total = b.add(total, b.mul(*parts))
    return total


def emit_codes(b: Builder, facts: Kind, word: Value) -> list[Value]:
    """Spread the codes of a row of words to bytes that `_emit_dot` takes."""
    if facts.bits == 4:
        low = _integers(0x0F0F_0F0F)
        return [b.and_(word, low), b.and_(b.lshr(word, _integers(4)), low)]
    return [b.xor(word, _integers(0x8080_8080))] if HAS_BYTE_DOT else [word]


def emit_halves(b: Builder, address: Value) -> Value:
    """Load 16 float16 as float32."""
    return emit_widen_halves(b, emit_load(b, address, VH))


def emit_widen_halves(b: Builder, halves: Value) -> Value:
    """Turn the bits of 16 float16 into float32."""
    if HAS_HALF:
        return b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), VF)
    bits = b.zext(halves, VI)
    magnitude = b.shl(b.and_(bits, _integers(0x7FFF)), _integers(13))
    number = b.bitcast(b.fmul(b.bitcast(magnitude, VF), constant(2.0**112)), VI)
    # An exponent of ones stays one.
    number = b.select(
        b.icmp_signed(">=", magnitude, _integers(0x7C00 << 13)), b.or_(magnitude, _integers(0x7F80_0000)), number
    )
    return b.bitcast(b.or_(number, b.shl(b.and_(bits, _integers(0x8000)), _integers(16))), VF)


@intrinsic
def multiply_strip(
    typing_context: Any,
    kind: Any,
    rows: Any,
    codes: Any,
    codes_stride: Any,
    sides: Any,
    sides_stride: Any,
    strip: Any,
    groups: Any,
    bias: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """y[r, 0 … 15] = the strip times row r of x, plus bias, in bfloat16; for `rows` ≤ MAX_STRIP_ROWS rows. Strides in bytes.

    `bias`: the address of 16 float32, zeros for none.
    """
    facts = kind_of(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, rows, *operands = arguments
        end = b.append_basic_block("strip.end")
        switch = b.switch(rows, end)
        for count in range(1, MAX_STRIP_ROWS + 1):
            block = b.append_basic_block(f"strip.{count}")
            switch.add_case(ir.Constant(I64, count), block)
            b.position_at_end(block)
            _emit_strip(b, facts, count, *operands)
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 10), generate


def _emit_strip(
    b: Builder,
    facts: Kind,
    rows: int,
    codes: Value,
    codes_stride: Value,
    sides: Value,
    sides_stride: Value,
    strip: Value,
    groups: Value,
    bias: Value,
    y: Value,
    y_stride: Value,
) -> None:
    def at_rows(base: Value, stride: Value) -> list[Value]:
        addresses = [base]
        for _ in range(rows - 1):
            addresses.append(b.add(addresses[-1], stride))
        return addresses

    codes_at, sides_at = at_rows(codes, codes_stride), at_rows(sides, sides_stride)
    before, head = b.block, b.append_basic_block("group")
    body, done = b.append_basic_block("group.body"), b.append_basic_block("group.done")
    b.branch(head)
    b.position_at_end(head)
    g, here = b.phi(I64), b.phi(I64)
    totals = [b.phi(VF) for _ in range(rows)]
    g.add_incoming(ir.Constant(I64, 0), before)
    here.add_incoming(strip, before)
    for total in totals:
        total.add_incoming(constant(0.0), before)
    b.cbranch(b.icmp_signed("<", g, groups), body, done)

    b.position_at_end(body)
    emit_fetch_ahead(b, facts, here)
    first, side = b.mul(g, ir.Constant(I64, facts.group)), b.mul(g, ir.Constant(I64, SIDE_BYTES))
    x_at = [b.add(address, first) for address in codes_at]
    side_at = [b.add(address, side) for address in sides_at]
    has_start = not facts.has_minima and (facts.offset or (facts.bits == 8 and HAS_BYTE_DOT))
    sums = [
        emit_splat(b, emit_load(b, emit_at(b, address, 4), I32), VI) if has_start else _integers(0)
        for address in side_at
    ]
    for line in range(facts.code_bytes // 64):
        word = emit_load(b, emit_at(b, here, 64 * line), VI)
        for part, spread in enumerate(emit_codes(b, facts, word)):
            for r in range(rows):
                x = emit_splat(b, emit_load(b, emit_at(b, x_at[r], 4 * line + 16 * part), I32), VI)
                sums[r] = _emit_dot(b, sums[r], spread, x)
    for total, added in zip(totals, emit_group_end(b, facts, here, side_at, sums, totals), strict=True):
        total.add_incoming(added, b.block)
    g.add_incoming(b.add(g, ir.Constant(I64, 1)), b.block)
    here.add_incoming(emit_at(b, here, facts.group_bytes), b.block)

    b.branch(head)
    b.position_at_end(done)
    emit_strip_end(b, facts, here, totals, bias, y, y_stride)


def emit_fetch_ahead(b: Builder, facts: Kind, here: Value) -> None:
    """Ask for what stands AHEAD bytes further on, as much as a group: processors' own prefetching stops at the end of a page."""
    for line in range(-(-facts.group_bytes // LINE_BYTES)):
        emit_prefetch(b, emit_at(b, here, AHEAD + LINE_BYTES * line))


def emit_group_end(
    b: Builder, facts: Kind, here: Value, sides: list[Value], sums: list[Value], totals: list[Value]
) -> list[Value]:
    """Add a group's integer sums, scaled, to the totals, in this one order of operations."""
    added: list[Value] = []
    d = emit_halves(b, emit_at(b, here, facts.code_bytes)) if facts.has_scales else None
    m = emit_halves(b, emit_at(b, here, facts.code_bytes + 2 * LANES)) if facts.has_minima else None
    for side, integers, total in zip(sides, sums, totals, strict=True):
        scale = emit_splat(b, emit_load(b, side, F32), VF)
        result = emit_fma(b, b.sitofp(integers, VF), scale if d is None else b.fmul(d, scale), total)
        if m is not None:
            result = emit_fma(b, m, emit_splat(b, emit_load(b, emit_at(b, side, 4), F32), VF), result)
        added.append(result)
    return added


def emit_strip_end(
    b: Builder, facts: Kind, end: Value, totals: list[Value], bias: Value, y: Value, y_stride: Value
) -> None:
    """Scale by output where the kind does, add the bias, round and store."""
    shift = emit_load(b, bias, VF)
    scale = None if facts.has_scales else emit_load(b, end, VF)
    for total in totals:
        emit_store(
            b, emit_round_bf16(b, b.fadd(total, shift) if scale is None else emit_fma(b, total, scale, shift)), y
        )
        y = b.add(y, y_stride)
