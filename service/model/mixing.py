"""The rotation that spreads a head's outliers over its dimensions before keys are quantised. Knows head sizes, not caches or backends.

A few dimensions of a key are much larger than the rest, and a scale for the whole row then leaves little of the others. An orthogonal matrix
applied to queries and keys alike changes no q · k; a Hadamard matrix makes all dimensions of a row about equally large (QuaRot,
arXiv 2404.00456). Values have no such dimensions and stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixing_matrix(head_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an orthogonal, symmetric [D, D] matrix: Hadamard matrices of the largest power of two that divides D, along the diagonal."""
    size = head_size & -head_size
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    matrix = torch.kron(torch.eye(head_size // size, dtype=torch.float64), block * size**-0.5)
    return matrix.to(dtype=dtype, device=device)
