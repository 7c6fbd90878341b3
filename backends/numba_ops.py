"""`Ops` on the CPU with compiled kernels, for float32 and bfloat16. Shapes that the kernels do not take go to `TorchOps`.

A decode step calls these some hundred times with a row or a few, so what counts is microseconds per call: one Python frame, one compiled
call, and a second thread only where there is work for it. Invariant: each row of a result depends on that row of the input alone
(float32 products excepted: they are torch's, whose rounding may follow the number of rows).
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from backends.numba_kernels.lookup import copy_rows_kernel
from backends.numba_kernels.rows import gate_kernel, norm_kernel, rotary_kernel, scale_kernel
from backends.numba_linear import GATES, PackedGatedLinear, PackedLinear
from backends.numba_quantised import QuantisedGatedLinear, QuantisedLinear, can_pack
from backends.ops import Activation, Linear, TorchOps, Weight
from backends.quantised_weights import QuantisedWeight


class NumbaOps(TorchOps):
    """Compiled kernels where they exist; what is inherited runs in torch."""

    name = "numba"

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile the kernels for `dtype` (float32 or bfloat16), or load them from the cache."""
        is_bf16 = dtype == torch.bfloat16
        self._dtype = dtype
        self._size = dtype.itemsize
        self._norm = norm_kernel(is_bf16)
        self._rotary = rotary_kernel(is_bf16)
        self._gate = gate_kernel(is_bf16)
        self._scale = scale_kernel(is_bf16)
        self._copy = copy_rows_kernel()

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Pack a bfloat16 weight into panels; keep a float32 one (or an odd shape) for torch."""
        if isinstance(weight, QuantisedWeight):
            if self._dtype == torch.bfloat16 and can_pack(weight):
                return QuantisedLinear(weight, bias)
            return super().pack_linear(weight, bias)
        N, K = weight.shape
        if weight.dtype != torch.bfloat16 or N % 16 or K % 2:
            return super().pack_linear(weight, bias)
        return PackedLinear(weight, bias)

    def pack_gated_linear(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Activate where the product is computed, while its sums are at hand."""
        if isinstance(weight, QuantisedWeight):
            if self._dtype == torch.bfloat16 and QuantisedGatedLinear.takes(weight, activation):
                return QuantisedGatedLinear(weight, bias, activation)
        elif PackedGatedLinear.takes(weight, activation):
            return PackedGatedLinear(weight, bias, activation)
        return super().pack_gated_linear(weight, bias, activation)

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Copy row by row."""
        T, (V, N), size = ids.shape[0], table.shape, table.element_size()
        if table.stride(1) != 1 or not ids.is_contiguous() or N * size % 4:
            return super().rows(table, ids)
        found = torch.empty((T, N), dtype=table.dtype)
        row = table.stride(0) * size
        self._copy.start(T * N, ids.data_ptr(), T, table.data_ptr(), row, V, found.data_ptr(), N * size, N * size)
        return found

    def scale_(self, x: Tensor, factor: float) -> None:
        """Multiply in float32 and round once."""
        T, N = x.shape
        if N % 16 or x.dtype != self._dtype or x.stride(1) != 1:
            super().scale_(x, factor)
            return
        self._scale.start(T * N, x.data_ptr(), x.stride(0) * self._size, T, N, _float_bits(factor))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise each row in one pass over the cache-resident row."""
        T, N = x.shape
        if N % 16 or x.dtype != self._dtype or x.stride(1) != 1:
            return super().rms_norm(x, weight, eps)
        y = torch.empty((T, N), dtype=self._dtype)
        weight = weight.float()
        self._norm.start(
            T * N, x.data_ptr(), x.stride(0) * self._size, 0, y.data_ptr(), N * self._size, 0, 0, 0, weight.data_ptr(), T, 1, N, _float_bits(eps)
        )  # fmt: skip
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add and normalise while the row is in the cache."""
        T, N = x.shape
        if (
            N % 16
            or x.dtype != self._dtype
            or residual.dtype != self._dtype
            or x.stride(1) != 1
            or residual.stride(1) != 1
        ):
            return super().add_rms_norm(x, residual, weight, eps)
        y = torch.empty((T, N), dtype=self._dtype)
        weight = weight.float()
        self._norm.start(
            T * N, x.data_ptr(), x.stride(0) * self._size, 0, y.data_ptr(), N * self._size, 0, residual.data_ptr(), residual.stride(0) * self._size,
            weight.data_ptr(), T, 1, N, _float_bits(eps),
        )  # fmt: skip
        return y

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalise head by head, in place."""
        T, H, D = x.shape
        if D % 16 or x.dtype != self._dtype or x.stride(2) != 1:
            super().rms_norm_heads_(x, weight, eps)
            return
        weight = weight.float()
        row, head = x.stride(0) * self._size, x.stride(1) * self._size
        self._norm.start(
            T * H * D, x.data_ptr(), row, head, x.data_ptr(), row, head, 0, 0, weight.data_ptr(), T, H, D, _float_bits(eps)
        )  # fmt: skip

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q and k in one launch."""
        T, H, _ = q.shape
        half = cos.shape[1]
        if (
            half % 16
            or q.dtype != self._dtype
            or k.dtype != self._dtype
            or cos.stride(1) != 1
            or q.stride(2) != 1
            or k.stride(2) != 1
        ):
            super().rotary_(q, k, cos, sin)
            return
        size = self._size
        Hkv = k.shape[1]
        self._rotary.start(
            T * (H + Hkv) * half * 2, q.data_ptr(), q.stride(0) * size, q.stride(1) * size, H, k.data_ptr(), k.stride(0) * size, k.stride(1) * size, Hkv,
            cos.data_ptr(), cos.stride(0) * 4, sin.data_ptr(), sin.stride(0) * 4, T, half,
        )  # fmt: skip

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Activate and multiply in one pass; the exact GELU is torch's."""
        T, width = gate_up.shape
        half = width // 2
        if activation not in GATES or half % 16 or gate_up.dtype != self._dtype or gate_up.stride(1) != 1:
            return super().act_mul(gate_up, activation)
        y = torch.empty((T, half), dtype=self._dtype)
        size = self._size
        kind = GATES[activation]
        self._gate.start(
            T * width, gate_up.data_ptr(), gate_up.stride(0) * size, half * size, y.data_ptr(), half * size, T, half, kind
        )  # fmt: skip
        return y


def _float_bits(number: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits
