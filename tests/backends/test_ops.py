"""The compiled operations against their definition in torch, in every layout that a model hands them."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from backends.numba_linear import PackedLinear
from backends.numba_ops import NumbaOps
from backends.ops import Activation, Ops, TorchOps, open_ops

# Relative to the largest value: float32 sums in another order; half a unit of bfloat16's last place, twice for a tie broken differently.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return cast("torch.dtype", request.param)


def ops_for(dtype: torch.dtype) -> Ops:
    ops = open_ops(torch.device("cpu"), dtype)
    assert isinstance(ops, NumbaOps)
    return ops


def random_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    assert not actual.isnan().any()
    if wanted.numel():
        limit = TOLERANCE[dtype] * max(1.0, wanted.abs().max().item())
        assert (actual.float() - wanted.float()).abs().max() <= limit


@pytest.mark.parametrize("num_rows", [0, 1, 3, 9, 200])
@pytest.mark.parametrize("width", [64, 576, 20])
def test_rms_norm_equals_its_definition(dtype: torch.dtype, width: int, num_rows: int) -> None:
    """Rows may be slices of wider ones; a width that no vector fits goes to torch; weights come in float32 or the type of x."""
    x = random_numbers(num_rows, width + 32, dtype=dtype)[:, :width]
    for weight in (random_numbers(width), random_numbers(width, dtype=dtype)):
        assert_close(ops_for(dtype).rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 100])
def test_add_rms_norm_updates_the_residual_and_normalises_the_sum(dtype: torch.dtype, num_rows: int) -> None:
    x, residual = random_numbers(num_rows, 576, dtype=dtype), random_numbers(num_rows, 576, dtype=dtype, seed=1)
    weight = random_numbers(576)
    ours, theirs = residual.clone(), residual.clone()
    assert_close(
        ops_for(dtype).add_rms_norm(x, ours, weight, 1e-6), TorchOps().add_rms_norm(x, theirs, weight, 1e-6), dtype
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (128, 128), (96, 64), (32, 16), (16, 16), (64, 24)])
@pytest.mark.parametrize("num_rows", [0, 1, 90])
def test_head_norms_and_rotation_work_in_place_inside_a_fused_projection(
    dtype: torch.dtype, num_rows: int, head_size: int, rotary: int
) -> None:
    """Heads 9 + 3 + 3 side by side; dimensions past `rotary` and the values stay as they were."""
    fused = random_numbers(num_rows, 15 * head_size, dtype=dtype)
    angles = random_numbers(num_rows, rotary // 2) * 100
    weight = random_numbers(head_size)
    results = []
    for ops in (ops_for(dtype), TorchOps()):
        own = fused.clone()
        q, k = (
            own[:, : 9 * head_size].view(-1, 9, head_size),
            own[:, 9 * head_size : 12 * head_size].view(-1, 3, head_size),
        )
        ops.rms_norm_heads_(q, weight, 1e-6)
        ops.rotary_(q, k, angles.cos(), angles.sin())
        assert torch.equal(own[:, 12 * head_size :], fused[:, 12 * head_size :])
        assert torch.equal(own[:, 9 * head_size : 12 * head_size].view(-1, 3, head_size)[..., rotary:], k[..., rotary:])
        results.append(own)
    assert_close(results[0], results[1], dtype)


def test_rotation_is_by_half_split_pairs() -> None:
    """(x_i, x_{i + R/2}) turns by its angle: checked against complex multiplication, not against the other implementation."""
    q, k = random_numbers(4, 2, 64), random_numbers(4, 1, 64, seed=5)
    angles = random_numbers(4, 32, seed=3)
    wanted = torch.complex(q[..., :32], q[..., 32:]) * torch.polar(torch.ones(4, 1, 32), angles.unsqueeze(1))
    for ops in (ops_for(torch.float32), TorchOps()):
        own = q.clone()
        ops.rotary_(own, k.clone(), angles.cos(), angles.sin())
        assert torch.allclose(own, torch.cat([wanted.real, wanted.imag], -1), atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(("num_rows", "width"), [(0, 64), (1, 1536), (70, 512), (3, 20)])
def test_gated_activations_equal_their_definition(
    dtype: torch.dtype, activation: Activation, num_rows: int, width: int
) -> None:
    gate_up = random_numbers(num_rows, 2 * width + 16, dtype=dtype)[:, : 2 * width] * 3
    assert_close(ops_for(dtype).act_mul(gate_up, activation), TorchOps().act_mul(gate_up, activation), dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_keep_their_limits_at_extreme_values(activation: Activation) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -88.0, 0.0, 88.0, 1e4, 1e30] * 2)
    y = ops_for(torch.float32).act_mul(torch.cat([gate, torch.ones(16)]).unsqueeze(0), activation)[0]
    assert (y[gate < 0].abs() < 1e-20 * gate[gate < 0].abs().clamp_min(1)).all()
    assert torch.allclose(y[gate >= 0], gate[gate >= 0])


def test_a_nan_stays_in_its_row_and_is_not_hidden(dtype: torch.dtype) -> None:
    """NUM-06: in each operation, a NaN in row 1 gives NaN in row 1 and nothing in row 0."""
    ops = ops_for(dtype)
    x = random_numbers(2, 64, dtype=dtype)
    x[1, 40] = torch.nan
    linear = ops.pack_linear(random_numbers(32, 64, dtype=dtype))
    for y in (ops.rms_norm(x, torch.ones(64), 1e-5), ops.act_mul(x, "silu"), ops.act_mul(x, "gelu_tanh"), linear(x)):
        assert not y[0].isnan().any()
        assert y[1].isnan().any()
    residual = x.clone()
    assert ops.add_rms_norm(torch.zeros_like(x), residual, torch.ones(64), 1e-5)[1].isnan().all()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 12, 13, 33, 49, 130])
@pytest.mark.parametrize(("N", "K"), [(96, 576), (80, 34), (16, 64), (50, 33), (576, 96)])
def test_packed_linears_equal_a_float64_product(dtype: torch.dtype, N: int, K: int, num_rows: int) -> None:
    """Panels of 32, a last panel of 16, shapes that stay in torch's hands; x a slice of wider rows; with and without bias."""
    weight, bias = random_numbers(N, K, dtype=dtype), random_numbers(N, dtype=dtype)
    x = random_numbers(num_rows, K + 6, dtype=dtype)[:, :K]
    product = x.double() @ weight.double().T
    ops = ops_for(dtype)
    for linear, wanted in (
        (ops.pack_linear(weight), product),
        (ops.pack_linear(weight, bias), product + bias.double()),
    ):
        assert_close(linear(x), wanted.to(dtype), dtype)


