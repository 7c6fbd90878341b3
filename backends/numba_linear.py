"""Linears of bfloat16 weights on the CPU: the weights in panels, and the launch that multiplies by panels. Knows tensors, no kernels' insides.

Invariant: each row of a product depends on that row of the input alone, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.huge_pages import empty_weight
from backends.numba_kernels.activations import GELU_TANH, NONE, SILU
from backends.numba_kernels.linear import PANEL, linear_kernel
from backends.numba_kernels.linear_tiles import STEP_WORDS, linear_tiles_kernel
from backends.numba_kernels.lookup import copy_panel_rows_kernel
from backends.numba_kernels.matrix_tiles import has_matrix_tiles
from backends.numba_kernels.packing import pack_kernel
from backends.numba_kernels.threads import Kernel
from backends.ops import Activation

GATES: dict[Activation, int] = {"silu": SILU, "gelu_tanh": GELU_TANH}  # those with kernels


def takes_tiles(K: int) -> bool:
    """Say whether a product with this inner dimension can run on matrix tiles here."""
    return K % (2 * STEP_WORDS) == 0 and has_matrix_tiles()


def interleave_gate(x: Tensor) -> Tensor:
    """Put 16 rows of the gate and 16 of what it gates behind each other, for x [2 I, …] with the gate in the first half; in new memory."""
    half = PANEL // 2
    return x.view(2, -1, half, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


class PanelProduct:
    """What `numba_kernels.linear` does with one packed weight: x [T, K] → [T, N], or [T, N / 2] with an activation."""

    __slots__ = ("_activation", "_addresses", "_inputs", "_kept", "_launch", "_outputs")

    def __init__(
        self,
        kernel: Kernel,
        packed: Tensor,
        N: int,
        K: int,
        activation: int,
        bias: Tensor | None,
        factors: Tensor | None = None,
    ) -> None:
        """Keep `packed`, in the layout of the kernel; sums are multiplied by factors [N] before bias [N] is added, in the order of its outputs."""
        shift, scale = (None if x is None else x.float().contiguous() for x in (bias, factors))
        self._kept = (packed, scale, shift)
        self._addresses = tuple(0 if x is None else x.data_ptr() for x in self._kept)
        self._outputs, self._inputs = N, K
        self._activation = activation
        self._launch = kernel.launch

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply; sums in float32, one rounding."""
        T = x.shape[0]
        if x.dtype != torch.bfloat16 or x.stride(1) != 1:
            x = x.to(torch.bfloat16).contiguous()
        width = self._outputs if self._activation == NONE else self._outputs // 2
        y = torch.empty((T, width), dtype=torch.bfloat16)
        threads = torch.get_num_threads()
        self._launch(
            threads, x.data_ptr(), x.stride(0) * 2, *self._addresses, y.data_ptr(), width * 2, T,
            self._outputs, self._inputs // 2, threads, self._activation,
        )  # fmt: skip
        return y


class PackedLinear:
    """A bfloat16 weight in panels (see `numba_kernels.linear`), the only copy that is kept; callable as x [T, K] → [T, N]."""

    __slots__ = ("_packed", "_product", "num_inputs", "num_outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, has_tiles: bool = True) -> None:
        """Pack weight [N, K], N a multiple of 16 and K even.

        It is multiplied on the processor's matrix tiles where there are any (`has_tiles` false forbids it) and K is a multiple of 32: by
        one kernel for any number of rows, so that a row's result never depends on that number.
        """
        N, K = weight.shape
        self.num_outputs, self.num_inputs = N, K
        self._packed = _pack(weight)
        self._product = PanelProduct(_kernel(K, has_tiles), self._packed, N, K, NONE, bias)

    def _panels(self, first: int, last: int) -> Tensor:
        """View outputs first … last - 1 as [panels, K / 2, outputs of a panel, 2]."""
        K = self.num_inputs
        width = PANEL if first == 0 and last >= PANEL else max(1, last - first)
        return self._packed[first * K : last * K].view(-1, K // 2, width, 2)

    def weight(self) -> Tensor:
        """Return an unpacked copy of the weight, [N, K]."""
        full = self.num_outputs // PANEL * PANEL
        parts = [self._panels(0, full), self._panels(full, self.num_outputs)]
        return torch.cat([part.transpose(1, 2).reshape(-1, self.num_inputs) for part in parts if part.numel()])

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] int64 of the weight, [T, K]: what an embedding that shares this weight looks up."""
        T, K = ids.shape[0], self.num_inputs
        found = torch.empty((T, K), dtype=torch.bfloat16)
        copy_panel_rows_kernel().start(
            T * K, ids.data_ptr(), T, self._packed.data_ptr(), self.num_outputs, K // 2, found.data_ptr(), K * 2
        )
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        return self._product(x)


class PackedGatedLinear:
    """Gate and up weights [2 I, K] in panels of 16 of each, the only copy that is kept; callable as x [T, K] → activation(gate) * up [T, I].

    The numbers are those of a product and an activation one after the other, to the bit.
    """

    __slots__ = ("_product",)

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation, *, has_tiles: bool = True) -> None:
        """Pack what `takes` allows; on matrix tiles or vectors as `PackedLinear`."""
        N, K = weight.shape
        shift = None if bias is None else interleave_gate(bias)
        self._product = PanelProduct(_kernel(K, has_tiles), _pack(weight, N // 2), N, K, GATES[activation], shift)

    @staticmethod
    def takes(weight: Tensor, activation: Activation) -> bool:
        """Say whether `weight` and `activation` can be computed so."""
        N, K = weight.shape
        return weight.dtype == torch.bfloat16 and N % PANEL == 0 and K % 2 == 0 and activation in GATES

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, activate, multiply."""
        return self._product(x)


def _kernel(K: int, has_tiles: bool) -> Kernel:
    return linear_tiles_kernel("bfloat16") if has_tiles and takes_tiles(K) else linear_kernel()


def _pack(weight: Tensor, distance: int = 0) -> Tensor:
    """Rearrange weight [N, K] into panels, see `numba_kernels.packing`."""
    N, K = weight.shape
    packed = empty_weight(N * K * 2).view(torch.bfloat16)
    weight = weight.contiguous()
    pack_kernel().launch(torch.get_num_threads(), weight.data_ptr(), K * 2, packed.data_ptr(), N, K // 2, distance)
    return packed
