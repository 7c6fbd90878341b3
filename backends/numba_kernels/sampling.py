"""Kernels that choose ids from rows of logits, float32 or bfloat16, without writing a row of anything. One item: one row.

`likeliest` finds the largest logit of a row, the lowest id of equals, and whether all of them are finite. `draw` inverts the running sum of
exp((x - largest) / temperature): sums of blocks of 64 first, then the block that a number falls into once more, id by id.

Invariant: what comes out for a row depends on that row and its parameters alone, bit for bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.rows import read_vector, vectors_of
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    LANES,
    VF,
    Builder,
    Value,
    cgutils,
    constant,
    emit_exp,
    emit_fma,
    emit_reduce,
    emit_splat,
    emit_store,
    intrinsic,
    is_bfloat16,
    keep,
    make_reader,
    read_float,
    read_int64,
    take_next,
    write_int64,
)

BLOCK = 64  # ids of a block of the running sum
CHUNK = 512  # ids of a step of the search
LOWEST = -87.0  # exponents below give 0: under 1e-37 of the largest

_read_half = make_reader(types.uint16, ir.IntType(16))
_read_word = make_reader(types.uint32, ir.IntType(32))
read_double = make_reader(types.float64, ir.DoubleType())


@intrinsic
def largest_of(typing_context: Any, tag: Any, row: Any, count: Any) -> Any:
    """Return the largest of `count` numbers, and their sum times zero: 0 if all of them are finite, NaN if not."""
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, row, count = arguments
        best = cgutils.alloca_once_value(b, constant(-np.inf))
        zero = cgutils.alloca_once_value(b, constant(0.0))
        with vectors_of(b, count) as (i, _):
            x = read_vector(b, is_bf16, row, i)
            kept = b.load(best)
            b.store(b.select(b.fcmp_ordered(">", x, kept), x, kept), best)
            b.store(emit_fma(b, x, constant(0.0), b.load(zero)), zero)
        largest = emit_reduce(b, b.load(best), lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
        return cgutils.pack_array(b, [largest, emit_reduce(b, b.load(zero), lambda x, y: b.fadd(x, y))])

    return types.UniTuple(types.float32, 2)(tag, types.int64, types.int64), generate  # type: ignore[no-untyped-call]


@intrinsic
def weigh(
    typing_context: Any, tag: Any, row: Any, count: Any, largest: Any, temperature: Any, floor: Any, target: Any
) -> Any:
    """Return the sum of the weights exp((x - largest) / temperature) of `count` numbers, 0 in place of those under `floor`.

    They are also written to `target`, float32, unless that is zero.
    """
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, row, count, largest, temperature, floor, target = arguments
        most, divisor, least = (emit_splat(b, number, VF) for number in (largest, temperature, floor))
        total = cgutils.alloca_once_value(b, constant(0.0))
        writes = b.icmp_signed("!=", target, ir.Constant(target.type, 0))
        with vectors_of(b, count) as (i, _):
            # The largest becomes 0 before the division, so that nothing can overflow upwards.
            x = b.fdiv(b.fsub(read_vector(b, is_bf16, row, i), most), divisor)
            weight = emit_exp(b, x)
            is_kept = b.and_(b.fcmp_ordered(">=", x, constant(LOWEST)), b.fcmp_ordered(">=", weight, least))
            weight = b.select(is_kept, weight, constant(0.0))
            b.store(b.fadd(b.load(total), weight), total)
            with b.if_then(writes):
                emit_store(b, weight, b.add(target, b.shl(i, ir.Constant(i.type, 2))))
        return emit_reduce(b, b.load(total), lambda x, y: b.fadd(x, y))

    signature = types.float32(tag, types.int64, types.int64, *[types.float32] * 3, types.int64)
    return signature, generate


@njit(nogil=True, error_model="numpy")
def _bits(size: int, row: int, i: int) -> Any:
    """Return the bits of number i of a row, widened to those of a float32."""
    if size == 2:
        return np.uint32(np.uint32(_read_half(row + i * 2)) << np.uint32(16))
    return np.uint32(_read_word(row + i * 4))


@njit(nogil=True, error_model="numpy")
def fill_row(tail: Any, size: int, row: int, first: int, count: int, filling: Any) -> None:
    """Write numbers first … first + count - 1 of a row to `tail` as the bits of float32, and `filling` behind them."""
    for i in range(len(tail)):
        tail[i] = _bits(size, row, first + i) if i < count else filling


@njit(nogil=True, error_model="numpy")
def _likeliest(arguments: int, tag: Any, size: int) -> None:
    """Arguments: counter, logits, row stride, R, V, found ids (int64), -1 for a row that is not finite."""
    logits, stride = read_int64(arguments + 8), read_int64(arguments + 16)
    R, V, ids = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    tail = np.empty(CHUNK, np.uint32)
    whole = V // CHUNK * CHUNK
    while True:
        item = take_next(arguments)
        if item >= R:
            break
        row = logits + item * stride
        largest, zero, start = np.float32(-np.inf), np.float32(0), 0
        for first in range(0, whole, CHUNK):
            most, nothing = largest_of(tag, row + first * size, CHUNK)
            zero += nothing
            if most > largest:
                largest, start = most, first
        if whole < V:
            fill_row(tail, size, row, whole, V - whole, _bits(size, row, whole))
            most, nothing = largest_of(np.float32(0), tail.ctypes.data, CHUNK)
            zero += nothing
            if most > largest:
                largest, start = most, whole
        found = -1
        if zero == np.float32(0):
            found = start
            tail[0] = _bits(size, row, found)
            while read_float(tail.ctypes.data) != largest:
                found += 1
                tail[0] = _bits(size, row, found)
        write_int64(ids + item * 8, found)
    keep(tail)


@njit(nogil=True, error_model="numpy")
def _draw(arguments: int, tag: Any, size: int) -> None:
    """Arguments: counter, logits, row stride, rows (int64), N, V, temperatures (float32), min-p (float32), numbers [N, S] (float64), S, found [N, S].

    A number is in [0, 1); it takes the first id whose running sum of weights exceeds that share of the whole.
    """
    logits, stride, rows = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    N, V = read_int64(arguments + 32), read_int64(arguments + 40)
    temperatures, floors = read_int64(arguments + 48), read_int64(arguments + 56)
    numbers, S, found = read_int64(arguments + 64), read_int64(arguments + 72), read_int64(arguments + 80)
    whole = V // BLOCK
    num_blocks = (V + BLOCK - 1) // BLOCK
    until = np.empty(num_blocks, np.float64)
    tail = np.empty(BLOCK, np.uint32)
    weights = np.empty(BLOCK, np.float32)
    while True:
        item = take_next(arguments)
        if item >= N:
            break
        row = logits + read_int64(rows + item * 8) * stride
        temperature, floor = read_float(temperatures + item * 4), read_float(floors + item * 4)
        largest, _ = largest_of(tag, row, V // LANES * LANES)
        fill_row(tail, size, row, whole * BLOCK, V - whole * BLOCK, np.uint32(0xFF800000))  # -inf
        most, _ = largest_of(np.float32(0), tail.ctypes.data, BLOCK)
        largest = max(largest, most)
        total = 0.0
        for block in range(num_blocks):
            if block < whole:
                total += weigh(tag, row + block * BLOCK * size, BLOCK, largest, temperature, floor, 0)
            else:
                total += weigh(np.float32(0), tail.ctypes.data, BLOCK, largest, temperature, floor, 0)
            until[block] = total
        for s in range(S):
            place = (item * S + s) * 8
            target = read_double(numbers + place) * total
            block = min(np.searchsorted(until, target, side="right"), num_blocks - 1)
            while block > 0 and until[block] == until[block - 1]:  # the product above was rounded up to the whole
                block -= 1
            if block < whole:
                weigh(tag, row + block * BLOCK * size, BLOCK, largest, temperature, floor, weights.ctypes.data)
            else:
                weigh(np.float32(0), tail.ctypes.data, BLOCK, largest, temperature, floor, weights.ctypes.data)
            running = until[block - 1] if block > 0 else 0.0
            # The two sums differ in rounding: past the end means the last id that has weight.
            chosen = 0
            for i in range(BLOCK):
                if weights[i] > 0:
                    chosen = i
                    running += weights[i]
                    if running > target:
                        break
            write_int64(found + place, block * BLOCK + chosen)
    keep(tail)
    keep(weights)


@lru_cache(maxsize=2)
def likeliest_kernel(is_bf16: bool) -> Kernel:
    """Compile the search for one element type, or load it from the cache."""
    key = source_key()

    def likeliest_bf16(arguments: int) -> None:
        if key:
            _likeliest(arguments, np.uint16(0), 2)

    def likeliest_f32(arguments: int) -> None:
        if key:
            _likeliest(arguments, np.float32(0), 4)

    return Kernel(likeliest_bf16 if is_bf16 else likeliest_f32, 5)


@lru_cache(maxsize=2)
def draw_kernel(is_bf16: bool) -> Kernel:
    """Compile the drawing for one element type, or load it from the cache."""
    key = source_key()

    def draw_bf16(arguments: int) -> None:
        if key:
            _draw(arguments, np.uint16(0), 2)

    def draw_f32(arguments: int) -> None:
        if key:
            _draw(arguments, np.float32(0), 4)

    return Kernel(draw_bf16 if is_bf16 else draw_f32, 10)
