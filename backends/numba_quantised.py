"""Linears whose weight stays in integers, on the CPU with compiled kernels. The formats' definition is `quantised_weights`.

Invariant: the packed strips are the only copy of a weight that is kept, and they hold every bit of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.numba_kernels.group_kinds import KINDS
from backends.numba_kernels.linear_quantised import quantised_linear_kernel
from backends.numba_kernels.lookup_quantised import row_kernel
from backends.numba_kernels.vectors import LANES
from backends.quantised_weights import QuantisedWeight
from backends.torch_threads import calling_thread_only


class QuantisedLinear:
    """A quantised weight in strips (see `numba_kernels.group_kinds`); callable as x [T, K] → [T, N], both bfloat16."""

    __slots__ = (
        "_address",
        "_bias",
        "_bias_address",
        "_format",
        "_groups",
        "_launch",
        "_look_up",
        "_packed",
        "_strip_bytes",
        "_strips",
        "num_inputs",
        "num_outputs",
    )

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        """Pack a weight whose K is a whole number of groups; outputs that N lacks to a whole strip are zeros."""
        N, K = weight.shape
        kind = KINDS[weight.format]
        self.num_outputs, self.num_inputs = N, K
        self._format = weight.format
        self._groups = K // kind.group
        self._strips = -(-N // LANES)
        self._strip_bytes = self._groups * kind.group_bytes + kind.tail_bytes
        self._packed = torch.empty(self._strips * self._strip_bytes + 64, dtype=torch.uint8)
        skipped = -self._packed.data_ptr() % 64
        self._packed = self._packed[skipped : skipped + self._strips * self._strip_bytes]
        for first in range(0, self._strips, 64):
            self._pack(weight, first, min(first + 64, self._strips))
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(self._strips * LANES)
            self._bias[:N] = bias
        self._address = self._packed.data_ptr()
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()
        self._launch = quantised_linear_kernel(weight.format).launch
        self._look_up = row_kernel(weight.format).start

    def _parts(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """View strips first … last - 1: their groups [strips, G, bytes of a group], and what stands behind the groups, [strips, bytes]."""
        kind = KINDS[self._format]
        strips = self._packed[first * self._strip_bytes : last * self._strip_bytes].view(-1, self._strip_bytes)
        groups, tails = strips.split_with_sizes([self._groups * kind.group_bytes, kind.tail_bytes], 1)
        return groups.view(last - first, self._groups, kind.group_bytes), tails

    @calling_thread_only()
    def _pack(self, weight: QuantisedWeight, first: int, last: int) -> None:
        """Fill strips first … last - 1: 32-bit words and scales change places, no byte is changed."""
        data = weight.data[first * LANES : last * LANES]
        missing = (last - first) * LANES - data.shape[0]
        if missing:
            data = torch.cat([data, data.new_zeros((missing, *data.shape[1:]))])
        groups, tails = self._parts(first, last)
        count, code_bytes = last - first, KINDS[self._format].code_bytes
        # [strips, outputs, groups, words] → [strips, groups, words, outputs]
        codes = data if weight.scales is not None else data[..., -code_bytes // LANES :]
        words = codes.contiguous().view(torch.int32).view(count, LANES, self._groups, -1).permute(0, 2, 3, 1)
        groups[..., :code_bytes].view(torch.int32).view(count, self._groups, -1, LANES).copy_(words)
        if weight.scales is not None:
            scales = torch.zeros(count * LANES)
            scales[: data.shape[0] - missing] = weight.scales[first * LANES : last * LANES]
            tails.copy_(scales.view(torch.uint8).view(count, -1))
            return
        halves = data[..., : -code_bytes // LANES].contiguous().view(torch.int16)  # d, or d and m
        target = groups[..., code_bytes:].view(torch.int16).view(count, self._groups, -1, LANES)
        target.copy_(halves.view(count, LANES, self._groups, -1).permute(0, 2, 3, 1))

    @calling_thread_only()
    def weight(self) -> QuantisedWeight:
        """Return the weight as it was given, in new memory."""
        N, count, kind = self.num_outputs, self._strips, KINDS[self._format]
        groups, tails = self._parts(0, count)
        words = groups[..., : kind.code_bytes].view(torch.int32).view(count, self._groups, -1, LANES)
        codes = words.permute(0, 3, 1, 2).contiguous().view(torch.uint8)  # [strips, outputs, groups, bytes]
        codes = codes.view(count * LANES, self._groups, -1)[:N]
        if not kind.has_scales:
            scales = tails.reshape(-1).view(torch.float32)[:N].clone()
            return QuantisedWeight(self._format, codes.reshape(N, -1).view(torch.int8), scales)
        halves = groups[..., kind.code_bytes :].view(torch.int16).view(count, self._groups, -1, LANES)
        scales = halves.permute(0, 3, 1, 2).contiguous().view(torch.uint8).view(count * LANES, self._groups, -1)[:N]
        return QuantisedWeight(self._format, torch.cat([scales, codes], 2))

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] int64 of the weight in bfloat16, [T, K]: what an embedding that shares this weight looks up."""
        T, K = ids.shape[0], self.num_inputs
        out = torch.empty((T, K), dtype=torch.bfloat16)
        self._look_up(T * K, ids.data_ptr(), T, self._address, self.num_outputs, self._groups, out.data_ptr(), K * 2)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply; x is quantised by groups, sums are exact within a group and float32 between groups, one rounding at the end."""
        if x.dtype != torch.bfloat16 or x.stride(1) != 1:
            x = x.to(torch.bfloat16).contiguous()
        T, width = x.shape[0], self._strips * LANES
        y = torch.empty((T, width), dtype=torch.bfloat16)
        self._launch(
            torch.get_num_threads(), x.data_ptr(), x.stride(0) * 2, self._address, self._bias_address,
            y.data_ptr(), width * 2, T, self._strips, self._groups,
        )  # fmt: skip
        return y if width == self.num_outputs else y[:, : self.num_outputs]


def can_pack(weight: QuantisedWeight) -> bool:
    """Say whether the inner dimension is a whole number of the format's groups."""
    return weight.shape[1] % KINDS[weight.format].group == 0
