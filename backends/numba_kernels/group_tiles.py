"""Products of `groups` on matrix tiles: a tile of up to 16 rows of x meets one group of a strip at a time, and the sums leave as int32.

The integers are exact and what follows them is `emit_group_end`, so the results are those of `multiply_strip`, bit for bit. Only for
processes to which `matrix_tiles.has_matrix_tiles` says yes. Registers: 0 the sums, 1 codes of x (rows × a group), 2 codes of the strip.
The sums of a group are computed while those of the group before it are scaled, from two areas of 1 KiB in turn.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.group_kinds import SIDE_BYTES, Kind, kind_of
from backends.numba_kernels.groups import HAS_TILES, emit_codes, emit_fetch_ahead, emit_group_end, emit_strip_end
from backends.numba_kernels.matrix_tiles import I8, TILE_ROWS
from backends.numba_kernels.vectors import (
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Builder,
    Value,
    cgutils,
    constant,
    emit_at,
    emit_load,
    emit_splat,
    emit_store,
    get_function,
    intrinsic,
)

SUMS_BYTES = 2 * TILE_ROWS * 4 * LANES
_SUMS, _X, _STRIP = range(3)  # registers


def _call(b: Builder, name: str, *arguments: Value) -> None:
    """Call an instruction for tiles; a Python number is a register, anything else is passed on."""
    if not HAS_TILES:
        return  # nobody runs this; it must only compile
    operands = [ir.Constant(I8, argument) if isinstance(argument, int) else argument for argument in arguments]
    b.call(get_function(b, f"llvm.x86.{name}", ir.VoidType(), [operand.type for operand in operands]), operands)


def _pointer(b: Builder, address: Value) -> Value:
    return b.inttoptr(address, I8.as_pointer())


@intrinsic
def configure_group_tiles(typing_context: Any, kind: Any, buffer: Any, rows: Any) -> Any:
    """Set the calling thread's tiles up for `rows` ≤ 16 rows of x; `buffer` is the address of `CONFIGURATION_BYTES` bytes to write to."""
    group = kind_of(kind).group

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, buffer, rows = arguments
        for word in range(8):
            emit_store(b, ir.Constant(I64, int(word == 0)), emit_at(b, buffer, 8 * word))  # palette 1
        # From byte 16 on, the bytes of a row (16 bits for each tile); from byte 48 on, the rows (8 bits for each).
        for tile, width in ((_SUMS, 4 * LANES), (_X, group), (_STRIP, 4 * LANES)):
            emit_store(b, ir.Constant(I16, width), emit_at(b, buffer, 16 + 2 * tile))
        for tile, count in ((_SUMS, rows), (_X, rows), (_STRIP, ir.Constant(I64, group // 4))):
            emit_store(b, b.trunc(count, I8), emit_at(b, buffer, 48 + tile))
        _call(b, "ldtilecfg", _pointer(b, buffer))
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), generate


@intrinsic
def spread_strip(typing_context: Any, kind: Any, strip: Any, groups: Any, target: Any) -> Any:
    """Write a strip's 4-bit codes as bytes, `group` * 16 for each group."""
    facts = kind_of(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, strip, groups, target = arguments
        lines = facts.code_bytes // 64
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), groups, ir.Constant(I64, 1), intp=I64) as (g, _):
            source = b.add(strip, b.mul(g, ir.Constant(I64, facts.group_bytes)))
            where = b.add(target, b.mul(g, ir.Constant(I64, facts.group * LANES)))
            for line in range(lines):
                word = emit_load(b, emit_at(b, source, 64 * line), VI)
                for part, codes in enumerate(emit_codes(b, facts, word)):
                    emit_store(b, codes, emit_at(b, where, 64 * (line + lines * part)))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), generate


@intrinsic
def multiply_strip_tiles(
    typing_context: Any,
    kind: Any,
    rows: Any,
    codes: Any,
    codes_stride: Any,
    sides: Any,
    sides_stride: Any,
    strip: Any,
    spread: Any,
    groups: Any,
    bias: Any,
    sums: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """As `groups.multiply_strip`, for `rows` ≤ 16 of the rows last configured; all of those must be readable.

    `spread`: where `spread_strip` put the codes, the strip itself for 8-bit kinds. `sums`: the address of SUMS_BYTES bytes to work in.
    """
    facts = kind_of(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, rows, *operands = arguments
        is_short = b.icmp_signed("<=", rows, ir.Constant(I64, TILE_ROWS // 2))
        with b.if_else(is_short) as (short, full):
            with short:
                _emit_strip(b, facts, TILE_ROWS // 2, rows, *operands)
            with full:
                _emit_strip(b, facts, TILE_ROWS, rows, *operands)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 12), generate


def _emit_strip(
    b: Builder,
    facts: Kind,
    height: int,
    rows: Value,
    codes: Value,
    codes_stride: Value,
    sides: Value,
    sides_stride: Value,
    strip: Value,
    spread: Value,
    groups: Value,
    bias: Value,
    sums: Value,
    y: Value,
    y_stride: Value,
) -> None:
    """Multiply; `height` rows are scaled, and `rows` of them written."""
    spread_bytes = facts.group * LANES if facts.bits == 4 else facts.group_bytes
    area = TILE_ROWS * 4 * LANES

    def number(value: int) -> Value:
        return ir.Constant(I64, value)

    def place(g: Value) -> Value:
        return b.add(sums, b.mul(b.and_(g, number(1)), number(area)))

    def multiply(g: Value) -> None:
        _call(b, "tilezero", _SUMS)
        _call(b, "tileloadd64", _X, _pointer(b, b.add(codes, b.mul(g, number(facts.group)))), codes_stride)
        _call(b, "tileloadd64", _STRIP, _pointer(b, b.add(spread, b.mul(g, number(spread_bytes)))), number(64))
        _call(b, "tdpbssd", _SUMS, _X, _STRIP)
        _call(b, "tilestored64", _SUMS, _pointer(b, place(g)), number(64))

    multiply(number(0))
    before, head = b.block, b.append_basic_block("group")
    body, done = b.append_basic_block("group.body"), b.append_basic_block("group.done")
    b.branch(head)
    b.position_at_end(head)
    g, here = b.phi(I64), b.phi(I64)
    totals = [b.phi(VF) for _ in range(height)]
    g.add_incoming(number(0), before)
    here.add_incoming(strip, before)
    for total in totals:
        total.add_incoming(constant(0.0), before)
    b.cbranch(b.icmp_signed("<", g, groups), body, done)

    b.position_at_end(body)
    following = b.add(g, number(1))
    with b.if_then(b.icmp_signed("<", following, groups), likely=True):
        multiply(following)
    emit_fetch_ahead(b, facts, here)
    side = b.add(sides, b.mul(g, number(SIDE_BYTES)))
    side_at = [side]
    for _ in range(height - 1):
        side_at.append(b.add(side_at[-1], sides_stride))
    integers = [emit_load(b, emit_at(b, place(g), 4 * LANES * r), VI) for r in range(height)]
    if facts.offset:
        starts = [emit_splat(b, emit_load(b, emit_at(b, address, 4), I32), VI) for address in side_at]
        integers = [b.add(whole, start) for whole, start in zip(integers, starts, strict=True)]
    for total, added in zip(totals, emit_group_end(b, facts, here, side_at, integers, totals), strict=True):
        total.add_incoming(added, b.block)
    g.add_incoming(following, b.block)
    here.add_incoming(emit_at(b, here, facts.group_bytes), b.block)
    b.branch(head)

    b.position_at_end(done)
    emit_strip_end(b, facts, here, totals, bias, y, y_stride, rows)
