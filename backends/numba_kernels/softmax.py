"""Online softmax of rows of scores, on vectors, and what it shares with that of matrix tiles (`tile_softmax`). Knows no keys or values.

Maxima are of base 2: a score's weight is 2 ** (score * scale * log2 e - maximum). Invariant: a key that a row does not see has a weight of
exactly zero, and a NaN among the scores comes out as a NaN.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.parts import NO_SCORE
from backends.numba_kernels.vectors import (
    F32,
    HAS_BF16_DOT,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Builder,
    Value,
    constant,
    emit_at,
    emit_exp,
    emit_exp2,
    emit_fma,
    emit_load,
    emit_maximum,
    emit_reduce,
    emit_round_bf16,
    emit_round_pair,
    emit_splat,
    emit_store,
    has_scales,
    intrinsic,
    is_bfloat16,
)

VECTORS = 4
ROW_KEYS = VECTORS * LANES
# A maximum follows the scores only when they pass it by so much (base 2): sums hardly ever have to shrink, and weights stay under 256.
SLACK = 8.0
# The state of a row: its maximum, room for its sum, and what each lane has summed up so far. Lanes are added at the end alone.
TOTALS_AT, STATE_BYTES = 64, 128


def emit_cap(b: Builder, score: Value, has_cap: Value, scale: Value, cap: Value) -> Value:
    """cap * tanh(score * scale / cap) if there is a cap: tanh(y) = 1 - 2 / (exp(2 y) + 1), held where exp does not overflow."""
    before = b.block
    capping, after = b.append_basic_block("capping"), b.append_basic_block("capped")
    b.cbranch(has_cap, capping, after)
    b.position_at_end(capping)
    y = b.fdiv(b.fmul(score, scale), cap)
    y = b.select(b.fcmp_ordered(">", y, constant(20.0)), constant(20.0), y)
    e = emit_exp(b, b.fadd(y, y))
    bounded = b.fmul(cap, b.fsub(constant(1.0), b.fdiv(constant(2.0), b.fadd(e, constant(1.0)))))
    b.branch(after)
    b.position_at_end(after)
    result = b.phi(VF)
    result.add_incoming(score, before)
    result.add_incoming(bounded, capping)
    return result


@intrinsic
def weigh_row(
    typing_context: Any,
    tag: Any,
    kind: Any,
    scores: Any,
    weights: Any,
    first: Any,
    last: Any,
    scale: Any,
    cap: Any,
    state: Any,
    scales: Any,
) -> Any:
    """One row of online softmax: scores (ROW_KEYS float32) → weights in the type of `tag`.

    Scores outside first … last - 1 weigh zero, whatever stands there. The others are multiplied by `scale` > 0 and, if `cap` > 0, become
    cap * tanh(score / cap). `state` (see `begin_row`) is updated. Returns the factor by which earlier sums must shrink.
    For a `kind` with scales, `scales` is the address of ROW_KEYS float32 that multiply the scores, and as many that multiply the weights that
    are written (but not their sum).
    """
    signature = types.float32(tag, kind, *[types.int64] * 4, types.float32, types.float32, *[types.int64] * 2)
    is_bf16, is_scaled = is_bfloat16(tag), has_scales(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, _, *operands = arguments
        _, _, first, last, _, cap, *_ = operands
        has_cap = b.fcmp_ordered(">", cap, ir.Constant(F32, 0.0))
        is_cut = b.or_(b.icmp_signed(">", first, I64(0)), b.icmp_signed("<", last, I64(ROW_KEYS)))
        results = []
        with b.if_else(b.or_(has_cap, is_cut)) as (special, plain):
            for block, is_special in ((special, True), (plain, False)):
                with block:
                    shrink = _emit_weigh(b, is_bf16, is_scaled, has_cap if is_special else None, *operands)
                    results.append((shrink, b.block))
        answer = b.phi(F32)
        for shrink, block in results:
            answer.add_incoming(shrink, block)
        return answer

    return signature, generate


def _emit_weigh(
    b: Builder,
    is_bf16: bool,
    is_scaled: bool,
    has_cap: Value | None,
    scores: Value,
    weights: Value,
    first: Value,
    last: Value,
    scale: Value,
    cap: Value,
    state: Value,
    scales: Value,
) -> Value:
    """Emit `weigh_row`, without looking at limits and caps if `has_cap` is None."""
    to_base_2 = ir.Constant(F32, 1 / math.log(2))
    factor = b.fmul(scale, to_base_2)
    x = [emit_load(b, emit_at(b, scores, 64 * v), VF) for v in range(VECTORS)]
    if is_scaled:
        x = [b.fmul(score, emit_load(b, emit_at(b, scales, 64 * v), VF)) for v, score in enumerate(x)]
    if has_cap is not None:
        factor = b.select(has_cap, to_base_2, factor)
        low, high = (emit_splat(b, b.trunc(limit, I32), VI) for limit in (first, last))
        wide_scale, wide_cap = emit_splat(b, scale, VF), emit_splat(b, cap, VF)
        for v in range(VECTORS):
            keys = ir.Constant(VI, [LANES * v + lane for lane in range(LANES)])
            is_seen = b.and_(b.icmp_signed(">=", keys, low), b.icmp_signed("<", keys, high))
            x[v] = b.select(is_seen, emit_cap(b, x[v], has_cap, wide_scale, wide_cap), constant(-math.inf))
    old = emit_load(b, state, F32)
    old_totals = emit_load(b, emit_at(b, state, TOTALS_AT), VF)
    best = emit_maximum(b, emit_maximum(b, x[0], x[1]), emit_maximum(b, x[2], x[3]))
    limit = emit_splat(b, b.fadd(old, ir.Constant(F32, SLACK)), VF)
    passes = b.bitcast(b.fcmp_ordered(">", b.fmul(best, emit_splat(b, factor, VF)), limit), ir.IntType(LANES))
    before = b.block
    rising, after = b.append_basic_block("rising"), b.append_basic_block("risen")
    b.cbranch(b.icmp_unsigned("!=", passes, ir.IntType(LANES)(0)), rising, after)
    b.position_at_end(rising)
    highest = b.fmul(emit_reduce(b, best, lambda one, other: emit_maximum(b, one, other)), factor)
    smaller = emit_exp2(b, emit_splat(b, b.fsub(old, highest), VF))
    shrunk_totals, shrink_here = b.fmul(old_totals, smaller), b.extract_element(smaller, I32(0))
    emit_store(b, highest, state)
    b.branch(after)
    b.position_at_end(after)
    new, shrink, totals = b.phi(F32), b.phi(F32), b.phi(VF)
    for result, kept, risen in (
        (new, old, highest),
        (shrink, F32(1.0), shrink_here),
        (totals, old_totals, shrunk_totals),
    ):
        result.add_incoming(kept, before)
        result.add_incoming(risen, rising)
    wide_factor, minus_new = emit_splat(b, factor, VF), emit_splat(b, b.fneg(new), VF)
    weighed = [emit_exp2(b, emit_fma(b, score, wide_factor, minus_new)) for score in x]
    added = b.fadd(b.fadd(weighed[0], weighed[1]), b.fadd(weighed[2], weighed[3]))
    emit_store(b, b.fadd(totals, added), emit_at(b, state, TOTALS_AT))
    if is_scaled:
        value_scales = emit_at(b, scales, 4 * ROW_KEYS)
        weighed = [b.fmul(w, emit_load(b, emit_at(b, value_scales, 64 * v), VF)) for v, w in enumerate(weighed)]
    if not is_bf16:
        for v, weight in enumerate(weighed):
            emit_store(b, weight, emit_at(b, weights, 64 * v))
    elif HAS_BF16_DOT:
        for v in range(0, VECTORS, 2):
            emit_store(b, emit_round_pair(b, weighed[v], weighed[v + 1]), emit_at(b, weights, 32 * v))
    else:
        for v, weight in enumerate(weighed):
            emit_store(b, emit_round_bf16(b, weight), emit_at(b, weights, 32 * v))
    return shrink


@intrinsic
def begin_row(typing_context: Any, state: Any) -> Any:
    """Begin the state of a row that has seen no key."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        emit_store(b, F32(NO_SCORE), arguments[0])
        emit_store(b, constant(0.0), emit_at(b, arguments[0], TOTALS_AT))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def end_row(typing_context: Any, state: Any) -> Any:
    """Put the sum of a row's weights behind its maximum, as `parts` wants it."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        totals = emit_load(b, emit_at(b, arguments[0], TOTALS_AT), VF)
        total = emit_reduce(b, totals, lambda one, other: b.fadd(one, other))
        emit_store(b, total, emit_at(b, arguments[0], 4))
        return context.get_dummy_value()

    return types.void(types.int64), generate
