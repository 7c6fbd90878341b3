"""Turns integer weights into bfloat16 panels for matrix tiles, a *step* (32 values of k) at a time.

A panel's two strips (see `group_kinds`), their steps in turn so that memory is read in address order, become a panel as `linear` has it: rows
of one 32-bit word for each output, two neighbouring values of k in a word. What is written stands for the weight as
`QuantisedWeight.dequantise` has it, rounded once; of a format with one scale for a row, codes are written as they are, times `CODE_FACTOR`,
so that nothing is rounded and the sum is to be scaled.

Written for the two vector ports of a processor with AVX-512: a shift, a conversion and a product need one of them, a shuffle the other, so
bytes and some of the nibbles are brought into place by shuffles. Processors with matrix tiles have AVX512_BF16 and AVX512_VBMI.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from backends.numba_kernels.group_kinds import UNIT, Kind, kind_of
from backends.numba_kernels.groups import emit_halves
from backends.numba_kernels.matrix_tiles import LINE_BYTES
from backends.numba_kernels.vectors import (
    I32,
    I64,
    LANES,
    VF,
    VI,
    Builder,
    Value,
    constant,
    emit_at,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_round_pair,
    emit_store,
    get_function,
    intrinsic,
)

CODE_FACTOR = 2.0**24
FETCH_LEAD = 4  # steps
NOT_WIDENED = np.float32(0)  # the kind of a weight that is bfloat16 already
SHUFFLED_NIBBLES = (2, 5, 7)  # brought into place by a shuffle, the others by a shift: so both ports have work
_BYTES = ir.VectorType(ir.IntType(8), 64)

# Words 0 … 15 of a panel's row: a value of even k from the first 16 halves, its neighbour from the other 16.
_PAIRS = ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 + LANES * (i % 2) for i in range(2 * LANES)])


def _integers(value: int) -> Value:
    return ir.Constant(VI, [value] * LANES)


@intrinsic
def is_widened(typing_context: Any, kind: Any) -> Any:
    """Say whether `kind` is one of `group_kinds`, as a constant that folds away the branch it decides."""
    answer = is_integer(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        return ir.Constant(ir.IntType(1), int(answer))

    return types.boolean(kind), generate


@intrinsic
def panel_bytes_of(typing_context: Any, kind: Any, words: Any) -> Any:
    """Return the bytes of a panel's two strips with K = 2 * `words`; 0 for weights that are not widened."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        if not is_integer(kind):
            return I64(0)
        facts = kind_of(kind)
        units = b.udiv(arguments[1], I64(UNIT // 2))
        return b.mul(b.add(b.mul(units, I64(facts.unit_bytes)), I64(facts.tail_bytes)), I64(2))

    return types.int64(kind, types.int64), generate


@intrinsic
def widen_step(typing_context: Any, kind: Any, panel: Any, step: Any, target: Any) -> Any:
    """Write step `step` of a panel as 16 rows of 32 words."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        if is_integer(kind):
            _, panel, step, target = arguments
            emit_fetch_step(b, kind, panel, b.add(step, I64(FETCH_LEAD)))
            for side in range(2):
                emit_widen_step(b, kind, panel, step, side, target)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), generate


def is_integer(kind: Any) -> bool:
    """Say the same where code is generated."""
    return bool(kind != types.float32)


def emit_widen_step(b: Builder, kind: Any, panel: Value, step: Value, side: int, target: Value) -> None:
    """Write one of the two sides of what `widen_step` does."""
    facts = kind_of(kind)
    here = emit_at(b, b.add(panel, b.mul(step, I64(2 * facts.unit_bytes))), side * facts.unit_bytes)

    def store(row: int, pair: Value) -> None:
        emit_store(b, pair, emit_at(b, target, (2 * row + side) * 4 * LANES))

    lines = UNIT * facts.bits // 8 * LANES // 64
    words = [emit_load(b, emit_at(b, here, 64 * line), VI) for line in range(lines)]
    if not facts.has_scales:
        for line, word in enumerate(words):
            for half in range(2):
                store(2 * line + half, _emit_exact_pair(b, *(_emit_byte(b, word, 2 * half + i) for i in range(2))))
        return
    d = emit_halves(b, emit_at(b, here, facts.unit_code_bytes))
    m = emit_halves(b, emit_at(b, here, facts.unit_code_bytes + 2 * LANES)) if facts.has_minima else None
    if facts.bits == 8:
        d = b.fmul(d, constant(1 / CODE_FACTOR))

    def number(code: Value) -> Value:
        return b.fmul(code, d) if m is None else emit_fma(b, code, d, m)

    for line, word in enumerate(words):
        for half in range(2):
            if facts.bits == 8:
                store(2 * line + half, _emit_pair(b, *(number(_emit_byte(b, word, 2 * half + i)) for i in range(2))))
                continue
            for high in range(2):  # half of each byte: k and k + 16
                codes = [_emit_nibble(b, facts, word, 2 * (2 * half + i) + high) for i in range(2)]
                store(UNIT // 4 * high + 2 * line + half, _emit_pair(b, *(number(code) for code in codes)))


def emit_fetch_step(b: Builder, kind: Any, panel: Value, step: Value) -> None:
    """Ask for a step that is to be widened soon: a processor's own prefetching stops at the end of a page."""
    step_bytes = 2 * kind_of(kind).unit_bytes
    here = b.add(panel, b.mul(step, I64(step_bytes)))
    for line in range(-(-step_bytes // LINE_BYTES)):
        emit_prefetch(b, emit_at(b, here, LINE_BYTES * line))


def _emit_pair(b: Builder, even: Value, odd: Value) -> Value:
    """Round to bfloat16, into the halves of words."""
    halves = emit_round_pair(b, even, odd)
    return b.bitcast(b.shuffle_vector(halves, halves, _PAIRS), VI)


def _emit_exact_pair(b: Builder, even: Value, odd: Value) -> Value:
    """The same for numbers that bfloat16 can hold: they end where its bits do."""
    return b.or_(b.lshr(b.bitcast(even, VI), _integers(16)), b.and_(b.bitcast(odd, VI), _integers(0xFFFF0000)))


def _emit_byte(b: Builder, word: Value, byte: int) -> Value:
    """Signed byte 0 … 3 of each word, times CODE_FACTOR, as float32: the byte alone, at the upper end of the word."""
    if byte == 3:
        return b.sitofp(b.and_(word, _integers(0xFF000000)), VF)
    nothing = 0x80
    places = ir.Constant(_BYTES, [4 * (at // 4) % 16 + byte if at % 4 == 3 else nothing for at in range(64)])
    shuffle = get_function(b, "llvm.x86.avx512.pshuf.b.512", _BYTES, [_BYTES, _BYTES])
    return b.sitofp(b.bitcast(b.call(shuffle, [b.bitcast(word, _BYTES), places]), VI), VF)


def _emit_nibble(b: Builder, facts: Kind, word: Value, nibble: int) -> Value:
    """Four bits of each word as float32, by a table that ignores the bits above them."""
    table = ir.Constant(VF, [float(code - facts.offset) for code in range(16)])
    index = word
    if nibble in SHUFFLED_NIBBLES:
        places = ir.Constant(_BYTES, [at % 8 // 4 * 32 + 4 * nibble if at % 4 == 0 else 0 for at in range(64)])
        shift = get_function(b, "llvm.x86.avx512.pmultishift.qb.512", _BYTES, [_BYTES, _BYTES])
        index = b.bitcast(b.call(shift, [places, b.bitcast(word, _BYTES)]), VI)
    elif nibble:
        index = b.lshr(word, _integers(4 * nibble))
    look_up = get_function(b, "llvm.x86.avx512.permvar.sf.512", VF, [VF, VI])
    return b.call(look_up, [table, index])
