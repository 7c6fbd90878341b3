"""The kernels of a decoder that are not attention, behind one small protocol. Knows tensors, not layers, weights files or sequences.

`TorchOps` is the definition, for any device and dtype; a faster implementation must agree with it within the rounding of the dtype.
Invariant: sums run in float32 whatever the dtype of the tensors; only the stored result is rounded.

T tokens, N width, H heads, D head size, R rotary dimensions. Inputs may be views whose rows lie further apart than their width
(slices of a fused projection); the last dimension is always contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from backends.quantised_weights import QuantisedWeight

Activation = Literal["silu", "gelu_tanh", "gelu"]
Weight = Tensor | QuantisedWeight
Linear = Callable[[Tensor], Tensor]  # [T, K] → [T, N]


class Ops(Protocol):
    """What a model calls between attention layers. Used from one thread."""

    name: str

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Prepare x @ weight.T + bias for weight [N, K]. May keep `weight` in another layout: the caller drops its own reference.

        A linear of a quantised weight may round its inputs or the weight as its kernels need, and has `rows` to look up rows of the weight.
        """
        ...

    def pack_gated_linear(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Prepare activation(gate) * up of x @ weight.T + bias for weight [2 I, K], the gate in the first half; → [T, I]."""
        ...

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] int64 of table [V, N] in new memory, [T, N]."""
        ...

    def scale_(self, x: Tensor, factor: float) -> None:
        """Multiply x [T, N] in place by a number that x's dtype can hold."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [T, N] over its root mean square, times weight [N] (float32 or x's dtype), in x's dtype."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` [T, N] in place and return the norm of the (rounded) sum."""
        ...

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalise each head of x [T, H, D] in place, times weight [D]."""
        ...

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate the pairs (i, i + R/2) of q [T, H, D] and k [T, Hkv, D] in place by cos, sin [T, R/2] float32; R ≤ D."""
        ...

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up for gate_up [T, 2I], the gate in the first half; → [T, I]."""
        ...


class TorchOps:
    """Plain torch: the definition of each operation, and what runs where nothing faster exists."""

    name = "torch"

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Keep the weight as it is; a quantised one as the numbers it stands for."""
        if isinstance(weight, QuantisedWeight):
            return DequantisedLinear(weight, bias)
        return lambda x: functional.linear(x, weight, bias)

    def pack_gated_linear(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Do one after the other."""
        linear = self.pack_linear(weight, bias)
        return lambda x: self.act_mul(linear(x), activation)

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Look up."""
        return table.index_select(0, ids)

    def scale_(self, x: Tensor, factor: float) -> None:
        """Multiply."""
        x.mul_(factor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise in float32 and round once."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add in the dtype of the residual stream, then normalise."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalise over the last dimension."""
        x.copy_(self.rms_norm(x, weight, eps))

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate in float32 and round once."""
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R/2]
        half = cos.shape[-1]
        for x in (q, k):
            low, high = x[..., :half].float(), x[..., half : 2 * half].float()
            # Both before either is written: in float32 `low` and `high` are views of x.
            turned_low, turned_high = low * cos - high * sin, high * cos + low * sin
            x[..., :half] = turned_low
            x[..., half : 2 * half] = turned_high

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Activate in float32 and round once."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        if activation == "silu":
            active = functional.silu(gate)
        else:
            active = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
        return (active * up).to(gate_up.dtype)


class DequantisedLinear:
    """The definition of a linear with a quantised weight: in float32, with nothing rounded but the result."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        self._weight = weight.dequantise()
        self._bias = None if bias is None else bias.float()

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] of the weight in bfloat16, [T, K]."""
        return self._weight.index_select(0, ids).to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply; → x's dtype."""
        return functional.linear(x.float(), self._weight, self._bias).to(x.dtype)


def open_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the fastest operations for `device` and `dtype`; `TorchOps` serves everything. Raises `BackendError` for kernels that fail to compile."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        try:
            from backends.numba_ops import NumbaOps
        except ImportError:  # a machine without Numba
            return TorchOps()
        return NumbaOps(dtype)
    if device.type == "cuda":
        from backends.cuda_ops import open_cuda_ops

        return open_cuda_ops(torch.cuda.get_device_capability(device)) or TorchOps()
    return TorchOps()
