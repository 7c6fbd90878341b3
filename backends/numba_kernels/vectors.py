"""Vector code that a loop vectoriser does not find: register-tiled products, transposes, softmax of a row, bf16 rounding.

Written as LLVM IR on 16-lane vectors; LLVM maps them to whatever the processor has. What is chosen here is chosen by feature flags, never
by the processor's name. Addresses are int64, sizes are in bytes unless an argument says otherwise. A `tag` argument selects the element
type at compile time: a uint16 stands for bfloat16, a float32 for itself. Invariant: no operation here assumes finite numbers, so a NaN in
an input is a NaN in the output.

A *step* is one 32-bit word of the inner dimension: two bfloat16 or one float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import core, extending, types

# Numba has no usable types for these.
intrinsic: Any = extending.intrinsic
cgutils: Any = core.cgutils
numba_config: Any = core.config

LANES = 16  # lanes of a vector of 32-bit words
NUM_COLUMNS = 2  # vectors in a tile's row, at most


def _features() -> set[str]:
    """Return the features that Numba compiles for: the host's, unless its environment variables say otherwise."""
    if numba_config.CPU_FEATURES is not None:
        return {word[1:] for word in numba_config.CPU_FEATURES.split(",") if word.startswith("+")}
    if numba_config.CPU_NAME is not None:
        return set()
    return {name for name, has in llvm.get_host_cpu_features().items() if has}


FEATURES = _features()
HAS_WIDE = "avx512f" in FEATURES
HAS_BF16_DOT = "avx512bf16" in FEATURES and HAS_WIDE and llvm.llvm_version_info[0] >= 17
HAS_FMA = "fma" in FEATURES or "neon" in FEATURES
# Rows of a tile: 12 x 2 sums leave 8 of 32 wide registers for operands. Half-width machines have 16 registers, two for each sum.
MAX_ROWS = 12 if HAS_WIDE else 3

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
VF, VI, VH = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)
# 2 ** r on [-1/2, 1/2] with relative error 9e-8, exact at 0; fitted by reweighted least squares.
_EXP2 = (0.6931469775957919, 0.24022242081005585, 0.05550733746587652, 0.009671512910237252, 0.0013264726891831723)


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


_VB = ir.VectorType(BFloat(), 2 * LANES)

Builder = Any  # llvmlite has no types
Value = Any


def get_function(b: Builder, name: str, result: Any, arguments: Sequence[Any]) -> Value:
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arguments), name)


def emit_splat(b: Builder, scalar: Value, vector: Any) -> Value:
    lane = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    first = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(lane, ir.Constant(vector, ir.Undefined), first)


def constant(value: float) -> Value:
    return ir.Constant(VF, [value] * LANES)


def emit_load(b: Builder, address: Value, kind: Any) -> Value:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def emit_store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def emit_at(b: Builder, base: Value, offset: int) -> Value:
    return b.add(base, ir.Constant(I64, offset)) if offset else base


def emit_fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    if HAS_FMA:
        return b.call(get_function(b, "llvm.fma.v16f32", VF, [VF, VF, VF]), [x, y, z])
    return b.fadd(b.fmul(x, y), z)


