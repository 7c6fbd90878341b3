"""The rotation of queries and keys before a quantised pool."""

from __future__ import annotations

import pytest
import torch

from backends.kv_cache import dequantise, quantise
from service.model.mixing import mixing_matrix

CPU = torch.device("cpu")


@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 128, 256, 15])
def test_products_of_queries_and_keys_do_not_change(head_size: int) -> None:
    matrix = mixing_matrix(head_size, torch.float64, CPU)
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_size, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_a_key_with_one_large_dimension_keeps_the_others(head_size: int) -> None:
    matrix = mixing_matrix(head_size, torch.float32, CPU)
    keys = torch.randn(500, head_size, generator=torch.Generator().manual_seed(1))
    keys[:, 5] += 40
    plain = dequantise(*quantise(keys, torch.int8))
    mixed = dequantise(*quantise(keys @ matrix, torch.int8)) @ matrix.T
    assert (mixed - keys).norm() < (plain - keys).norm() / 2
