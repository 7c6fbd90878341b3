"""Chooses ids from rows of logits on the CPU with compiled kernels. Knows numbers and rows, not requests or what parameters mean.

Invariant: a row's result depends on that row and its parameters alone, bit for bit, whatever the number of rows and threads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.numba_kernels.ranking import draw_ranked_kernel
from backends.numba_kernels.sampling import draw_kernel, likeliest_kernel

DTYPES = (torch.float32, torch.bfloat16)


def takes(logits: Tensor) -> bool:
    """Say whether there are kernels for `logits` [R, V]."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and logits.stride(1) == 1 and logits.shape[1] > 0


def likeliest(logits: Tensor) -> list[int | None]:
    """Return the id of the largest number of each row of logits [R, V], the lowest of equals; None for a row that is not finite."""
    R, V = logits.shape
    found = np.empty(R, np.int64)
    likeliest_kernel(logits.dtype == torch.bfloat16).start(
        R * V, logits.data_ptr(), logits.stride(0) * logits.element_size(), R, V, found.ctypes.data
    )
    return [token_id if token_id >= 0 else None for token_id in found.tolist()]


def draw(
    logits: Tensor,
    rows: npt.NDArray[np.int64],
    temperatures: npt.NDArray[np.float32],
    min_ps: npt.NDArray[np.float32],
    numbers: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Return for each number of [N, S] an id of `rows` [N] of logits [R, V]: the first whose running sum of weights exceeds that share of it.

    The weight of x is exp((x - largest) / temperature), and 0 where that is under the row's min-p. Rows may hold -inf, not NaN.
    """
    N, S = numbers.shape
    found = np.empty((N, S), np.int64)
    draw_kernel(logits.dtype == torch.bfloat16).start(
        N * logits.shape[1], logits.data_ptr(), logits.stride(0) * logits.element_size(), rows.ctypes.data, N,
        logits.shape[1], temperatures.ctypes.data, min_ps.ctypes.data, numbers.ctypes.data, S, found.ctypes.data,
    )  # fmt: skip
    return found


def draw_ranked(
    logits: Tensor,
    rows: npt.NDArray[np.int64],
    temperatures: npt.NDArray[np.float32],
    min_ps: npt.NDArray[np.float32],
    numbers: npt.NDArray[np.float64],
    top_ks: npt.NDArray[np.int64],
    top_ps: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Do what `draw` does among the `top_ks` likeliest ids of each row (V for all), of these the fewest that hold a share of `top_ps` (1 for all).

    The share is of what top-k left. Equal weights rank by the lower id; the likeliest id always stays.
    """
    N, S = numbers.shape
    found = np.empty((N, S), np.int64)
    draw_ranked_kernel(logits.dtype == torch.bfloat16).start(
        N * logits.shape[1], logits.data_ptr(), logits.stride(0) * logits.element_size(), rows.ctypes.data, N,
        logits.shape[1], temperatures.ctypes.data, min_ps.ctypes.data, numbers.ctypes.data, S, found.ctypes.data,
        top_ks.ctypes.data, top_ps.ctypes.data,
    )  # fmt: skip
    return found
