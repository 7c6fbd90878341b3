"""Atomic operations on 64-bit words and calls through addresses, for compiled code. Every operation is sequentially consistent: the words
are touched a few times per launch, where a weaker order would save nanoseconds and cost a proof.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types

from backends.numba_kernels.vectors import I32, I64, Builder, Value, cgutils, intrinsic

# LLVM's names for what tells a processor that a loop waits, with their argument. ARM's `yield` does nothing on most cores; waiting for
# earlier instructions (all of them: 15) takes some ten nanoseconds.
PAUSES: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.isb", (15,)),
}
_ORDER = "seq_cst"


def _at(b: Builder, address: Value) -> Value:
    return b.inttoptr(address, I64.as_pointer())


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """Return the word at `address`."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        return b.load_atomic(_at(b, arguments[0]), _ORDER, 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Set the word at `address`."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        b.store_atomic(arguments[1], _at(b, arguments[0]), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def compare_and_set(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Set the word at `address` if it is `expected`; say whether it was."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        result = b.cmpxchg(_at(b, arguments[0]), arguments[1], arguments[2], _ORDER, _ORDER)
        return b.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


def _updater(operation: str) -> Any:
    @intrinsic
    def update(typing_context: Any, address: Any, operand: Any) -> Any:
        """Change the word at `address`; return what it was before."""

        def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
            return b.atomic_rmw(operation, _at(b, arguments[0]), arguments[1], _ORDER)

        return types.int64(types.int64, types.int64), generate

    return update


add = _updater("add")
keep_bits = _updater("and")


@intrinsic
def pause(typing_context: Any) -> Any:
    """Wait for some ten nanoseconds, leaving the core's units to its other hardware thread."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        if platform.machine() in PAUSES:
            name, values = PAUSES[platform.machine()]
            numbers = [ir.Constant(I32, value) for value in values]
            kind = ir.FunctionType(ir.VoidType(), [I32] * len(values))
            b.call(cgutils.get_or_insert_function(b.module, kind, name), numbers)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call the function at address `function` with one int64."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        b.call(b.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def system_call(typing_context: Any, syscall: Any, number: Any, first: Any, second: Any, third: Any) -> Any:
    """Call libc's `syscall` at address `syscall` with three arguments and a null fourth."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(I64, [I64], var_arg=True)
        return b.call(b.inttoptr(arguments[0], kind.as_pointer()), [*arguments[1:], ir.Constant(I64, 0)])

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def monotonic_ns(typing_context: Any, clock_gettime: Any) -> Any:
    """Return the nanoseconds of Linux's CLOCK_MONOTONIC, by libc's `clock_gettime` at that address."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        time = ir.ArrayType(I64, 2)  # seconds, nanoseconds
        with b.goto_entry_block():  # once per function, not once per turn of a loop
            place = b.alloca(time)
        kind = ir.FunctionType(I32, [I32, time.as_pointer()])
        b.call(b.inttoptr(arguments[0], kind.as_pointer()), [ir.Constant(I32, 1), place])
        seconds, rest = (b.load(b.gep(place, [ir.Constant(I32, 0), ir.Constant(I32, i)])) for i in (0, 1))
        return b.add(b.mul(seconds, ir.Constant(I64, 1_000_000_000)), rest)

    return types.int64(types.int64), generate


@intrinsic
def current_processor(typing_context: Any, sched_getcpu: Any) -> Any:
    """Return the number of the processor that runs this thread, by libc's `sched_getcpu` at that address."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(I32, [])
        return b.sext(b.call(b.inttoptr(arguments[0], kind.as_pointer()), []), I64)

    return types.int64(types.int64), generate
