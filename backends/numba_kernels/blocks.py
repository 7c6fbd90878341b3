"""Turns a GGUF file's blocks into numbers, and rows of numbers into codes with a scale. `backends.quantised_weights` is the definition.

Blocks lie as in the file: 32 numbers along k each, scale (and minimum) first. Invariant: every product but the last is exact, so that a number
is rounded once, fused or not, and is the definition's bit for bit; a NaN stays some NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.group_kinds import UNIT, kind_of
from backends.numba_kernels.groups import emit_widen_halves
from backends.numba_kernels.quantised import quantise_row
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    HAS_BF16_DOT,
    I16,
    I64,
    LANES,
    VF,
    VH,
    VI,
    Builder,
    Value,
    cgutils,
    emit_at,
    emit_load,
    emit_round_bf16,
    emit_round_pair,
    emit_splat,
    emit_store,
    intrinsic,
    is_bfloat16,
    keep,
    read_int64,
    take_next,
    write_float,
)

# What a source holds, as kernels are told when they run: one body serves all, and little is compiled.
Q4_0, Q4_1, Q8_0, FLOAT32, BFLOAT16 = range(5)
FORMS: Mapping[str, int] = MappingProxyType({"q4_0": Q4_0, "q4_1": Q4_1, "q8_0": Q8_0})
RUN = 1024  # blocks of an item
ROWS = 16  # rows of an item
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_FOUR = ir.Constant(_BYTES, [4] * LANES)
_LOW = ir.Constant(_BYTES, [15] * LANES)


@intrinsic
def decode_run(typing_context: Any, tag: Any, kind: Any, source: Any, target: Any, count: Any) -> Any:
    """Write the numbers of `count` blocks of `kind` in the type of `tag`."""
    facts, is_bf16 = kind_of(kind), is_bfloat16(tag)
    head = 4 if facts.has_minima else 2  # bytes before the codes
    block_bytes = head + UNIT * facts.bits // 8

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, _, source, target, count = arguments
        with cgutils.for_range_slice(b, I64(0), count, I64(1), intp=I64) as (i, _):
            block = b.add(source, b.mul(i, I64(block_bytes)))
            d, *m = (_emit_half(b, emit_at(b, block, at)) for at in range(0, head, 2))
            numbers = []
            for code in _emit_codes(b, facts.bits, emit_at(b, block, head)):
                number = b.sitofp(b.sub(code, ir.Constant(VI, [facts.offset] * LANES)), VF)
                number = b.fmul(number, d)
                numbers.append(b.fadd(number, m[0]) if m else number)
            if not is_bf16:
                rows = numbers
            elif HAS_BF16_DOT:
                rows = [emit_round_pair(b, *numbers)]
            else:
                rows = [emit_round_bf16(b, number) for number in numbers]
            to = b.add(target, b.mul(i, I64(UNIT * (2 if is_bf16 else 4))))
            for place, row in enumerate(rows):
                emit_store(b, row, emit_at(b, to, place * (32 if is_bf16 else 64)))
        return context.get_dummy_value()

    return types.void(tag, kind, *[types.int64] * 3), generate


def _emit_half(b: Builder, address: Value) -> Value:
    """Load a float16 as float32, in every lane."""
    return emit_widen_halves(b, emit_splat(b, emit_load(b, address, I16), VH))


def _emit_codes(b: Builder, bits: int, address: Value) -> list[Value]:
    """Load 32 codes: signed bytes, or the low halves of 16 bytes and then their high ones."""
    if bits == 8:
        return [b.sext(emit_load(b, emit_at(b, address, at), _BYTES), VI) for at in (0, LANES)]
    pairs = emit_load(b, address, _BYTES)
    return [b.zext(half, VI) for half in (b.and_(pairs, _LOW), b.lshr(pairs, _FOUR))]


@njit(nogil=True, error_model="numpy")
def _decode_any(tag: Any, form: int, source: int, target: int, count: int) -> None:
    if form == Q4_0:
        decode_run(tag, np.int16(0), source, target, count)
    elif form == Q4_1:
        decode_run(tag, np.uint16(0), source, target, count)
    else:
        decode_run(tag, np.uint8(0), source, target, count)


@njit(nogil=True, error_model="numpy")
def _decode(arguments: int, tag: Any, size: int) -> None:
    """Decode blocks; an item is RUN of them. Arguments: counter, form, blocks, bytes of a block, number of blocks, target."""
    form, source, block_bytes = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    count, target = read_int64(arguments + 32), read_int64(arguments + 40)
    while True:
        first = take_next(arguments) * RUN
        if first >= count:
            break
        _decode_any(
            tag, form, source + first * block_bytes, target + first * UNIT * size, min(np.int64(RUN), count - first)
        )


@njit(nogil=True, error_model="numpy")
def _quantise(arguments: int) -> None:
    """Turn rows into int8 codes and a float32 scale each; an item is ROWS of them.

    Arguments: counter, form, source, bytes of a row, rows, K (a multiple of 16; of 32 for blocks), codes, scales.
    """
    form, source, row_bytes = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    N, K = read_int64(arguments + 32), read_int64(arguments + 40)
    codes, scales = read_int64(arguments + 48), read_int64(arguments + 56)
    numbers = np.empty(K, np.float32)
    while True:
        first = take_next(arguments) * ROWS
        if first >= N:
            break
        for n in range(first, min(first + ROWS, N)):
            row, target = source + n * row_bytes, codes + n * K
            if form == BFLOAT16:
                write_float(scales + n * 4, quantise_row(np.uint16(0), np.int8(0), row, target, K))
                continue
            if form != FLOAT32:
                _decode_any(np.float32(0), form, row, numbers.ctypes.data, K // UNIT)
                row = numbers.ctypes.data
            write_float(scales + n * 4, quantise_row(np.float32(0), np.int8(0), row, target, K))
    keep(numbers)


@lru_cache(maxsize=2)
def decode_kernel(is_bf16: bool) -> Kernel:
    """Compile the decoding into bfloat16 or float32, or load it from the cache."""
    key = source_key()

    def decode_to_bf16(arguments: int) -> None:
        if key:
            _decode(arguments, np.uint16(0), 2)

    def decode_to_f32(arguments: int) -> None:
        if key:
            _decode(arguments, np.float32(0), 4)

    return Kernel(decode_to_bf16 if is_bf16 else decode_to_f32, 5)


@lru_cache(maxsize=1)
def quantise_kernel() -> Kernel:
    """Compile the quantising of rows, or load it from the cache."""
    key = source_key()

    def quantise_rows(arguments: int) -> None:
        if key:
            _quantise(arguments)

    return Kernel(quantise_rows, 7)
