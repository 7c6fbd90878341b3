"""The operations of a decoder on a GPU that are not products of matrices, each in one kernel (kernels/rows.cu). Knows tensors, not layers.

Invariant: sums run in float32 and only results are rounded, as `TorchOps` defines it; what a kernel does not serve (a width that is no
multiple of 8, rows that are not aligned) goes to `TorchOps`. Nothing here waits for the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from backends.kernels.backend import ALIGNMENT, KernelModule
from backends.kernels.launch import Launch, pointer
from backends.kernels.variants import MMA_CAPABILITY, ROWS, TYPE_NAMES, Variant
from backends.ops import Activation, TorchOps

WARP, MAX_THREADS = 32, 1024
MAX_WIDTH = 4 * 8 * MAX_THREADS  # chunks of 8 that a thread holds
HEAD_WARPS = 4
GATE_THREADS = 256
ROTATE_THREADS = 128
MAX_GRID_Y = 65535
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class CudaOps(TorchOps):
    """Norms, rotation and activation by kernels of our own, everything else by torch."""

    name = "cuda"

    def __init__(self, load: Callable[[Variant], KernelModule]) -> None:
        """Compile or load the kernels; `load` may raise `BackendError`."""
        self._module = load(ROWS)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise in float32 and round once."""
        if not _serves(x, weight):
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add in the dtype of the residual stream, then normalise."""
        if not (_serves(x, weight) and _serves(residual, weight) and x.dtype == residual.dtype):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, eps)

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalise over the last dimension."""
        T, H, D = x.shape
        if not (_serves(x, weight) and D <= 8 * WARP):
            super().rms_norm_heads_(x, weight, eps)
        elif T:
            arguments: tuple[np.generic, ...] = (
                *(pointer(x), pointer(weight), np.int64(x.stride(0)), np.int64(x.stride(1))),
                *(np.int32(H), np.int32(D), np.int32(weight.dtype == torch.float32), np.float32(eps)),
            )
            grid = (T, -(-H // HEAD_WARPS), 1)
            self._run("norm_heads", x, grid, HEAD_WARPS * WARP, arguments)

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate in float32 and round once."""
        is_plain = cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
        if not (is_plain and q.dtype == k.dtype and q.dtype in TYPES and q.stride(2) == k.stride(2) == 1):
            super().rotary_(q, k, cos, sin)
        elif len(q):
            strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
            counts = (q.shape[1], k.shape[1], cos.shape[1])
            arguments: tuple[np.generic, ...] = (
                *(pointer(tensor) for tensor in (q, k, cos, sin)),
                *(np.int64(stride) for stride in strides),
                *(np.int32(count) for count in counts),
            )
            self._run("rotate", q, (len(q), 1, 1), ROTATE_THREADS, arguments)

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Activate in float32 and round once."""
        T, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % 8 or T > MAX_GRID_Y or not _is_aligned(gate_up):
            return super().act_mul(gate_up, activation)
        out = torch.empty((T, width), dtype=gate_up.dtype, device=gate_up.device)
        if T:
            arguments: tuple[np.generic, ...] = (
                *(pointer(gate_up), pointer(out), np.int64(gate_up.stride(0))),
                *(np.int32(width), np.int32(ACTIVATIONS[activation])),
            )
            self._run("gate", gate_up, (-(-width // (8 * GATE_THREADS)), T, 1), GATE_THREADS, arguments)
        return out

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        T, width = x.shape
        out = torch.empty((T, width), dtype=x.dtype, device=x.device)
        if T:
            threads = min(MAX_THREADS, -(-width // (8 * WARP)) * WARP)
            arguments: tuple[np.generic, ...] = (
                *(pointer(x), pointer(residual), pointer(weight), pointer(out), np.int64(x.stride(0))),
                np.int64(0 if residual is None else residual.stride(0)),
                *(np.int32(width), np.int32(weight.dtype == torch.float32), np.float32(eps)),
            )
            self._run("norm", x, (T, 1, 1), threads, arguments, 4 * threads // WARP)
        return out

    def _run(
        self,
        kernel: str,
        like: Tensor,
        grid: tuple[int, int, int],
        threads: int,
        arguments: tuple[np.generic, ...],
        shared_bytes: int = 0,
    ) -> None:
        name = f"{kernel}_{TYPE_NAMES[like.dtype]}"
        self._module.run(Launch(name, grid, (threads, 1, 1), arguments, shared_bytes))


TYPES = (torch.float32, torch.float16, torch.bfloat16)


def open_cuda_ops(capability: tuple[int, int]) -> CudaOps | None:
    """Return the operations for the current GPU; None without CuPy, with an older driver than it needs, or on an older GPU. Raises `BackendError`."""
    if capability < MMA_CAPABILITY or importlib.util.find_spec("cupy") is None:
        return None
    from backends.cupy_raw import CupyModule, driver_fault

    return None if driver_fault() is not None else CudaOps(CupyModule)


def _serves(x: Tensor, weight: Tensor) -> bool:
    """Say whether the norms' kernels can read these rows and weights."""
    width = x.shape[-1]
    has_weights = weight.dtype in (torch.float32, x.dtype) and weight.is_contiguous() and _is_aligned(weight)
    return width % 8 == 0 and width <= MAX_WIDTH and has_weights and _is_aligned(x)


def _is_aligned(x: Tensor) -> bool:
    size = x.element_size()
    offsets = (x.data_ptr(), *(stride * size for stride in x.stride()[:-1]))
    return x.dtype in TYPES and x.stride(-1) == 1 and not any(offset % ALIGNMENT for offset in offsets)
