"""Looks rows up in a weight of integers (see `group_kinds`), as numbers: what an embedding that shares it with the head needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.group_kinds import KINDS, UNIT, kind_of, tail_bytes, unit_bytes
from backends.numba_kernels.groups import emit_halves
from backends.numba_kernels.lookup import fill_with_nan
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    F32,
    I32,
    I64,
    LANES,
    Builder,
    Value,
    cgutils,
    emit_at,
    emit_load,
    intrinsic,
    keep,
    read_int64,
    take_next,
    write_row,
)


@intrinsic
def read_scales(typing_context: Any, kind: Any, group: Any, tail: Any, lane: Any) -> Any:
    """Return d and m of one output: from the group's memory, or d from the end of the strip."""
    facts = kind_of(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, group, tail, lane = arguments
        if facts.has_scales:
            d = b.extract_element(emit_halves(b, emit_at(b, group, facts.code_bytes)), lane)
        else:
            d = emit_load(b, b.add(tail, b.shl(lane, ir.Constant(I64, 2))), F32)
        m = ir.Constant(F32, 0.0)
        if facts.has_minima:
            m = b.extract_element(emit_halves(b, emit_at(b, group, facts.code_bytes + 2 * LANES)), lane)
        return cgutils.pack_array(b, [d, m])

    pair: Any = types.UniTuple
    return pair(types.float32, 2)(kind, *[types.int64] * 3), generate


@intrinsic
def read_code(typing_context: Any, kind: Any, group: Any, lane: Any, element: Any) -> Any:
    """Return code `element` of one output in a group, its offset taken off."""
    facts = kind_of(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, group, lane, element = arguments
        i8, four = ir.IntType(8), ir.Constant(I64, 4)
        place = b.urem(element, ir.Constant(I64, 16)) if facts.bits == 4 else element
        line = b.mul(b.udiv(place, four), ir.Constant(I64, 4 * LANES))
        byte = emit_load(b, b.add(b.add(group, line), b.add(b.mul(lane, four), b.urem(place, four))), i8)
        if facts.bits == 8:
            return b.sext(byte, I32)
        is_high = b.icmp_unsigned(">=", element, ir.Constant(I64, 16))
        half = b.and_(b.select(is_high, b.lshr(byte, ir.Constant(i8, 4)), byte), ir.Constant(i8, 15))
        return b.sub(b.zext(half, I32), ir.Constant(I32, facts.offset))

    return types.int32(kind, *[types.int64] * 3), generate


@njit(nogil=True, error_model="numpy")
def _rows(arguments: int, kind: Any) -> None:
    """Rows of the weight in bfloat16. Arguments: counter, ids (int64), T, packed, N, units of 32 k, strips that lie together, out, its row stride.

    A number that is no row's gives NaN, as in `lookup`.
    """
    ids, T = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, N, units = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    together = read_int64(arguments + 48)
    out, out_stride = read_int64(arguments + 56), read_int64(arguments + 64)
    unit, tail = unit_bytes(kind), tail_bytes(kind)
    block_bytes = together * (units * unit + tail)
    width = units * UNIT
    numbers = np.empty(width, np.float32)
    while True:
        t = take_next(arguments)
        if t >= T:
            break
        row = read_int64(ids + t * 8)
        if not 0 <= row < N:
            fill_with_nan(out + t * out_stride, width * 2)
            continue
        block, strip, lane = packed + row // (LANES * together) * block_bytes, row // LANES % together, row % LANES
        for u in range(units):
            here = block + (u * together + strip) * unit
            d, m = read_scales(kind, here, block + units * together * unit + strip * tail, lane)
            for i in range(UNIT):
                numbers[u * UNIT + i] = np.float32(read_code(kind, here, lane, i)) * d + m
        write_row(np.uint16(0), numbers.ctypes.data, out + t * out_stride, width, np.float32(1), 0)
    keep(numbers)


@lru_cache(maxsize=len(KINDS))
def row_kernel(kind: str) -> Kernel:
    """Compile the look-up of rows for one format of `groups.KINDS`, or load it from the cache."""
    key = source_key()

    def rows_q4_0(arguments: int) -> None:
        if key:
            _rows(arguments, np.int16(0))

    def rows_q4_1(arguments: int) -> None:
        if key:
            _rows(arguments, np.uint16(0))

    def rows_q8_0(arguments: int) -> None:
        if key:
            _rows(arguments, np.uint8(0))

    def rows_int8(arguments: int) -> None:
        if key:
            _rows(arguments, np.int8(0))

    bodies = {"q4_0": rows_q4_0, "q4_1": rows_q4_1, "q8_0": rows_q8_0, "int8": rows_int8}
    return Kernel(bodies[kind], 8)