def emit_maximum(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def emit_reduce(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine the lanes of x in a fixed tree."""
    width = LANES
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        x = combine(b.shuffle_vector(x, x, low), b.shuffle_vector(x, x, high))
    return b.extract_element(x, ir.Constant(I32, 0))


def emit_exp(b: Builder, x: Value) -> Value:
    """e ** x for x <= 88: 2 ** n by exponent bits times a polynomial on [-1/2, 1/2]; relative error about 1e-7, NaN stays NaN."""
    x = b.select(b.fcmp_ordered("<", x, constant(-87.0)), constant(-87.0), x)
    log2e, magic = (
        constant(1 / math.log(2)),
        constant(1.5 * 2**23),
    )  # adding `magic` rounds to an integer in the low bits
    rounded = emit_fma(b, x, log2e, magic)
    rest = emit_fma(b, x, log2e, b.fneg(b.fsub(rounded, magic)))
    result = constant(math.log(2) ** 7 / math.factorial(7))
    for k in range(6, -1, -1):
        result = emit_fma(b, result, rest, constant(math.log(2) ** k / math.factorial(k)))
    power = b.add(b.bitcast(rounded, VI), ir.Constant(VI, [127] * LANES))
    return b.fmul(result, b.bitcast(b.shl(power, ir.Constant(VI, [23] * LANES)), VF))


def emit_exp2(b: Builder, x: Value) -> Value:
    """2 ** x for x < 128, relative error 9e-8, exact at integers; below -125 exactly 0; NaN stays NaN."""
    magic = constant(1.5 * 2**23 + 127)  # adding it rounds, and leaves the exponent of the power in the low bits
    rounded = b.fadd(x, magic)
    rest = b.fsub(x, b.fsub(rounded, magic))
    result = constant(_EXP2[-1])
    for coefficient in (*_EXP2[-2::-1], 1.0):
        result = emit_fma(b, result, rest, constant(coefficient))
    power = b.bitcast(b.shl(b.bitcast(rounded, VI), ir.Constant(VI, [23] * LANES)), VF)
    is_seen = b.fcmp_unordered(">=", x, constant(-125.0))
    return b.select(is_seen, b.fmul(result, power), constant(0.0))


def emit_round_bf16(b: Builder, x: Value) -> Value:
    """Round 16 float32 to bfloat16 bits, ties to even; a NaN stays a NaN."""
    if HAS_BF16_DOT:
        narrow = ir.VectorType(BFloat(), LANES)
        return b.bitcast(b.call(get_function(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, [VF]), [x]), VH)
    bits = b.bitcast(x, VI)
    odd = b.and_(b.lshr(bits, ir.Constant(VI, [16] * LANES)), ir.Constant(VI, [1] * LANES))
    rounded = b.add(bits, b.add(odd, ir.Constant(VI, [0x7FFF] * LANES)))
    rounded = b.select(b.fcmp_unordered("uno", x, x), ir.Constant(VI, [0x7FC00000] * LANES), rounded)
    return b.trunc(b.lshr(rounded, ir.Constant(VI, [16] * LANES)), VH)


def emit_round_pair(b: Builder, first: Value, second: Value) -> Value:
    """Round 32 float32 to bfloat16 bits, those of `first` first. Needs HAS_BF16_DOT."""
    wide = ir.VectorType(BFloat(), 2 * LANES)
    both = b.call(get_function(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", wide, [VF, VF]), [second, first])
    return b.bitcast(both, ir.VectorType(I16, 2 * LANES))


def is_bfloat16(tag: Any) -> bool:
    return bool(tag == types.uint16)


def has_scales(kind: Any) -> bool:
    """Say whether rows of a pool are 8-bit elements with a scale, see `backends.numba_kernels.quantised`."""
    return bool(kind in (types.int8, types.uint8))


def emit_prefetch(b: Builder, address: Value, *, to_write: bool = False) -> None:
    """Ask for the cache line at an address, into L2: to read, or alone among the processors, to write."""
    pointer = ir.IntType(8).as_pointer()
    function = get_function(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32, I32, I32])
    write = ir.Constant(I32, int(to_write))
    b.call(function, [b.inttoptr(address, pointer), write, ir.Constant(I32, 2), ir.Constant(I32, 1)])


def emit_multiply_add(b: Builder, is_bf16: bool, total: Value, column: Value, word: Value) -> Value:
    """Add the products of one step: column, 16 words; word, one word for all lanes."""
    if not is_bf16:
        return emit_fma(b, b.bitcast(column, VF), b.bitcast(word, VF), total)
    if HAS_BF16_DOT:
        dot = get_function(b, "llvm.x86.avx512bf16.dpbf16ps.512", VF, [VF, _VB, _VB])
        return b.call(dot, [total, b.bitcast(column, _VB), b.bitcast(word, _VB)])
    for part in (_low_half, _high_half):
        total = emit_fma(b, part(b, column), part(b, word), total)
    return total


def _low_half(b: Builder, words: Value) -> Value:
    return b.bitcast(b.shl(words, ir.Constant(VI, [16] * LANES)), VF)


def _high_half(b: Builder, words: Value) -> Value:
    return b.bitcast(b.and_(words, ir.Constant(VI, [0xFFFF0000] * LANES)), VF)


@intrinsic
def multiply_tile(
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
    ahead: Any,
) -> Any:
    """c[r, :] (+)= sum over steps of a[r, step] * b[step, :] for `rows` ≤ MAX_ROWS rows and `columns` ≤ 2 vectors of float32.

    a: `rows` rows of `steps` words, a_stride bytes apart. b: `steps` rows of 16 * columns words, b_stride bytes apart. c: float32,
    c_stride bytes apart; kept and added to if `adds`. Each line of b also asks for the one `ahead` bytes further, unless that is 0. A row's sum is the same whatever the number of rows.
    """
    signature = types.void(tag, *[types.int64] * 9, types.boolean, types.int64)
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, rows, columns, a, a_stride, base, b_stride, c, c_stride, steps, adds, ahead = arguments
        end = b.append_basic_block("tile.end")
        key = b.add(b.mul(rows, ir.Constant(I64, NUM_COLUMNS + 1)), columns)
        switch = b.switch(key, end)
        for r in range(1, MAX_ROWS + 1):
            for n in range(1, NUM_COLUMNS + 1):
                block = b.append_basic_block(f"tile.{r}x{n}")
                switch.add_case(ir.Constant(I64, r * (NUM_COLUMNS + 1) + n), block)
                b.position_at_end(block)
                _emit_tile(b, is_bf16, r, n, a, a_stride, base, b_stride, c, c_stride, steps, adds, ahead)
                b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _emit_tile(
    b: Builder,
    is_bf16: bool,
    rows: int,
    columns: int,
    a: Value,
    a_stride: Value,
    base: Value,
    b_stride: Value,
    c: Value,
    c_stride: Value,
    steps: Value,
    adds: Value,
    ahead: Value,
) -> None:
    zero = ir.Constant(I64, 0)
    a_rows = [a]
    c_rows = [c]
    for _ in range(rows - 1):
        a_rows.append(b.add(a_rows[-1], a_stride))
        c_rows.append(b.add(c_rows[-1], c_stride))
    entry = b.block
    load = b.append_basic_block("load")
    head = b.append_basic_block("head")
    body = b.append_basic_block("body")
    done = b.append_basic_block("done")
    b.cbranch(adds, load, head)
    b.position_at_end(load)
    kept = [[emit_load(b, emit_at(b, row, 64 * n), VF) for n in range(columns)] for row in c_rows]
    b.branch(head)
    b.position_at_end(head)
    step = b.phi(I64)
    b_row = b.phi(I64)
    totals = [[b.phi(VF) for _ in range(columns)] for _ in range(rows)]
    for block, start in ((entry, None), (load, kept)):
        step.add_incoming(zero, block)
        b_row.add_incoming(base, block)
        for r in range(rows):
            for n in range(columns):
                totals[r][n].add_incoming(constant(0.0) if start is None else start[r][n], block)
    b.cbranch(b.icmp_signed("<", step, steps), body, done)
    b.position_at_end(body)
    columns_now = [emit_load(b, emit_at(b, b_row, 64 * n), VI) for n in range(columns)]
    with b.if_then(b.icmp_signed("!=", ahead, ir.Constant(I64, 0))):
        for n in range(columns):
            emit_prefetch(b, emit_at(b, b.add(b_row, ahead), 64 * n))
    last = b.block  # where the loop goes back from
    offset = b.shl(step, ir.Constant(I64, 2))
    for r in range(rows):
        word = emit_splat(b, emit_load(b, b.add(a_rows[r], offset), I32), VI)
        for n in range(columns):
            totals[r][n].add_incoming(emit_multiply_add(b, is_bf16, totals[r][n], columns_now[n], word), last)
    step.add_incoming(b.add(step, ir.Constant(I64, 1)), last)
    b_row.add_incoming(b.add(b_row, b_stride), last)
    b.branch(head)
    b.position_at_end(done)
    for r in range(rows):
        for n in range(columns):
            emit_store(b, totals[r][n], emit_at(b, c_rows[r], 64 * n))


@intrinsic
def transpose_words(typing_context: Any, sources: Any, offset: Any, words: Any, target: Any, target_stride: Any) -> Any:
    """Transpose 16 rows of `words` (8 or 16) 32-bit words; row i is read at address sources[i] + offset; result rows hold 16 words.

    `sources` is the address of 16 int64 addresses.
    """
    signature = types.void(*[types.int64] * 5)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        sources, offset, words, target, stride = arguments
        rows = [b.add(emit_load(b, emit_at(b, sources, 8 * i), I64), offset) for i in range(LANES)]
        with b.if_else(b.icmp_signed("==", words, ir.Constant(I64, LANES))) as (full, half):
            with full:
                _store_rows(b, emit_transpose(b, [emit_load(b, row, VI) for row in rows]), target, stride)
            with half:
                narrow = ir.VectorType(I32, LANES // 2)
                widen = ir.Constant(VI, [i % (LANES // 2) for i in range(LANES)])
                loaded = [emit_load(b, row, narrow) for row in rows]
                turned = emit_transpose(b, [b.shuffle_vector(v, v, widen) for v in loaded])
                _store_rows(b, turned[: LANES // 2], target, stride)
        return context.get_dummy_value()

    return signature, generate


def emit_transpose(b: Builder, rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors of words: swap index bits between row and lane, one bit a round."""
    rows = list(rows)
    for bit in (1, 2, 4, 8):
        low = ir.Constant(VI, [LANES + lane - bit if lane & bit else lane for lane in range(LANES)])
        high = ir.Constant(VI, [LANES + lane if lane & bit else lane + bit for lane in range(LANES)])
        for i in range(LANES):
            if not i & bit:
                x, y = rows[i], rows[i + bit]
                rows[i], rows[i + bit] = b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)
    return rows


def _store_rows(b: Builder, rows: Sequence[Value], target: Value, stride: Value) -> None:
    for row in rows:
        emit_store(b, row, target)
        target = b.add(target, stride)


def emit_pairs(b: Builder, first: Value, second: Value, width: int) -> list[Value]:
    """Load 16 * `width` bfloat16 at each of two addresses; return them in `width` vectors of words, those of `first` in the low halves."""
    wide = ir.VectorType(I16, 2 * LANES)
    words = []
    for n in range(0, width - 1, 2):
        low, high = (emit_load(b, emit_at(b, address, 32 * n), wide) for address in (first, second))
        for start in (0, LANES):
            order = [place for i in range(start, start + LANES) for place in (i, 2 * LANES + i)]
            words.append(b.bitcast(b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * LANES), order)), VI))
    if width % 2:
        low, high = (b.zext(emit_load(b, emit_at(b, at, 32 * (width - 1)), VH), VI) for at in (first, second))
        words.append(b.or_(low, b.shl(high, ir.Constant(VI, [16] * LANES))))
    return words


