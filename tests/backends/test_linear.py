"""Packed bfloat16 products on vectors and on matrix tiles: the numbers of float64, and the same bits however the work is divided."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from backends.numba_kernels.matrix_tiles import has_matrix_tiles
from backends.numba_linear import PackedGatedLinear, PackedLinear
from backends.numba_ops import NumbaOps
from backends.ops import Activation, TorchOps
from tests.backends.steps import TOLERANCE

BODIES = [
    pytest.param(False, id="vectors"),
    pytest.param(True, id="tiles", marks=pytest.mark.skipif(not has_matrix_tiles(), reason="no matrix tiles")),
]
# Groups of 32 rows (12 with vectors), one more, one less; enough for several blocks.
ROWS = [0, 1, 2, 12, 13, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 70, 257, 512]


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


@pytest.fixture
def threads() -> Iterator[None]:
    """Give the number of threads back after a test that sets it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("has_tiles", BODIES)
@pytest.mark.parametrize(("N", "K"), [(96, 576), (80, 64), (16, 32), (144, 96), (320, 1568), (48, 34), (32, 2)])
def test_products_are_those_of_float64_for_any_number_of_rows(has_tiles: bool, N: int, K: int) -> None:
    """A last panel of 16 outputs, inner dimensions that tiles do not take, several blocks of each kind; x a slice of wider rows."""
    weight, bias = random_numbers(N, K), random_numbers(N)
    plain = PackedLinear(weight, has_tiles=has_tiles)
    shifted = PackedLinear(weight, bias, has_tiles=has_tiles)
    for T in ROWS:
        x = random_numbers(T, K + 6)[:, :K]
        product = x.double() @ weight.double().T
        for linear, wanted in ((plain, product), (shifted, product + bias.double())):
            result = linear(x)
            assert result.shape == (T, N)
            limit = TOLERANCE[torch.bfloat16] * wanted.abs().max().clamp(min=1) if T else 0
            assert ((result.double() - wanted).abs() <= limit).all()


@pytest.mark.parametrize("has_tiles", BODIES)
def test_a_row_has_the_same_bits_alone_and_among_any_others(has_tiles: bool) -> None:
    """In particular where a sum is interrupted: the inner dimension is long enough for three blocks, the rows for two."""
    linear = PackedLinear(random_numbers(176, 3840), has_tiles=has_tiles)
    x = random_numbers(300, 3840)
    together = linear(x)
    for row in (0, 11, 12, 31, 32, 255, 256, 299):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
        assert torch.equal(linear(x[row:])[0], together[row])
        assert torch.equal(linear(x[: row + 1])[row], together[row])


@pytest.mark.parametrize("has_tiles", BODIES)
@pytest.mark.parametrize("T", [1, 20, 33, 300])
@pytest.mark.usefixtures("threads")
def test_any_number_of_threads_gives_the_same_bits(has_tiles: bool, T: int) -> None:
    linear = PackedLinear(random_numbers(592, 1600), has_tiles=has_tiles)
    x = random_numbers(T, 1600)
    torch.set_num_threads(1)
    alone = linear(x)
    for count in (2, 3, 8, 64):
        torch.set_num_threads(count)
        assert all(torch.equal(linear(x), alone) for _ in range(5))


@pytest.mark.parametrize("has_tiles", BODIES)
def test_a_nan_and_an_infinity_stay_in_their_rows(has_tiles: bool) -> None:
    weight, x = random_numbers(64, 64), random_numbers(40, 64)
    linear = PackedLinear(weight, has_tiles=has_tiles)
    clean = linear(x)
    x[3, 5], x[39, 63] = float("nan"), float("inf")
    result = linear(x)
    assert result[3].isnan().all()
    assert not result[39].isfinite().any()
    others = [row for row in range(40) if row not in (3, 39)]
    assert torch.equal(result[others], clean[others])


@pytest.mark.skipif(not has_matrix_tiles(), reason="no matrix tiles")
def test_tiles_and_vectors_agree_within_one_rounding() -> None:
    weight, x = random_numbers(96, 576), random_numbers(50, 576)
    difference = PackedLinear(weight)(x).double() - PackedLinear(weight, has_tiles=False)(x).double()
    exact = x.double() @ weight.double().T
    assert (difference.abs() <= exact.abs() * 2**-7 + 1e-3).all()


@pytest.mark.parametrize("has_tiles", BODIES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("width", "K"), [(16, 32), (48, 576), (48, 34), (176, 3840)])
def test_an_activation_beside_its_product_gives_the_bits_of_one_after_it(
    has_tiles: bool, activation: Activation, width: int, K: int
) -> None:
    weight, bias = random_numbers(2 * width, K), random_numbers(2 * width)
    assert PackedGatedLinear.takes(weight, activation)
    ops = NumbaOps(torch.bfloat16)
    for shift in (None, bias):
        gated = PackedGatedLinear(weight, shift, activation, has_tiles=has_tiles)
        linear = PackedLinear(weight, shift, has_tiles=has_tiles)
        for T in (0, 1, 16, 33, 70, 300):
            x = random_numbers(T, K + 8)[:, :K] / K**0.5
            assert torch.equal(gated(x), ops.act_mul(linear(x), activation))


def test_what_has_no_fused_activation_is_computed_in_two_operations() -> None:
    """The exact GELU, a width that leaves part of a panel, an odd inner dimension."""
    ops = NumbaOps(torch.bfloat16)
    for activation, width, K in (("gelu", 48, 64), ("silu", 24, 64), ("silu", 48, 33)):
        weight, x = random_numbers(2 * width, K), random_numbers(5, K)
        gated = ops.pack_gated_linear(weight, None, activation)  # type: ignore[arg-type]
        wanted = TorchOps().pack_gated_linear(weight.double(), None, activation)(x.double())  # type: ignore[arg-type]
        assert not isinstance(gated, PackedGatedLinear)
        torch.testing.assert_close(gated(x).double(), wanted, atol=0.1, rtol=0.05)
