"""The kernels on rows, run thread by thread on the CPU, against their definition in torch: every layout that a model hands them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from backends import cuda_ops
from backends.cuda_ops import CudaOps, open_cuda_ops
from backends.kernels.launch import Launch
from backends.kernels.variants import ROWS
from backends.ops import Activation, TorchOps, open_ops
from tests.cuda_emulation.backend import LoadedModule
from tests.cuda_emulation.module import EmulatedModule, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

# Relative to the largest value: float32 sums in another order, and one unit of the last place where that tips a rounding.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Counting(LoadedModule):
    """Counts launches: what went to torch instead proves nothing."""

    launches: list[str]

    def __init__(self, variant: Any) -> None:
        super().__init__(variant)
        self.launches = []

    def run(self, launch: Launch) -> None:
        self.launches.append(launch.kernel)
        super().run(launch)


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return cast("torch.dtype", request.param)


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(Counting)


def launches(ops: CudaOps) -> list[str]:
    return cast("Counting", ops._module).launches


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    limit = TOLERANCE[actual.dtype] * max(1.0, float(wanted.abs().max()))
    assert (actual.float() - wanted.float()).abs().max() <= limit
    assert not actual.isnan().any()


@pytest.mark.parametrize("width", [8, 576, 2100 * 8])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_norms_equal_their_definition(
    ops: CudaOps, dtype: torch.dtype, width: int, weight_dtype: torch.dtype | None
) -> None:
    """Rows of wider ones, of one chunk, of fewer than a warp and of more than a thread has in one go."""
    weight = numbers(width, dtype=weight_dtype or dtype)
    x = numbers(3, width + 32, dtype=dtype)[:, :width]
    assert_close(ops.rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5))
    ours = numbers(3, width, dtype=dtype, seed=5)
    theirs = ours.clone()
    assert_close(ops.add_rms_norm(x, ours, weight, 1e-6), TorchOps().add_rms_norm(x, theirs, weight, 1e-6))
    assert torch.equal(ours, theirs)
    assert len(launches(ops)) == 2


@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_heads_are_normalised_in_place_and_nothing_beside_them(
    ops: CudaOps, dtype: torch.dtype, head_size: int
) -> None:
    ours = numbers(3, 9, head_size, dtype=dtype)
    theirs, weight = ours.clone(), numbers(head_size)
    ops.rms_norm_heads_(ours[:, :6], weight, 1e-6)
    TorchOps().rms_norm_heads_(theirs[:, :6], weight, 1e-6)
    assert_close(ours, theirs)
    assert torch.equal(ours[:, 6:], theirs[:, 6:])
    assert launches(ops) == [f"norm_heads_{ROWS_NAMES[dtype]}"]


@pytest.mark.parametrize("rotary", [64, 40, 6])
def test_rotation_turns_the_first_dimensions_of_queries_and_keys(ops: CudaOps, dtype: torch.dtype, rotary: int) -> None:
    """Of slices of a fused projection; a part of the head may stay as it is."""
    ours = numbers(5, 8, 64, dtype=dtype)
    theirs = ours.clone()
    angles = numbers(5, rotary // 2)
    for engine, fused in ((ops, ours), (TorchOps(), theirs)):
        engine.rotary_(fused[:, :4], fused[:, 4:6], angles.cos(), angles.sin())
    assert_close(ours, theirs)
    assert torch.equal(ours[:, 6:], theirs[:, 6:])
    assert torch.equal(ours[:, :, rotary:], theirs[:, :, rotary:])
    assert launches(ops) == [f"rotate_{ROWS_NAMES[dtype]}"]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", [8, 320, 2056])
def test_activation_equals_its_definition(ops: CudaOps, dtype: torch.dtype, width: int, activation: Activation) -> None:
    gate_up = numbers(3, 2 * width, dtype=dtype) * 4
    gate_up[0, 0], gate_up[0, 1] = -200.0, 90.0  # neither end of the exponential may become NaN
    assert_close(ops.act_mul(gate_up, activation), TorchOps().act_mul(gate_up, activation))
    assert len(launches(ops)) == 1


def test_a_row_gives_the_same_bits_alone_and_among_others(ops: CudaOps) -> None:
    x, weight = numbers(4, 576, dtype=torch.bfloat16), numbers(576)
    together = ops.rms_norm(x, weight, 1e-6)
    assert all(torch.equal(ops.rms_norm(x[i : i + 1], weight, 1e-6)[0], together[i]) for i in range(4))


def test_what_no_kernel_serves_goes_to_torch(ops: CudaOps) -> None:
    """Odd widths, rows that are not aligned, weights of a third type, no rows at all."""
    for x, weight in (
        (numbers(3, 20, dtype=torch.bfloat16), numbers(20)),
        (numbers(3, 65)[:, 1:], numbers(64)),
        (numbers(3, 64), numbers(64, dtype=torch.bfloat16)),
        (numbers(0, 64), numbers(64)),
        (numbers(3, 64).double(), numbers(64)),
    ):
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), TorchOps().rms_norm(x, weight, 1e-6))
    odd = numbers(3, 2 * 20)
    assert torch.equal(ops.act_mul(odd, "silu"), TorchOps().act_mul(odd, "silu"))
    assert launches(ops) == []
    misaligned = numbers(3, 65)[:, 1:]
    residual, other = numbers(3, 64), numbers(3, 64)
    assert_close(
        ops.add_rms_norm(misaligned, residual, numbers(64), 1e-6),
        TorchOps().add_rms_norm(misaligned, other, numbers(64), 1e-6),
    )
    assert torch.equal(residual, other)


@pytest.mark.parametrize("fault", ["__syncthreads();", "total / width + eps"])
def test_a_planted_fault_is_caught(fault: str, tmp_path: Any) -> None:
    import shutil

    from backends.kernels.variants import SOURCES

    sources = tmp_path / "kernels"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (sources / "rows.cu").read_text()
    assert text.count(fault) == 1
    (sources / "rows.cu").write_text(text.replace(fault, {"__syncthreads();": ""}.get(fault, "total + eps")))
    module = EmulatedModule(ROWS, sources)
    x, weight = numbers(3, 2048), numbers(2048)
    wrong = 0
    for seed in range(3):
        faulty = CudaOps(lambda _: SimpleNamespace(run=lambda launch: module.run(launch, seed)))  # type: ignore[arg-type]  # noqa: B023
        found = faulty.rms_norm(x, weight, 1e-6)
        wrong += not torch.allclose(found, TorchOps().rms_norm(x, weight, 1e-6), rtol=1e-4, atol=1e-5)
    assert wrong


def test_a_gpu_gets_them_where_cupy_is_and_the_card_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import backends.cupy_raw

    monkeypatch.setattr(backends.cupy_raw, "CupyModule", LoadedModule)
    monkeypatch.setattr(backends.cupy_raw, "driver_fault", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__spec__=object()))
    assert isinstance(open_cuda_ops((9, 0)), CudaOps)
    assert open_cuda_ops((7, 5)) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert isinstance(open_ops(torch.device("cuda"), torch.bfloat16), CudaOps)
    monkeypatch.setattr(backends.cupy_raw, "driver_fault", lambda: "too old")
    assert open_cuda_ops((9, 0)) is None
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert open_cuda_ops((9, 0)) is None
    assert type(open_ops(torch.device("cuda"), torch.bfloat16)) is TorchOps


ROWS_NAMES = {dtype: cuda_ops.TYPE_NAMES[dtype] for dtype in TOLERANCE}
