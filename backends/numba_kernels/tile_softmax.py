"""The pieces of attention on matrix tiles: scores, softmax across lanes, sums of values. Knows buffers, no blocks or sequences.

A *pass* is 64 keys in 4 groups of 16, met by up to 16 rows of (query, head). Keys are the rows of the left factor and lie in the pool as
tiles want them; so scores come out with a key in each row and the queries side by side, and nothing of the pool is transposed:

    keys [16, D]  x  queries [D, 16]   =  scores [16 keys, 16 lanes]          for each of the 4 groups
    weights [16 rows, 32 keys]  x  values [32 keys, D]  =  sums [16 rows, D]  for each half of the pass

Up to 4 rows are laid out 4 times, up to 8 twice, each time for another group of keys, so that no lane of the softmax is idle:

    width 4     lane   0 1 2 3 | 4 5 6 7 | 8 … 11 | 12 … 15
                row    0 1 2 3 | 0 1 2 3 | 0 … 3  | 0 … 3
                group     0    |    1    |   2    |   3

Values are laid in pairs of keys by an instruction that works within 128 bits; the columns of `sums` are so permuted until `order_columns`.

Invariant: what a row gets does not depend on the width or on the other rows: the weights of a group are added key by key, the groups as
(0 + 1) + (2 + 3); a key that a row does not see adds an exact zero.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.parts import emit_fold_row, emit_fold_states
from backends.numba_kernels.softmax import SLACK, emit_cap
from backends.numba_kernels.vectors import (
    F32,
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
    emit_exp2,
    emit_fma,
    emit_load,
    emit_maximum,
    emit_prefetch,
    emit_round_pair,
    emit_splat,
    emit_store,
    emit_transpose,
    get_function,
    has_scales,
    intrinsic,
)

GROUPS = 4  # of keys in a pass
PASS_KEYS = GROUPS * LANES
TILE_BYTES = 1024  # 16 rows of 64 bytes

_I8 = ir.IntType(8)
_POINTER = _I8.as_pointer()
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


def _tile(number: int) -> Value:
    return ir.Constant(_I8, number)


def _call(b: Builder, name: str, *arguments: Value) -> None:
    b.call(get_function(b, f"llvm.x86.{name}", ir.VoidType(), [argument.type for argument in arguments]), arguments)


def _load_tile(b: Builder, number: int, address: Value, stride: Value) -> None:
    _call(b, "tileloadd64", _tile(number), b.inttoptr(address, _POINTER), stride)


def _store_tile(b: Builder, number: int, address: Value, stride: Value) -> None:
    _call(b, "tilestored64", _tile(number), b.inttoptr(address, _POINTER), stride)


def _lanes(b: Builder, x: Value, order: list[int]) -> Value:
    return b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, len(order)), order))


@intrinsic
def score_keys(
    typing_context: Any,
    kind: Any,
    sources: Any,
    stride: Any,
    queries: Any,
    steps: Any,
    scores: Any,
    is_half: Any,
    following: Any,
) -> Any:
    """scores [4 groups, 16 keys, 16 lanes] float32 = keys @ queries; of groups 0 and 1 alone if `is_half`.

    `sources`: address of 4 int64 addresses, of the first key of each group; keys are `stride` bytes apart. `queries`: `steps` tiles, each
    of 16 rows of 16 words, a word being two neighbouring numbers of the head dimension. `following`: address of as many addresses of keys;
    the memory of the last 2 groups is asked for unless the pool's `kind` has scales.
    """
    signature = types.void(kind, *[types.int64] * 5, types.boolean, types.int64)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, sources, stride, queries, steps, scores, is_half, following = arguments
        asked = None if has_scales(kind) else following

        def emit(groups: int) -> None:
            _emit_scores(b, list(range(groups)), sources, stride, queries, steps, scores, asked)

        with b.if_else(is_half) as (half, whole):
            with half:
                emit(GROUPS // 2)
            with whole:
                emit(GROUPS)
        return context.get_dummy_value()

    return signature, generate


def _emit_scores(
    b: Builder,
    groups: list[int],
    sources: Value,
    stride: Value,
    queries: Value,
    steps: Value,
    scores: Value,
    following: Value | None = None,
) -> None:
    """Multiply some groups of keys by the queries; `following` as in `score_keys`."""
    line = I64(64)
    asked = [] if following is None else [emit_load(b, emit_at(b, following, 8 * g), I64) for g in (2, 3)]
    lines = [(base, row) for base in asked for row in range(LANES)]
    keys = [emit_load(b, emit_at(b, sources, 8 * g), I64) for g in groups]
    for g in groups:
        _call(b, "tilezero", _tile(g))
    with cgutils.for_range_slice(b, I64(0), steps, I64(1), intp=I64) as (step, _):
        _load_tile(b, 6, b.add(queries, b.shl(step, I64(10))), line)
        for g, key in zip(groups, keys, strict=True):
            _load_tile(b, 4 + g % 2, b.add(key, b.shl(step, I64(6))), stride)
            _call(b, "tdpbf16ps", _tile(g), _tile(4 + g % 2), _tile(6))
            share = len(lines) // len(groups)
            for base, row in lines[g * share : (g + 1) * share]:
                emit_prefetch(b, emit_at(b, b.add(base, b.shl(step, I64(10))), 64 * row))
    for g in groups:
        _store_tile(b, g, emit_at(b, scores, g * TILE_BYTES), line)


@intrinsic
def add_values(
    typing_context: Any, weights: Any, values: Any, sums: Any, columns: Any, is_half: Any, is_first: Any
) -> Any:
    """sums [16 rows, 16 * columns] float32 (+)= weights @ values; begun anew if `is_first`. `columns` is even.

    `weights`: a tile of 16 rows of 32 bfloat16 for each half of the pass. `values`: rows of 16 * columns words, one for each two keys.
    """
    signature = types.void(*[types.int64] * 4, types.boolean, types.boolean)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        weights, values, sums, columns, is_half, is_first = arguments
        stride = b.shl(columns, I64(6))
        line = I64(64)

        def emit(first: Value, width: int) -> None:
            at = b.shl(first, I64(6))
            with b.if_else(is_first) as (begins, goes_on):
                with begins:
                    for n in range(width):
                        _call(b, "tilezero", _tile(n))
                with goes_on:
                    for n in range(width):
                        _load_tile(b, n, emit_at(b, b.add(sums, at), 64 * n), stride)

            def add(half: int) -> None:
                _load_tile(b, 4 + half, emit_at(b, weights, half * TILE_BYTES), line)
                base = b.add(b.add(values, at), b.mul(stride, I64(half * LANES)))
                for n in range(width):
                    _load_tile(b, 6 + n % 2, emit_at(b, base, 64 * n), stride)
                    _call(b, "tdpbf16ps", _tile(n), _tile(4 + half), _tile(6 + n % 2))

            add(0)
            with b.if_then(b.not_(is_half)):
                add(1)
            for n in range(width):
                _store_tile(b, n, emit_at(b, b.add(sums, at), 64 * n), stride)

        whole = b.and_(columns, I64(~3))
        with cgutils.for_range_slice(b, I64(0), whole, I64(4), intp=I64) as (first, _):
            emit(first, 4)
        with b.if_then(b.icmp_signed("!=", columns, whole)):
            emit(whole, 2)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fold_lanes(
    typing_context: Any, sums: Any, state: Any, other_sums: Any, other_state: Any, rows: Any, columns: Any
) -> Any:
    """`parts.fold` for up to 16 rows of sums [16, columns], states as in `weigh_lanes`; base 2."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        sums, state, other_sums, other_state, rows, columns = arguments
        old, other = ([emit_load(b, emit_at(b, at, offset), VF) for offset in (0, 64)] for at in (state, other_state))
        highest, total, factor, other_factor = emit_fold_states(b, old[0], other[0], old[1], other[1])
        # What the other state holds is used up: it has room for the factors.
        for at, x in ((state, highest), (emit_at(b, state, 64), total)):
            emit_store(b, x, at)
        emit_store(b, factor, other_state)
        emit_store(b, other_factor, emit_at(b, other_state, 64))
        stride = b.shl(columns, I64(2))
        with cgutils.for_range_slice(b, I64(0), rows, I64(1), intp=I64) as (row, _):
            at, lane = b.mul(row, stride), b.add(other_state, b.shl(row, I64(2)))
            factors = [emit_splat(b, emit_load(b, emit_at(b, lane, offset), F32), VF) for offset in (0, 64)]
            emit_fold_row(b, b.add(sums, at), b.add(other_sums, at), columns, factors[0], factors[1])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def weigh_lanes(
    typing_context: Any,
    kind: Any,
    width: Any,
    scores: Any,
    weights: Any,
    words: Any,
    is_half: Any,
    is_masked: Any,
    start: Any,
    limits: Any,
    scale: Any,
    cap: Any,
    state: Any,
    scales: Any,
    sources: Any,
    source_stride: Any,
    queries: Any,
    steps: Any,
    next_scores: Any,
    following: Any,
    offset: Any,
    row_bytes: Any,
) -> Any:
    """Online softmax of a pass: scores (see `score_keys`, overwritten) → weights in tiles as `add_values` takes them.

    `width` (4, 8, 16): lanes for different rows. `words`: 16 rows of 16 words to work in. `is_masked`: some lane does not see some key;
    lane i sees keys limits[i] … limits[16 + i] (int32), the pass begins at key `start`. Scores are multiplied by `scale` > 0; if `cap` > 0
    they become cap * tanh(score / cap). `state`: maxima (base 2) and sums, 16 lanes each, updated, followed by room for the factors by
    which earlier sums must shrink. For a `kind` with scales, `scales` is the address of 64 for the keys and 64 for the values.

    Meanwhile the values of the next pass are asked for, row by row, because no more than some 16 requests can be under way: `following`,
    unless it is 0, is the address of the addresses of its 4 groups of keys; `offset` bytes further lie 16 values of `row_bytes`
    bytes each. Whoever lays out keys or multiplies them asks for the next ones: so memory is never idle.

    In between, because the processor's tiles and vectors work side by side, the next 16 rows' scores are computed as by `score_keys`, from
    `sources` and `queries` to `next_scores`, unless `queries` is 0; it must be 0 for a width under 16. Returns whether any factor is not 1.
    """
    signature = types.boolean(
        kind, *[types.int64] * 4, types.boolean, types.boolean, types.int64, types.int64,
        types.float32, types.float32, *[types.int64] * 10,
    )  # fmt: skip
    is_scaled = has_scales(kind)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, width, *rest = arguments
        results = []
        end = b.append_basic_block("weigh.end")
        blocks = {lanes: b.append_basic_block(f"weigh.{lanes}") for lanes in (16, 8, 4)}
        switch = b.switch(width, blocks[16])
        for lanes, block in blocks.items():
            if lanes < LANES:
                switch.add_case(I64(lanes), block)
            b.position_at_end(block)
            shrinks = _emit_weigh(b, lanes, is_scaled, *rest)
            results.append((shrinks, b.block))
            b.branch(end)
        b.position_at_end(end)
        answer = b.phi(ir.IntType(1))
        for shrinks, block in results:
            answer.add_incoming(shrinks, block)
        return answer

    return signature, generate


