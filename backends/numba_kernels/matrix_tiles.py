"""Products on the matrix tiles of a processor (Intel AMX): bfloat16 to float32 and int8 to int32. Knows addresses, no tensors.

A tile register holds 16 rows of 64 bytes. What a *step* of the inner dimension is here: 64 bytes of a row of a, that is 32 bfloat16 or
64 int8, met by 16 rows of b in which a 32-bit word holds 2 (4) neighbouring values of k for one output:

      a: rows of x                  b: 16 words of k, outputs side by side
    ┌──────────────────┐         ┌────────────────┬────────────────┐
    │ 4   ≤ 16 rows    │         │ 6  16 outputs  │ 7  16 outputs  │
    ├──────────────────┤         └────────────────┴────────────────┘
    │ 5   ≤ 16 rows    │      c: ┌────────────────┬────────────────┐
    └──────────────────┘         │ 0              │ 1              │
      (numbers of registers)     ├────────────────┼────────────────┤
                                 │ 2              │ 3              │
                                 └────────────────┴────────────────┘

An inner dimension that is not a whole number of steps is not for these functions: pad both sides with zeros, or compute with vectors.

Use, in a compiled body: `configure_tiles` whenever the number of rows changes, `multiply_tiles` as often as wanted, `release_tiles` before
returning (a thread that leaves its tiles in use makes every later switch of the processor to it and away from it dearer). Only code
that was guarded by `has_matrix_tiles` may be compiled or run: the system hands out tiles to processes that ask. Registers belong to a thread.

Invariant: an element of c is summed step after step, in the same order whatever the number of rows and columns, and rows of a beyond
those configured are neither read nor written.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 (TMUL); Linux Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.vectors import (
    FEATURES,
    I64,
    Builder,
    Value,
    cgutils,
    emit_at,
    emit_prefetch,
    emit_store,
    get_function,
    intrinsic,
    is_bfloat16,
)

NEEDED = frozenset({"amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512bf16", "avx512bw", "avx512vbmi"})
TILE_ROWS = 16
MAX_TILE_ROWS = 2 * TILE_ROWS  # rows of one product
STEP_BYTES = 64  # of a row of a
CONFIGURATION_BYTES = 64
LINE_BYTES = 64  # of a cache

I8 = ir.IntType(8)
_POINTER = I8.as_pointer()
_VOID = ir.VoidType()
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_A, _B = 4, 6  # first registers; c begins at 0


@lru_cache(maxsize=1)
def has_matrix_tiles() -> bool:
    """Say whether this process may use tiles of bfloat16 and int8, asking the system for them the first time.

    False where Numba compiles for a processor without them, or without the vectors that feed them (its environment variables count), and where the system refuses: an old kernel,
    a sandbox, a signal stack too small for their state.
    """
    if not NEEDED <= FEATURES:
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return int(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)) == 0


def _call(b: Builder, name: str, *arguments: Value) -> None:
    b.call(get_function(b, f"llvm.x86.{name}", _VOID, [argument.type for argument in arguments]), arguments)


def _register(number: int) -> Value:
    return ir.Constant(I8, number)


def _pointer(b: Builder, address: Value) -> Value:
    return b.inttoptr(address, _POINTER)


@intrinsic
def configure_tiles(typing_context: Any, buffer: Any, rows: Any) -> Any:
    """Set the calling thread's tiles up for products of `rows` rows, 1 … MAX_TILE_ROWS, and clear them.

    `buffer` is the address of CONFIGURATION_BYTES bytes to write to.
    """
    signature = types.void(types.int64, types.int64)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        buffer, rows = arguments
        full = ir.Constant(I64, TILE_ROWS)
        is_tall = b.icmp_signed(">", rows, full)
        upper = b.select(is_tall, full, rows)
        # A tile must have rows, used or not.
        lower = b.select(is_tall, b.sub(rows, full), full)
        emit_store(b, ir.Constant(I64, 1), buffer)  # palette 1, start at row 0
        emit_store(b, ir.Constant(I64, 0), emit_at(b, buffer, 8))
        # From byte 16 on, the bytes of a row (16 bits for each tile); from byte 48 on, the rows (8 bits for each).
        for word in range(4):
            used = 0x0040_0040_0040_0040 if word < 2 else 0
            emit_store(b, ir.Constant(I64, used), emit_at(b, buffer, 16 + 8 * word))
            emit_store(b, ir.Constant(I64, 0), emit_at(b, buffer, 48 + 8 * (word % 2)))
        for tile, count in enumerate((upper, upper, lower, lower, upper, lower, full, full)):
            emit_store(b, b.trunc(count, I8), emit_at(b, buffer, 48 + tile))
        _call(b, "ldtilecfg", _pointer(b, buffer))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Tell the processor that the calling thread's tiles are empty."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def multiply_tiles(
    typing_context: Any,
    tag: Any,
    rows: Any,
    columns: Any,
    a: Any,
    a_stride: Any,
    b_: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    steps: Any,
    adds: Any,
    following: Any,
    lines: Any,
) -> Any:
    """c[r, :] (+)= sum over steps of a[r, step] * b[step, :], for the `rows` rows last configured and `columns` (1 or 2) tiles of 16 outputs.

    `tag`: uint16 for bfloat16 and sums in float32, int8 for int8 and sums in int32. a: `rows` rows of `steps` * STEP_BYTES bytes, a_stride
    bytes apart. b: 16 * `steps` rows of 16 * columns words, b_stride bytes apart. c: rows of 16 * columns words, c_stride bytes apart; kept
    and added to if `adds`. Each step also asks for the next `lines` cache lines of the memory at `following`, which is wanted soon.
    Subnormal inputs and results of bfloat16 products count as zero.
    """
    signature = types.void(tag, *[types.int64] * 9, types.boolean, types.int64, types.int64)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, rows, columns, *operands, following, lines = arguments

        def meanwhile(step: Value) -> None:
            emit_fetch(b, step, following, lines)

        emit_products(b, _product(tag), rows, columns, operands, meanwhile)
        return context.get_dummy_value()

    return signature, generate


def _product(tag: Any) -> str:
    return "tdpbf16ps" if is_bfloat16(tag) else "tdpbssd"


def emit_fetch(b: Builder, step: Value, following: Value, lines: Value) -> None:
    """Ask for the lines of one step, see `multiply_tiles`."""
    first = b.mul(step, lines)
    with cgutils.for_range_slice(b, first, b.add(first, lines), ir.Constant(I64, 1), intp=I64) as (line, _):
        emit_prefetch(b, b.add(following, b.mul(line, ir.Constant(I64, LINE_BYTES))))


def emit_products(
    b: Builder,
    product: str,
    rows: Value,
    columns: Value,
    operands: Sequence[Value],
    meanwhile: Callable[[Value], None],
    place: Callable[[Value], Value] | None = None,
) -> None:
    """Do what `multiply_tiles` does, by the instruction named; `operands` are its arguments from a to adds.

    `meanwhile` emits other work for a step; `place` says how many bytes after b a step lies, where steps do not follow each other.
    """
    is_tall = b.icmp_signed(">", rows, ir.Constant(I64, TILE_ROWS))
    is_wide = b.icmp_signed(">", columns, ir.Constant(I64, 1))
    with b.if_else(is_tall) as (tall, flat):
        for branch, height in ((tall, 2), (flat, 1)):
            with branch, b.if_else(is_wide) as (wide, narrow):
                with wide:
                    _emit_product(b, product, height, 2, operands, meanwhile, place)
                with narrow:
                    _emit_product(b, product, height, 1, operands, meanwhile, place)


def _emit_product(
    b: Builder,
    product: str,
    height: int,
    width: int,
    operands: Sequence[Value],
    meanwhile: Callable[[Value], None],
    place: Callable[[Value], Value] | None,
) -> None:
    """Multiply `height` tiles of rows by `width` tiles of outputs."""
    a, a_stride, base, b_stride, c, c_stride, steps, adds = operands
    lower_a = b.mul(a_stride, ir.Constant(I64, TILE_ROWS))
    lower_c = b.add(c, b.mul(c_stride, ir.Constant(I64, TILE_ROWS)))
    sums = [(2 * i + j, emit_at(b, lower_c if i else c, 64 * j)) for i in range(height) for j in range(width)]
    with b.if_else(adds) as (kept, cleared):
        with kept:
            for tile, address in sums:
                _call(b, "tileloadd64", _register(tile), _pointer(b, address), c_stride)
        with cleared:
            for tile, _ in sums:
                _call(b, "tilezero", _register(tile))
    step_b = b.mul(b_stride, ir.Constant(I64, TILE_ROWS))
    zero, one = ir.Constant(I64, 0), ir.Constant(I64, 1)
    with cgutils.for_range_slice(b, zero, steps, one, intp=I64) as (step, _):
        a_now = b.add(a, b.mul(step, ir.Constant(I64, STEP_BYTES)))
        b_now = b.add(base, place(step) if place else b.mul(step, step_b))
        # All loads first: a tenth faster than each before its product.
        for i in range(height):
            address = b.add(a_now, lower_a) if i else a_now
            _call(b, "tileloadd64", _register(_A + i), _pointer(b, address), a_stride)
        for j in range(width):
            _call(b, "tileloadd64", _register(_B + j), _pointer(b, emit_at(b, b_now, 64 * j)), b_stride)
        for j in range(width):
            for i in range(height):
                _call(b, product, _register(2 * i + j), _register(_A + i), _register(_B + j))
        meanwhile(step)
    for tile, address in sums:
        _call(b, "tilestored64", _register(tile), _pointer(b, address), c_stride)
