"""Gated activations of 16 lanes, for every kernel that has them. Knows vectors, not rows."""

from __future__ import annotations

from llvmlite import ir

from backends.numba_kernels.vectors import I64, Builder, Value, constant, emit_exp, emit_fma

NONE, SILU, GELU_TANH = -1, 0, 1


def emit_gated(b: Builder, gate: Value, up: Value, kind: Value) -> Value:
    """Return activation(gate) * up. Both activations are gate * sigmoid(s): s = gate, or 2 * sqrt(2 / pi) * (gate + 0.044715 gate³)."""
    is_gelu = b.icmp_signed("==", kind, ir.Constant(I64, GELU_TANH))
    cubic = b.fmul(emit_fma(b, b.fmul(gate, gate), constant(0.044715), constant(1.0)), constant(1.5957691216057308))
    s = b.fmul(gate, b.select(is_gelu, cubic, constant(1.0)))
    # Held at 80, the sigmoid is still under 2e-35 and its exponential does not overflow.
    negative = b.fneg(s)
    negative = b.select(b.fcmp_ordered(">", negative, constant(80.0)), constant(80.0), negative)
    return b.fmul(b.fdiv(gate, b.fadd(constant(1.0), emit_exp(b, negative))), up)
