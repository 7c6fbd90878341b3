"""Linears of quantised weights on the CPU: rearranges the bytes, launches the kernels. What the weights stand for is `quantised_weights`.

On matrix tiles a weight is widened to bfloat16 while it is multiplied (`numba_kernels.widening`): results are those of the dequantised weight, bit
for bit. Elsewhere it stays integers, and rows of x are rounded to 8 bits by groups (`numba_kernels.groups`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backends.huge_pages import empty_weight
from backends.numba_kernels.activations import NONE
from backends.numba_kernels.group_kinds import KINDS
from backends.numba_kernels.linear_quantised import quantised_linear_kernel
from backends.numba_kernels.linear_tiles import linear_tiles_kernel
from backends.numba_kernels.lookup_quantised import row_kernel
from backends.numba_kernels.vectors import LANES
from backends.numba_kernels.widening import CODE_FACTOR
from backends.numba_linear import GATES, PanelProduct, interleave_gate, takes_tiles
from backends.ops import Activation
from backends.quantised_weights import BLOCK, Format, QuantisedWeight
from backends.torch_threads import calling_thread_only


class Strips:
    """A quantised weight in strips (see `numba_kernels.group_kinds`), the only copy that is kept; outputs that N lacks to whole strips are zeros.

    `together` strips lie together: their units of 32 k in turn, then what stands behind the units of each.
    """

    __slots__ = (
        "_format",
        "_look_up",
        "_strip_bytes",
        "_units",
        "count",
        "num_inputs",
        "num_outputs",
        "packed",
        "together",
    )

    def __init__(self, weight: QuantisedWeight, together: int = 1) -> None:
        """Pack a weight whose K is a whole number of groups."""
        N, K = weight.shape
        kind = KINDS[weight.format]
        self.num_outputs, self.num_inputs = N, K
        self.together = together
        self.count = -(-N // (LANES * together)) * together
        self._format = weight.format
        self._units = K // BLOCK
        self._strip_bytes = self._units * kind.unit_bytes + kind.tail_bytes
        self.packed = empty_weight(self.count * self._strip_bytes)
        for first in range(0, self.count, 64):
            self._pack(weight, first, min(first + 64, self.count))
        self._look_up = row_kernel(weight.format).start

    def _parts(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """View strips first … last - 1: their units [n, together, U, bytes of a unit], and what stands behind them, [n, together, bytes]."""
        kind, n = KINDS[self._format], self.together
        strips = self.packed[first * self._strip_bytes : last * self._strip_bytes].view(-1, n * self._strip_bytes)
        units, tails = strips.split_with_sizes([n * self._units * kind.unit_bytes, n * kind.tail_bytes], 1)
        blocks = units.view(-1, self._units, n, kind.unit_bytes).transpose(1, 2)
        return blocks, tails.view(blocks.shape[0], n, kind.tail_bytes)

    @calling_thread_only()
    def _pack(self, weight: QuantisedWeight, first: int, last: int) -> None:
        """Fill strips first … last - 1: 32-bit words and scales change places, no byte is changed."""
        kind, n = KINDS[self._format], self.together
        data = weight.data[first * LANES : last * LANES]
        missing = (last - first) * LANES - data.shape[0]
        if missing:
            data = torch.cat([data, data.new_zeros((missing, *data.shape[1:]))])
        units, tails = self._parts(first, last)
        count, code_bytes = last - first, kind.unit_code_bytes
        # [strips, outputs, units, words] → [strips, units, words, outputs]
        codes = data if weight.scales is not None else data[..., -code_bytes // LANES :]
        words = codes.contiguous().view(torch.int32).view(count, LANES, self._units, -1).permute(0, 2, 3, 1)
        shape = (count // n, n, self._units, -1, LANES)
        units[..., :code_bytes].view(torch.int32).view(shape).copy_(words.reshape(shape))
        if weight.scales is not None:
            scales = torch.zeros(count * LANES)
            scales[: data.shape[0] - missing] = weight.scales[first * LANES : last * LANES]
            tails.copy_(scales.view(torch.uint8).view(tails.shape))
            return
        halves = data[..., : -code_bytes // LANES].contiguous().view(torch.int16)  # d, or d and m
        halves = halves.view(count, LANES, self._units, -1).permute(0, 2, 3, 1)
        units[..., code_bytes:].view(torch.int16).view(shape).copy_(halves.reshape(shape))

    @calling_thread_only()
    def weight(self) -> QuantisedWeight:
        """Return the weight as it was given, in new memory."""
        N, count, kind = self.num_outputs, self.count, KINDS[self._format]
        units, tails = self._parts(0, count)
        words = units[..., : kind.unit_code_bytes].view(torch.int32).reshape(count, self._units, -1, LANES)
        codes = words.permute(0, 3, 1, 2).contiguous().view(torch.uint8)  # [strips, outputs, units, bytes]
        codes = codes.view(count * LANES, self._units, -1)[:N]
        if not kind.has_scales:
            scales = tails.reshape(-1).view(torch.float32)[:N].clone()
            return QuantisedWeight(self._format, codes.reshape(N, -1).view(torch.int8), scales)
        halves = units[..., kind.unit_code_bytes :].view(torch.int16).reshape(count, self._units, -1, LANES)
        scales = halves.permute(0, 3, 1, 2).contiguous().view(torch.uint8).view(count * LANES, self._units, -1)[:N]
        return QuantisedWeight(self._format, torch.cat([scales, codes], 2))

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] int64 of the weight in bfloat16, [T, K]: what an embedding that shares this weight looks up."""
        T, K = ids.shape[0], self.num_inputs
        out = torch.empty((T, K), dtype=torch.bfloat16)
        self._look_up(
            T * K, ids.data_ptr(), T, self.packed.data_ptr(), self.num_outputs, self._units, self.together,
            out.data_ptr(), K * 2,
        )  # fmt: skip
        return out


