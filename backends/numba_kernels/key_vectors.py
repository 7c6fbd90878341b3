"""Products of a few rows of (query, head) with keys and values as they lie in memory, on vectors. Knows addresses, no blocks or sequences.

With few rows, laying out keys and values for `multiply_tile` costs more than the products themselves. So nothing is laid out: 16 keys are
transposed in registers and meet all rows there, and so do values in pairs of neighbours. Meanwhile the memory of the next pass is asked for.

Invariant: each number is summed in the order of `multiply_tile`, so it has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.vectors import (
    HAS_WIDE,
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
    emit_multiply_add,
    emit_pairs,
    emit_prefetch,
    emit_splat,
    emit_store,
    emit_transpose,
    intrinsic,
    is_bfloat16,
)

# Rows at once, and vectors of the head dimension that they sum at once: as many as leave registers for values and factors.
FEW_ROWS, _WIDTH = (6, 4) if HAS_WIDE else (3, 2)
_LINE = 64  # bytes of a cache line


@intrinsic
def score_few(
    typing_context: Any,
    tag: Any,
    rows: Any,
    queries: Any,
    query_stride: Any,
    sources: Any,
    groups: Any,
    words: Any,
    scores: Any,
    score_stride: Any,
    following: Any,
    length: Any,
) -> Any:
    """scores [rows, 16 * groups] float32 = queries [rows, words] @ keys [16 * groups, words]; `rows` ≤ FEW_ROWS, `words` a multiple of 8.

    `sources` is the address of the int64 addresses of the keys, `following` that of as many others, of which `length` bytes each are asked for.
    """
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, rows, *operands = arguments
        _by_rows(b, rows, lambda count: _emit_scores(b, is_bf16, count, *operands))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 10), generate


def _emit_scores(
    b: Builder,
    is_bf16: bool,
    rows: int,
    queries: Value,
    query_stride: Value,
    sources: Value,
    groups: Value,
    words: Value,
    scores: Value,
    score_stride: Value,
    following: Value,
    length: Value,
) -> None:
    query_rows = _rows_at(b, queries, query_stride, rows)
    narrow = ir.VectorType(I32, LANES // 2)
    widen = ir.Constant(VI, [i % (LANES // 2) for i in range(LANES)])
    whole = b.and_(words, I64(-LANES))

    def add(totals: list[Value], keys: list[Value], word: Value, count: int) -> None:
        """Add the products of `count` words behind `word` to what stands in `totals`."""
        at = b.shl(word, I64(2))
        if count == LANES:
            columns = emit_transpose(b, [emit_load(b, b.add(key, at), VI) for key in keys])
        else:
            halves = [emit_load(b, b.add(key, at), narrow) for key in keys]
            columns = emit_transpose(b, [b.shuffle_vector(half, half, widen) for half in halves])
        for step, column in enumerate(columns[:count]):
            for total, row in zip(totals, query_rows, strict=True):
                factor = emit_splat(b, emit_load(b, emit_at(b, b.add(row, at), 4 * step), I32), VI)
                b.store(emit_multiply_add(b, is_bf16, b.load(total), column, factor), total)

    with cgutils.for_range_slice(b, I64(0), groups, I64(1), intp=I64) as (group, _):
        own = b.add(sources, b.shl(group, I64(7)))
        keys = [emit_load(b, emit_at(b, own, 8 * i), I64) for i in range(LANES)]
        totals = [cgutils.alloca_once(b, VF) for _ in range(rows)]
        for total in totals:
            b.store(constant(0.0), total)
        with cgutils.for_range_slice(b, I64(0), whole, I64(LANES), intp=I64) as (word, _):
            offset = b.shl(word, I64(2))
            with b.if_then(b.icmp_signed("<", offset, length)):
                for i in range(LANES):
                    asked = emit_load(b, emit_at(b, b.add(following, b.shl(group, I64(7))), 8 * i), I64)
                    emit_prefetch(b, b.add(asked, offset))
            add(totals, keys, word, LANES)
        with b.if_then(b.icmp_signed("!=", words, whole)):
            add(totals, keys, whole, LANES // 2)
        target = b.add(scores, b.shl(group, I64(6)))
        for total, row in zip(totals, _rows_at(b, target, score_stride, rows), strict=True):
            emit_store(b, b.load(total), row)


@intrinsic
def add_few(
    typing_context: Any,
    tag: Any,
    rows: Any,
    weights: Any,
    weight_stride: Any,
    sources: Any,
    offset: Any,
    keys: Any,
    vectors: Any,
    sums: Any,
    sum_stride: Any,
    following: Any,
    following_offset: Any,
    length: Any,
) -> Any:
    """sums [rows, 16 * vectors] float32 += weights [rows, keys] @ values [keys, 16 * vectors]; `rows` ≤ FEW_ROWS, `keys` even.

    A value lies `offset` bytes behind the address that stands for its key at `sources`. Also `length` bytes each are asked for,
    `following_offset` bytes behind the addresses at `following`, of which there are as many.
    """
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, rows, *operands = arguments
        _by_rows(b, rows, lambda count: _emit_sums(b, is_bf16, count, *operands))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 12), generate


def _emit_sums(
    b: Builder,
    is_bf16: bool,
    rows: int,
    weights: Value,
    weight_stride: Value,
    sources: Value,
    offset: Value,
    keys: Value,
    vectors: Value,
    sums: Value,
    sum_stride: Value,
    following: Value,
    following_offset: Value,
    length: Value,
) -> None:
    size = 2 if is_bf16 else 4
    together = 2 if is_bf16 else 1  # keys of a step
    weight_rows = _rows_at(b, weights, weight_stride, rows)
    steps = b.lshr(keys, I64(1)) if is_bf16 else keys

    def add(first: Value, width: int) -> None:
        """Sum `width` vectors of the head dimension from vector `first` on, over all keys."""
        sum_rows = _rows_at(b, b.add(sums, b.shl(first, I64(6))), sum_stride, rows)
        totals = [[cgutils.alloca_once(b, VF) for _ in range(width)] for _ in range(rows)]
        for row, kept in zip(sum_rows, totals, strict=True):
            for n, total in enumerate(kept):
                b.store(emit_load(b, emit_at(b, row, 64 * n), VF), total)
        inside = b.mul(first, I64(LANES * size))
        with cgutils.for_range_slice(b, I64(0), steps, I64(1), intp=I64) as (step, _):
            here = b.mul(step, I64(8 * together))
            for n in range(0, width * LANES * size, _LINE):
                place = emit_at(b, inside, n)
                asked_place = b.add(following_offset, place)
                with b.if_then(b.icmp_signed("<", place, length)):
                    for k in range(together):
                        asked = emit_load(b, emit_at(b, b.add(following, here), 8 * k), I64)
                        emit_prefetch(b, b.add(asked, asked_place))
            at = b.add(offset, inside)
            pair = [b.add(emit_load(b, emit_at(b, b.add(sources, here), 8 * k), I64), at) for k in range(together)]
            columns = (
                emit_pairs(b, pair[0], pair[1], width)
                if is_bf16
                else [emit_load(b, emit_at(b, pair[0], 64 * n), VI) for n in range(width)]
            )
            for row, kept in zip(weight_rows, totals, strict=True):
                factor = emit_splat(b, emit_load(b, b.add(row, b.shl(step, I64(2))), I32), VI)
                for column, total in zip(columns, kept, strict=True):
                    b.store(emit_multiply_add(b, is_bf16, b.load(total), column, factor), total)
        for row, kept in zip(sum_rows, totals, strict=True):
            for n, total in enumerate(kept):
                emit_store(b, b.load(total), emit_at(b, row, 64 * n))

    whole = b.and_(vectors, I64(-_WIDTH))
    with cgutils.for_range_slice(b, I64(0), whole, I64(_WIDTH), intp=I64) as (first, _):
        add(first, _WIDTH)
    with cgutils.for_range_slice(b, whole, vectors, I64(1), intp=I64) as (first, _):
        add(first, 1)


def _by_rows(b: Builder, rows: Value, emit: Callable[[int], None]) -> None:
    """Emit code for each number of rows from 1 to FEW_ROWS, and the choice between them."""
    end = b.append_basic_block("few.end")
    switch = b.switch(rows, end)
    for count in range(1, FEW_ROWS + 1):
        block = b.append_basic_block(f"few.{count}")
        switch.add_case(I64(count), block)
        b.position_at_end(block)
        emit(count)
        b.branch(end)
    b.position_at_end(end)


def _rows_at(b: Builder, base: Value, stride: Value, rows: int) -> list[Value]:
    addresses = [base]
    for _ in range(rows - 1):
        addresses.append(b.add(addresses[-1], stride))
    return addresses