def test_a_row_of_a_bfloat16_product_is_the_same_alone_and_among_others() -> None:
    weight, x = random_numbers(96, 576, dtype=torch.bfloat16), random_numbers(130, 576, dtype=torch.bfloat16)
    linear = ops_for(torch.bfloat16).pack_linear(weight)
    together = linear(x)
    for row in (0, 11, 12, 77, 129):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
        assert torch.equal(linear(x[row:])[0], together[row])


@pytest.mark.parametrize(("N", "K"), [(96, 64), (80, 34), (16, 64), (48, 50), (32, 2)])
def test_a_packed_weight_gives_back_its_rows_and_itself(N: int, K: int) -> None:
    """A tied embedding looks its rows up in the packed weight, so that the largest matrix of a small model is held once."""
    weight = random_numbers(N, K, dtype=torch.bfloat16)
    packed = PackedLinear(weight)
    assert torch.equal(packed.weight(), weight)
    ids = torch.tensor([0, N - 1, 5, 15, 5])
    assert torch.equal(packed.rows(ids), weight[ids])
    assert packed.rows(ids[:0]).shape == (0, K)


@pytest.mark.parametrize("factory", [torch.float16, torch.float64], ids=str)
def test_types_without_kernels_run_in_torch(factory: torch.dtype) -> None:
    ops: Any = open_ops(torch.device("cpu"), factory)
    assert type(ops) is TorchOps
    x = torch.ones(2, 16, dtype=factory)
    assert math.isclose(ops.rms_norm(x, torch.ones(16), 0.0).mean().item(), 1.0, rel_tol=1e-3)


@pytest.mark.parametrize("width", [64, 20, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 100])
def test_rows_are_looked_up_by_number(dtype: torch.dtype, num_rows: int, width: int) -> None:
    table = random_numbers(37, width + 4, dtype=dtype)[:, :width]
    ids = torch.randint(0, 37, (num_rows,))
    assert torch.equal(ops_for(dtype).rows(table, ids), table[ids])


def test_a_number_without_a_row_gives_nan_and_reads_nothing() -> None:
    """What such a token would compute then fails as not finite, and its neighbours do not."""
    ids = torch.tensor([3, -1, 48, 1 << 60, 47])
    table = random_numbers(48, 64, dtype=torch.bfloat16)
    for found in (ops_for(torch.bfloat16).rows(table, ids), PackedLinear(table).rows(ids)):
        assert found[1:4].isnan().all()
        assert torch.equal(found[[0, 4]], table[[3, 47]])


@pytest.mark.parametrize("width", [576, 20])
def test_scaling_rounds_once(dtype: torch.dtype, width: int) -> None:
    x = random_numbers(9, width + 16, dtype=dtype)[:, :width]
    factor = float(torch.tensor(width**0.5, dtype=dtype))
    wanted = x * factor
    ops_for(dtype).scale_(x, factor)
    assert torch.equal(x, wanted)