class QuantisedLinear:
    """A quantised weight in strips; callable as x [T, K] → [T, N], both bfloat16."""

    __slots__ = ("_multiply", "_strips")

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None, *, has_tiles: bool = True) -> None:
        """Pack a weight that `can_pack`; it is multiplied on matrix tiles where there are any (`has_tiles` false forbids it)."""
        uses_tiles = has_tiles and takes_tiles(weight.shape[1])
        strips = self._strips = Strips(weight, 2 if uses_tiles else 1)
        width = strips.count * LANES
        shift: Tensor | None = None
        if bias is not None:
            shift = torch.zeros(width)
            shift[: bias.shape[0]] = bias
        self._multiply: PanelProduct | _VectorProduct
        if uses_tiles:
            self._multiply = _tile_product(strips, weight, NONE, shift)
        else:
            self._multiply = _VectorProduct(strips, weight.format, shift)

    @property
    def num_outputs(self) -> int:
        """N."""
        return self._strips.num_outputs

    def weight(self) -> QuantisedWeight:
        """Return the weight as it was given, in new memory."""
        return self._strips.weight()

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] int64 of the weight in bfloat16, [T, K]: what an embedding that shares this weight looks up."""
        return self._strips.rows(ids)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        y = self._multiply(x)
        return y if y.shape[1] == self._strips.num_outputs else y[:, : self._strips.num_outputs]


class QuantisedGatedLinear:
    """Quantised gate and up weights [2 I, K], 16 outputs of each in turn; callable as x [T, K] → activation(gate) * up [T, I].

    The numbers are those of a product and an activation one after the other, to the bit.
    """

    __slots__ = ("_product",)

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, activation: Activation) -> None:
        """Pack what `takes` allows."""
        scales = None if weight.scales is None else interleave_gate(weight.scales)
        weight = replace(weight, data=interleave_gate(weight.data), scales=scales)
        shift = None if bias is None else interleave_gate(bias)
        self._product = _tile_product(Strips(weight, 2), weight, GATES[activation], shift)

    @staticmethod
    def takes(weight: QuantisedWeight, activation: Activation) -> bool:
        """Say whether `weight` and `activation` can be computed so here: on matrix tiles."""
        N, K = weight.shape
        return N % (2 * LANES) == 0 and can_pack(weight) and takes_tiles(K) and activation in GATES

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, activate, multiply."""
        return self._product(x)


def _tile_product(strips: Strips, weight: QuantisedWeight, activation: int, bias: Tensor | None) -> PanelProduct:
    width = strips.count * LANES
    factors: Tensor | None = None
    if weight.scales is not None:
        factors = torch.zeros(width)
        factors[: strips.num_outputs] = weight.scales / CODE_FACTOR
    kernel = linear_tiles_kernel(weight.format)
    return PanelProduct(kernel, strips.packed, width, strips.num_inputs, activation, bias, factors)


class _VectorProduct:
    """The launch of `numba_kernels.linear_quantised`: x is quantised by groups, sums are exact within a group and float32 between groups."""

    __slots__ = ("_address", "_bias", "_bias_address", "_groups", "_launch", "_strips")

    def __init__(self, strips: Strips, form: Format, bias: Tensor | None) -> None:
        self._strips = strips
        self._address = strips.packed.data_ptr()
        self._groups = strips.num_inputs // KINDS[form].group
        self._bias = bias
        self._bias_address = 0 if bias is None else bias.data_ptr()
        self._launch = quantised_linear_kernel(form).launch

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply; one rounding at the end."""
        if x.dtype != torch.bfloat16 or x.stride(1) != 1:
            x = x.to(torch.bfloat16).contiguous()
        T, width = x.shape[0], self._strips.count * LANES
        y = torch.empty((T, width), dtype=torch.bfloat16)
        self._launch(
            torch.get_num_threads(), x.data_ptr(), x.stride(0) * 2, self._address, self._bias_address,
            y.data_ptr(), width * 2, T, self._strips.count, self._groups,
        )  # fmt: skip
        return y


def can_pack(weight: QuantisedWeight) -> bool:
    """Say whether the inner dimension is a whole number of the format's groups."""
    return weight.shape[1] % KINDS[weight.format].group == 0