@intrinsic
def pair_rows(typing_context: Any, first: Any, second: Any, target: Any, count: Any) -> Any:
    """Interleave two rows of `count` bfloat16 (a multiple of 16) into `count` words: first in the low half, second in the high."""
    signature = types.void(*[types.int64] * 4)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        first, second, target, count = arguments

        def pair(i: Value, width: int) -> None:
            at = b.shl(i, I64(1))
            for n, words in enumerate(emit_pairs(b, b.add(first, at), b.add(second, at), width)):
                emit_store(b, words, emit_at(b, b.add(target, b.shl(i, I64(2))), 64 * n))

        whole = b.and_(count, I64(-2 * LANES))
        with cgutils.for_range_slice(b, I64(0), whole, I64(2 * LANES), intp=I64) as (i, _):
            pair(i, 2)
        with b.if_then(b.icmp_signed("!=", count, whole)):
            pair(whole, 1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def scale_row(typing_context: Any, row: Any, count: Any, factor: Any) -> Any:
    """Multiply `count` float32 (a multiple of 16) in place."""
    signature = types.void(types.int64, types.int64, types.float32)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        row, count, factor = arguments
        wide = emit_splat(b, factor, VF)
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), count, ir.Constant(I64, LANES), intp=I64) as (i, _):
            at = b.add(row, b.shl(i, ir.Constant(I64, 2)))
            emit_store(b, b.fmul(emit_load(b, at, VF), wide), at)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def write_row(typing_context: Any, tag: Any, source: Any, target: Any, count: Any, factor: Any, bias: Any) -> Any:
    """target[i] = source[i] * factor + bias[i] for `count` float32 (a multiple of 16), rounded to the type of `tag`.

    `bias` is the address of float32 values; zero for none.
    """
    signature = types.void(tag, *[types.int64] * 3, types.float32, types.int64)
    is_bf16 = is_bfloat16(tag)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, source, target, count, factor, bias = arguments
        wide = emit_splat(b, factor, VF)
        has_bias = b.icmp_signed("!=", bias, ir.Constant(I64, 0))
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), count, ir.Constant(I64, LANES), intp=I64) as (i, _):
            words = b.shl(i, ir.Constant(I64, 2))
            x = b.fmul(emit_load(b, b.add(source, words), VF), wide)
            plain = b.block
            with b.if_then(has_bias):
                shifted = b.fadd(x, emit_load(b, b.add(bias, words), VF))
                with_bias = b.block
            result = b.phi(VF)
            result.add_incoming(x, plain)
            result.add_incoming(shifted, with_bias)
            if is_bf16:
                emit_store(b, emit_round_bf16(b, result), b.add(target, b.shl(i, ir.Constant(I64, 1))))
            else:
                emit_store(b, result, b.add(target, words))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def take_next(typing_context: Any, counter: Any) -> Any:
    """Return the int64 at address `counter` and add one to it, atomically: how threads share out the items of a launch."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        pointer = b.inttoptr(arguments[0], I64.as_pointer())
        return b.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def prefetch(typing_context: Any, address: Any, count: Any) -> Any:
    """Ask for the cache lines of `count` bytes; an address outside the process's memory does no harm."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        address, count = arguments
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), count, ir.Constant(I64, 64), intp=I64) as (i, _):
            emit_prefetch(b, b.add(address, i))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def make_reader(kind: Any, ir_kind: Any) -> Any:
    """Return a function for compiled code that loads a number of one type from an address."""

    @intrinsic
    def read(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
            return emit_load(b, arguments[0], ir_kind)

        return kind(types.int64), generate

    return read


read_int64 = make_reader(types.int64, I64)
read_int32 = make_reader(types.int32, I32)
read_float = make_reader(types.float32, F32)


@intrinsic
def write_int64(typing_context: Any, address: Any, value: Any) -> Any:
    """Store an int64."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        emit_store(b, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


RUN_BYTES = 64  # that `write_run` writes at once


@intrinsic
def write_run(typing_context: Any, target: Any, first: Any, stride: Any, count: Any) -> Any:
    """Write the int64 numbers first + stride * i for i < count. What follows them, less than RUN_BYTES, is overwritten with more."""
    lanes = RUN_BYTES // 8
    wide = ir.VectorType(I64, lanes)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        target, first, stride, count = arguments
        steps = b.mul(emit_splat(b, stride, wide), ir.Constant(wide, list(range(lanes))))
        with cgutils.for_range_slice(b, I64(0), count, I64(lanes), intp=I64) as (i, _):
            run = b.add(emit_splat(b, b.add(first, b.mul(stride, i)), wide), steps)
            emit_store(b, run, b.add(target, b.shl(i, I64(3))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def write_int32(typing_context: Any, address: Any, value: Any) -> Any:
    """Store the low half of an int64."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        emit_store(b, b.trunc(arguments[1], I32), arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def write_float(typing_context: Any, address: Any, value: Any) -> Any:
    """Store a float32."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        emit_store(b, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between areas that do not overlap."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        target, source, count = arguments
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(b, b.inttoptr(target, pointer), b.inttoptr(source, pointer), count, 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def keep(typing_context: Any, array: Any) -> Any:
    """Do nothing, but hold `array` until here: compiled code frees an array after its last use, and an address taken from it is none."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        return context.get_dummy_value()

    return types.void(array), generate
