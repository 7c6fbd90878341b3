"""Laying keys and values out as matrix tiles take them: pairs of values, and 8-bit elements widened on the way. Knows buffers, no blocks.

A *group* is 16 tokens of one kv head, which lie in one block. Its values become 8 rows of words, a word being the same column of two
neighbouring tokens; keys are tiles as they lie, unless they have 8 bits. Every 8-bit element is exact in bfloat16, so widening rounds nothing.

Invariant: of a group only the tokens that were written are read.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.quantised import emit_widen, is_int8
from backends.numba_kernels.vectors import (
    FEATURES,
    HAS_WIDE,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Builder,
    Value,
    cgutils,
    emit_at,
    emit_load,
    emit_prefetch,
    emit_round_pair,
    emit_store,
    get_function,
    intrinsic,
)

# Bytes of float8 are looked up in tables of 128 where the processor can: half the time of a conversion.
HAS_BYTE_TABLES = "avx512vbmi" in FEATURES and HAS_WIDE
_TABLED = 64  # elements that are looked up at once
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES, _QUADS = ir.VectorType(ir.IntType(8), _TABLED), ir.VectorType(I64, _TABLED // 8)


@intrinsic
def pair_values(
    typing_context: Any, source: Any, stride: Any, written: Any, target: Any, count: Any, following: Any
) -> Any:
    """Interleave 16 rows of `count` bfloat16 (a multiple of 32), two by two, into 8 rows of words; within each 128 bits, see `order_columns`.

    Only the first `written` rows are read; the last of them stands for the others, because zero times NaN is NaN. `following`: memory to
    ask for, half as much as is read.
    """
    low = [8 * (i // 8) + i % 8 // 2 + 2 * LANES * (i % 2) for i in range(2 * LANES)]
    high = [lane + 4 for lane in low]
    order = ir.VectorType(I32, 2 * LANES)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        source, stride, written, target, count, following = arguments
        words = b.shl(count, I64(2))
        with b.if_else(b.icmp_signed("==", written, I64(LANES))) as (whole, partial):
            for branch in (whole, partial):
                with branch:
                    rows = []
                    for t in range(LANES):
                        place = I64(t) if branch is whole else _emit_place(b, I64(t), written)
                        rows.append(b.add(source, b.mul(place, stride)))
                    targets = [b.add(target, b.mul(words, I64(pair))) for pair in range(LANES // 2)]
                    with cgutils.for_range_slice(b, I64(0), count, I64(2 * LANES), intp=I64) as (i, _):
                        at, to = b.shl(i, I64(1)), b.shl(i, I64(2))
                        for pair in range(LANES // 2):
                            x, y = (emit_load(b, b.add(row, at), _HALVES) for row in rows[2 * pair : 2 * pair + 2])
                            place = b.add(targets[pair], to)
                            emit_store(b, b.shuffle_vector(x, y, ir.Constant(order, low)), place)
                            emit_store(b, b.shuffle_vector(x, y, ir.Constant(order, high)), emit_at(b, place, 64))
                            emit_prefetch(b, emit_at(b, b.add(following, b.shl(i, I64(4))), 64 * pair))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def widen_group(
    typing_context: Any,
    kind: Any,
    keys: Any,
    values: Any,
    stride: Any,
    written: Any,
    wide_keys: Any,
    words: Any,
    count: Any,
    following: Any,
) -> Any:
    """Widen 16 rows of `count` 8-bit keys (a multiple of 32) to bfloat16, and as many of values to 8 rows of words, in one pass over both.

    Rows of the pool are `stride` bytes apart. Only the first `written` are read; the last of them stands for the others. `following`: the
    memory to ask for, half as much as is read.
    """
    reads_int8 = is_int8(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, keys, values, stride, written, wide_keys, words, count, following = arguments
        with cgutils.for_range_slice(b, I64(0), I64(LANES), I64(2), intp=I64) as (t, _):
            offsets = [b.mul(_emit_place(b, b.add(t, I64(odd)), written), stride) for odd in (0, 1)]
            key_rows, value_rows = ([b.add(at, offset) for offset in offsets] for at in (keys, values))
            to_key = b.add(wide_keys, b.shl(b.mul(t, count), I64(1)))
            to_words = b.add(words, b.shl(b.mul(t, count), I64(1)))
            asked = b.shl(t, I64(5))
            tabled = I64(0)
            if HAS_BYTE_TABLES and not reads_int8:  # for int8 conversions are as fast
                tabled = b.and_(count, I64(-_TABLED))
                with cgutils.for_range_slice(b, I64(0), tabled, I64(_TABLED), intp=I64) as (i, _):
                    line = b.add(b.add(following, asked), b.shl(i, I64(4)))
                    for n in range(2):
                        emit_prefetch(b, emit_at(b, line, 512 * n))
                    for odd, row in enumerate(key_rows):
                        place = b.add(to_key, b.shl(b.add(i, count) if odd else i, I64(1)))
                        _emit_look_up_keys(b, b.add(row, i), place)
                    _emit_look_up_values(b, [b.add(row, i) for row in value_rows], b.add(to_words, b.shl(i, I64(2))))
            with cgutils.for_range_slice(b, tabled, count, I64(2 * LANES), intp=I64) as (i, _):
                emit_prefetch(b, b.add(following, b.add(asked, b.shl(i, I64(4)))))
                for odd, row in enumerate(key_rows):
                    low, high = _emit_widen_pair(b, reads_int8, b.add(row, i))
                    place = b.add(to_key, b.shl(b.add(i, count) if odd else i, I64(1)))
                    emit_store(b, emit_round_pair(b, low, high), place)  # exact
                rows = [b.add(row, i) for row in value_rows]
                _emit_widen_values(b, reads_int8, rows, b.add(to_words, b.shl(i, I64(2))))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), generate


def _emit_widen_pair(b: Builder, reads_int8: bool, address: Value) -> tuple[Value, Value]:
    return emit_widen(b, reads_int8, address), emit_widen(b, reads_int8, emit_at(b, address, LANES))


def _emit_widen_values(b: Builder, reads_int8: bool, rows: list[Value], target: Value) -> None:
    """Write 32 columns of two rows of values as words."""
    first, second = (_emit_widen_pair(b, reads_int8, row) for row in rows)
    for n in range(2):
        emit_store(b, _emit_word(b, first[n], second[n]), emit_at(b, target, 64 * n))


def _emit_look_up_keys(b: Builder, source: Value, target: Value) -> None:
    """Write 64 elements of float8 as bfloat16."""
    element = emit_load(b, source, _QUADS)
    # So that interleaving within 128 bits leaves the order.
    element = b.bitcast(b.shuffle_vector(element, element, _order([0, 4, 1, 5, 2, 6, 3, 7])), _BYTES)
    for n, half in enumerate(_emit_look_up(b, element)):
        emit_store(b, half, emit_at(b, target, 64 * n))


def _emit_look_up_values(b: Builder, rows: list[Value], target: Value) -> None:
    """Write 64 columns of two rows of float8 values as words."""
    turned = [4 * (i % 4) + i // 4 for i in range(LANES)]  # so that interleaving twice leaves the order
    elements = []
    for row in rows:
        words = emit_load(b, row, VI)
        elements.append(b.bitcast(b.shuffle_vector(words, words, _order(turned)), _BYTES))
    for n, mixed in enumerate(_emit_interleave(b, *elements)):
        for m, half in enumerate(_emit_look_up(b, mixed)):
            emit_store(b, half, emit_at(b, target, 128 * n + 64 * m))


def _emit_look_up(b: Builder, element: Value) -> tuple[Value, Value]:
    """Make 64 elements of float8 into bfloat16, from the first 8 of each 128 bits and from the others.

    A table has 128 entries: the sign, which the processor overlooks in an index, goes on by itself.
    """
    look_up = get_function(b, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [_BYTES] * 3)
    entries = [_bfloat16_bits(code) for code in range(128)]
    found = []
    for shift in (0, 8):
        table = [entry >> shift & 0xFF for entry in entries]
        parts = [ir.Constant(_BYTES, table[at : at + _TABLED]) for at in (0, _TABLED)]
        found.append(b.call(look_up, [parts[0], element, parts[1]]))
    low, high = found
    sign = b.and_(element, ir.Constant(_BYTES, [0x80] * _TABLED))
    return _emit_interleave(b, low, b.or_(high, sign))


def _emit_interleave(b: Builder, x: Value, y: Value) -> tuple[Value, Value]:
    """Alternate the bytes of two vectors, within each 128 bits: of their first halves, and of the second."""
    low = [16 * (i // 16) + i % 16 // 2 + _TABLED * (i % 2) for i in range(_TABLED)]
    return b.shuffle_vector(x, y, _order(low)), b.shuffle_vector(x, y, _order([lane + 8 for lane in low]))


def _order(lanes: list[int]) -> Value:
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


def _bfloat16_bits(code: int) -> int:
    """Return the bits of a code of float8 e4m3fn without a sign; a NaN reads as 480, see `quantised.emit_widen`."""
    exponent, mantissa = code >> 3, code & 7
    number = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits >> 16


def _emit_word(b: Builder, low: Value, high: Value) -> Value:
    """Put two vectors of float32 that are exact in bfloat16 into the halves of words."""
    return b.or_(b.lshr(b.bitcast(low, VI), ir.Constant(VI, [16] * LANES)), b.bitcast(high, VI))


def _emit_place(b: Builder, token: Value, written: Value) -> Value:
    """Return the token that stands for one of a group of which so many were written."""
    last = b.sub(written, I64(1))
    return b.select(b.icmp_signed("<", token, last), token, last)


@intrinsic
def order_columns(typing_context: Any, row: Any, count: Any) -> Any:
    """Put the `count` float32 of a row of sums (a multiple of 32) in the order of the head dimension."""
    first = [LANES * (i // 4 % 2) + i % 4 + 4 * (i // 8) for i in range(LANES)]
    second = [lane + 8 for lane in first]

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        row, count = arguments
        with cgutils.for_range_slice(b, I64(0), count, I64(2 * LANES), intp=I64) as (i, _):
            at = b.add(row, b.shl(i, I64(2)))
            x, y = emit_load(b, at, VF), emit_load(b, emit_at(b, at, 64), VF)
            emit_store(b, b.shuffle_vector(x, y, ir.Constant(VI, first)), at)
            emit_store(b, b.shuffle_vector(x, y, ir.Constant(VI, second)), emit_at(b, at, 64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