def _emit_weigh(
    b: Builder,
    width: int,
    is_scaled: bool,
    scores: Value,
    weights: Value,
    words: Value,
    is_half: Value,
    is_masked: Value,
    start: Value,
    limits: Value,
    scale: Value,
    cap: Value,
    state: Value,
    scales: Value,
    sources: Value,
    source_stride: Value,
    queries: Value,
    steps: Value,
    next_scores: Value,
    following: Value,
    offset: Value,
    row_bytes: Value,
) -> Value:
    """Emit `weigh_lanes` for one width. A vector holds one key of each of `LANES // width` groups."""
    together = LANES // width
    num_vectors = GROUPS // together  # vectors for the same place in every group
    first_group = [lane // width for lane in range(LANES)]
    # Fewer groups than share a vector cannot be left out; they are masked.
    count = b.select(is_half, I64(num_vectors // 2 or 1), I64(num_vectors))
    has_cap = b.fcmp_ordered(">", cap, ir.Constant(F32, 0.0))
    to_base_2 = ir.Constant(F32, 1 / math.log(2))
    factor = emit_splat(b, b.select(has_cap, to_base_2, b.fmul(scale, to_base_2)), VF)
    wide_scale, wide_cap = emit_splat(b, scale, VF), emit_splat(b, cap, VF)
    lowest, highest = emit_load(b, limits, VI), emit_load(b, emit_at(b, limits, 64), VI)
    old = emit_load(b, state, VF)
    start_lanes = b.add(
        emit_splat(b, b.trunc(start, I32), VI), ir.Constant(VI, [LANES * group for group in first_group])
    )
    best = cgutils.alloca_once_value(b, constant(-math.inf))
    zero, one = I64(0), I64(1)

    def spread(base: Value, key: Value) -> Value:
        """Return a number for each lane: that of its key, from 64 float32 at `base`; `key` counts in lane 0."""
        at = b.add(base, b.shl(key, I64(2)))
        result = emit_splat(b, emit_load(b, at, F32), VF)
        for group in range(1, together):
            other = emit_splat(b, emit_load(b, emit_at(b, at, 64 * group), F32), VF)
            result = b.select(_mask([g == group for g in first_group]), other, result)
        return result

    def fetch(groups: list[Value], row: Value) -> None:
        """Ask for a row of each of some groups of the next pass."""
        with b.if_then(b.icmp_signed("!=", following, zero)):
            for group in groups:
                base = emit_load(b, b.add(following, b.shl(group, I64(3))), I64)
                place = b.add(b.add(base, offset), b.mul(row, row_bytes))
                with cgutils.for_range_slice(b, zero, row_bytes, I64(64), intp=I64) as (i, _):
                    emit_prefetch(b, b.add(place, i))

    def find_best(is_special: bool) -> None:
        """Gather the scores of a vector's lanes, see to caps and masks, and find each lane's maximum before the multiplication."""
        with cgutils.for_range_slice(b, zero, count, one, intp=I64) as (vector, _):
            tile = b.add(scores, b.mul(vector, I64(together * TILE_BYTES)))
            first_key = b.mul(vector, I64(together * LANES))
            groups = [b.add(b.mul(vector, I64(together)), I64(group)) for group in range(together)]
            with cgutils.for_range_slice(b, zero, I64(LANES), one, intp=I64) as (j, _):
                at, key = b.add(tile, b.shl(j, I64(6))), b.add(first_key, j)
                fetch([I64(0), I64(1)] if together == GROUPS else groups, j)
                x = emit_load(b, at, VF)
                for group in range(1, together):
                    other = emit_load(b, emit_at(b, at, group * TILE_BYTES), VF)
                    x = b.select(_mask([g == group for g in first_group]), other, x)
                if is_scaled:
                    x = b.fmul(x, spread(scales, key))
                if is_special:
                    keys = b.add(start_lanes, emit_splat(b, b.trunc(key, I32), VI))
                    is_seen = b.and_(b.icmp_signed(">=", keys, lowest), b.icmp_signed("<=", keys, highest))
                    x = b.select(is_seen, emit_cap(b, x, has_cap, wide_scale, wide_cap), constant(-math.inf))
                if is_special or is_scaled or together > 1:
                    emit_store(b, x, at)
                b.store(emit_maximum(b, x, b.load(best)), best)

    with b.if_else(b.or_(has_cap, is_masked)) as (special, plain):
        with special:
            find_best(True)
        with plain:
            find_best(False)
    highest_score = b.load(best)
    for step in (4, 8):
        if step >= width:
            turned = _lanes(b, highest_score, [lane ^ step for lane in range(LANES)])
            highest_score = emit_maximum(b, highest_score, turned)
    new = b.fmul(highest_score, factor)
    new = b.select(b.fcmp_ordered(">", new, b.fadd(old, constant(SLACK))), new, old)
    minus_new = b.fneg(new)

    totals = [cgutils.alloca_once_value(b, constant(0.0)) for _ in range(num_vectors)]
    for vector in range(num_vectors):
        with b.if_then(b.icmp_signed("<", I64(vector), count)):
            tile = emit_at(b, scores, vector * together * TILE_BYTES)
            row = emit_at(b, words, vector % 2 * (LANES // 2) * 64)
            if width == LANES:
                with b.if_then(b.icmp_signed("!=", queries, zero)):
                    _emit_scores(b, [vector], sources, source_stride, queries, steps, next_scores)
            with cgutils.for_range_slice(b, zero, I64(LANES // 2), one, intp=I64) as (pair, _):
                pair_weights = []
                if together == GROUPS:
                    for odd in (0, 1):
                        fetch([I64(2), I64(3)], emit_at(b, b.shl(pair, one), odd))
                for odd in (0, 1):
                    at = emit_at(b, b.add(tile, b.shl(pair, I64(7))), 64 * odd)
                    weight = emit_exp2(b, emit_fma(b, emit_load(b, at, VF), factor, minus_new))
                    b.store(b.fadd(b.load(totals[vector]), weight), totals[vector])
                    if is_scaled:
                        key = emit_at(b, b.shl(pair, one), vector * together * LANES + odd)
                        weight = b.fmul(weight, spread(emit_at(b, scales, PASS_KEYS * 4), key))
                    pair_weights.append(weight)
                emit_store(b, _emit_pair(b, *pair_weights), b.add(row, b.shl(pair, I64(6))))
            if width == LANES and vector % 2:
                rows = [emit_load(b, emit_at(b, words, 64 * i), VI) for i in range(LANES)]
                for lane, x in enumerate(emit_transpose(b, rows)):
                    emit_store(b, x, emit_at(b, weights, vector // 2 * TILE_BYTES + lane * 64))
    if width < LANES:
        _emit_arrange(b, width, words, weights)

    # The groups of a vector stand in its lanes: (0 + 1) + (2 + 3) whichever way.
    added = [b.load(total) for total in totals]
    for step in (4, 8):
        if step >= width:
            added = [b.fadd(x, _lanes(b, x, [lane ^ step for lane in range(LANES)])) for x in added]
    while len(added) > 1:
        added = [b.fadd(added[i], added[i + 1]) for i in range(0, len(added), 2)]
    shrink = emit_exp2(b, b.fsub(old, new))
    sums_at = emit_at(b, state, 64)
    emit_store(b, new, state)
    emit_store(b, b.fadd(b.fmul(emit_load(b, sums_at, VF), shrink), added[0]), sums_at)
    emit_store(b, shrink, emit_at(b, state, 128))
    differs = b.fcmp_unordered("!=", shrink, constant(1.0))
    return b.icmp_signed("!=", b.bitcast(differs, ir.IntType(LANES)), ir.IntType(LANES)(0))


def _mask(chosen: list[bool]) -> Value:
    return ir.Constant(ir.VectorType(ir.IntType(1), LANES), [int(is_chosen) for is_chosen in chosen])


def _emit_pair(b: Builder, even: Value, odd: Value) -> Value:
    """Round two vectors to bfloat16 and put them into the halves of words."""
    halves = emit_round_pair(b, even, odd)
    return b.bitcast(_lanes(b, halves, [i // 2 + LANES * (i % 2) for i in range(2 * LANES)]), VI)


def _emit_arrange(b: Builder, width: int, words: Value, weights: Value) -> None:
    """Transpose words [8 pairs of keys, lanes] (twice for a width of 8) into the tiles of weights."""
    rows = [emit_load(b, emit_at(b, words, 64 * i), VI) for i in range(LANES if width == 8 else LANES // 2)]
    rows += [ir.Constant(VI, ir.Undefined)] * (LANES - len(rows))
    for lane, x in enumerate(emit_transpose(b, rows)):
        group, row = divmod(lane, width)
        low = emit_at(b, weights, row * 64 + group % 2 * 32)
        if width == 8:
            emit_store(b, _lanes(b, x, list(range(8))), low)
            emit_store(b, _lanes(b, x, list(range(8, LANES))), emit_at(b, low, TILE_BYTES))
        else:
            emit_store(b, _lanes(b, x, list(range(8))), emit_at(b, low, group // 2 * TILE_BYTES))
