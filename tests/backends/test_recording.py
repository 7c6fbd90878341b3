"""A recorded function does on replay what it does when it is called, for any number of rows; what cannot be replayed is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from backends.numba_kernels import threads
from backends.numba_kernels.recording import NotReplayable, recorded_launches
from backends.numba_kernels.threads import Kernel, RecordedKernels
from backends.numba_kernels.vectors import read_float, read_int64, take_next, write_float
from backends.numba_ops import NumbaOps

WIDTH, MOST = 64, 90


@pytest.fixture(scope="module")
def double() -> Kernel:
    def double_numbers(arguments: int) -> None:
        """y = 2 x for float32. Arguments: counter, x, y, elements, elements per item."""
        x, y = read_int64(arguments + 8), read_int64(arguments + 16)
        count, each = read_int64(arguments + 24), read_int64(arguments + 32)
        while True:
            first = take_next(arguments) * each
            if first >= count:
                break
            for i in range(first, min(first + each, count)):
                write_float(y + i * 4, read_float(x + i * 4) * 2)

    return Kernel(double_numbers, 4)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Layers:
    """Norms and gates over a residual stream, as a decoder has them, on inputs that stay where they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(50, WIDTH, generator=generator).to(dtype)
        self.wide_table = torch.randn(50, 2 * WIDTH, generator=generator).to(dtype)
        self.ids = torch.randint(0, 50, (MOST,), generator=generator)
        self.weight = torch.randn(WIDTH, generator=generator)
        self.ops = NumbaOps(dtype)

    def forward(self, rows: int) -> Tensor:
        residual = self.ops.rows(self.table, self.ids[:rows])
        x = self.ops.rms_norm(residual, self.weight, 1e-5)
        for _ in range(4):
            wide = self.ops.rows(self.wide_table, self.ids[:rows])
            self.ops.scale_(x, 0.5)
            x = self.ops.add_rms_norm(self.ops.act_mul(wide, "silu"), residual, self.weight, 1e-5)
            self.ops.rms_norm_heads_(x.view(rows, 2, WIDTH // 2), self.weight[: WIDTH // 2], 1e-5)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replay_equals_the_call_for_every_number_of_rows(dtype: torch.dtype, num_threads: int) -> None:
    layers = Layers(dtype)
    with torch.inference_mode():
        recorded = RecordedKernels(layers.forward, MOST)
        for rows in [*range(1, 20), 45, 46, 47, MOST, 3, 1]:
            layers.ids.copy_(torch.randint(0, 50, (MOST,)))
            assert torch.equal(recorded.replay(rows), layers.forward(rows))


def test_a_replay_without_a_pool_of_ours_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(torch.bfloat16)
    wanted = layers.forward(MOST)
    monkeypatch.setattr(threads, "worker_pool", lambda: None)
    recorded = RecordedKernels(layers.forward, MOST)
    assert torch.equal(recorded.replay(MOST), wanted)


def test_large_operations_are_shared_out_and_small_ones_are_not(double: Kernel) -> None:
    """8192 elements is where a second thread begins to pay: 128 rows of 64."""
    x, y = torch.randn(1000, 64), torch.empty(1000, 64)

    def function(rows: int) -> Tensor:
        double.start(rows * 64, x.data_ptr(), y.data_ptr(), rows * 64, 64)
        double.launch(2, x.data_ptr(), y.data_ptr(), rows * 64, 64)
        double.run(x.data_ptr(), y.data_ptr(), rows * 64, 64)
        return y[:rows]

    program = RecordedKernels(function, 1000).program
    limits = program.operations[:, 2:].tolist()
    assert [limit[1] for limit in limits] == [128, 0, 0]
    assert [limit[0] for limit in limits[1:]] == [2, 1]


def test_nothing_is_carried_out_while_it_is_recorded(double: Kernel) -> None:
    x, y = torch.ones(8, 4), torch.zeros(8, 4)

    def function(rows: int) -> Tensor:
        double.run(x.data_ptr(), y.data_ptr(), rows * 4, 4)
        return y[:rows]

    recorded = RecordedKernels(function, 8)
    assert y.eq(0).all()
    recorded.replay(3)
    assert y[:3].eq(2).all()
    assert y[3:].eq(0).all()
    with pytest.raises(ValueError, match="9 rows; the recording is for 1 to 8"):
        recorded.replay(9)


def test_memory_is_used_again_once_no_tensor_needs_it(double: Kernel) -> None:
    """A chain of a hundred buffers needs two of them; a view keeps its buffer from being taken."""
    x = torch.randn(8, 16)

    def function(rows: int) -> Tensor:
        held = torch.empty((rows, 16)).view(rows, 4, 4)[:, 1:]
        double.run(x.data_ptr(), held.data_ptr(), 4, 4)
        y = x[:rows]
        for _ in range(100):
            z = torch.empty((rows, 16))
            assert not (held.data_ptr() - 16 <= z.data_ptr() < held.data_ptr() + rows * 64 - 16)
            double.run(y.data_ptr(), z.data_ptr(), rows * 16, 16)
            y = z
        return y

    recorded = RecordedKernels(function, 8)
    assert recorded.program.num_bytes == 3 * 8 * 16 * 4  # `held` and two that take turns
    assert torch.equal(recorded.replay(5), x[:5] * 2.0**100)


REFUSED: dict[str, tuple[Callable[[Kernel, Tensor, int], object], str]] = {
    "arithmetic": (lambda _, x, rows: x[:rows] + 1, "torch computes aten::add"),
    "in place": (lambda _, x, rows: x[:rows].mul_(2), "torch computes aten::mul_"),
    "matrix product": (lambda _, x, rows: x[:rows] @ x.T, "torch computes aten::"),
    "a conversion": (lambda _, x, rows: x[:rows].to(torch.bfloat16), "torch computes aten::"),
    "a look": (lambda _, x, rows: float(x[0, 0]), "torch computes aten::"),
    "a square": (
        lambda kernel, x, rows: kernel.run(x.data_ptr(), x.data_ptr(), rows * rows, 1),
        r"argument 2 of operation 0 \(double_numbers\) is not proportional to the number of rows",
    ),
    "another item": (
        lambda kernel, x, rows: kernel.run(x.data_ptr(), x.data_ptr(), rows, 1 if rows < 5 else 2),
        r"argument 3 of operation 0",
    ),
    "other threads": (
        lambda kernel, x, rows: kernel.launch(1 if rows < 5 else 2, x.data_ptr(), x.data_ptr(), rows, 1),
        "the number of threads of operation 0",
    ),
    "fewer launches": (
        lambda kernel, x, rows: rows > 2 and kernel.run(x.data_ptr(), x.data_ptr(), rows, 1),
        "the number of launches",
    ),
    "another launch": (
        lambda kernel, x, rows: (
            kernel.run(x.data_ptr(), torch.empty(rows + 9).data_ptr(), rows, 1)
            if rows > 2
            else [kernel.run(torch.empty(99).data_ptr(), x.data_ptr(), rows, 1)]
        ),
        "depend",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_replay_could_not_repeat_is_refused_and_nothing_stays_open(case: str, double: Kernel) -> None:
    x = torch.ones(8, 8)
    act, message = REFUSED[case]

    def function(rows: int) -> Tensor:
        act(double, x, rows)
        return x[:rows]

    with torch.inference_mode(), pytest.raises(NotReplayable, match=message):
        RecordedKernels(function, 8)
    assert recorded_launches() is None
    y = torch.zeros(8, 8)
    double.run(x.data_ptr(), y.data_ptr(), 64, 8)  # carried out again
    assert torch.equal(y, x * 2)


def test_an_error_in_the_function_passes_and_nothing_stays_open() -> None:
    def function(rows: int) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        RecordedKernels(function, 8)
    assert recorded_launches() is None
    assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


def test_other_threads_launch_as_ever_while_one_records(double: Kernel) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x, y = torch.ones(8, 8), torch.zeros(8, 8)

    def function(rows: int) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            other.submit(double.run, x.data_ptr(), y.data_ptr(), 64, 8).result()
        return x[:rows]

    RecordedKernels(function, 8)
    assert torch.equal(y, x * 2)


def test_recording_does_not_import_torch_s_compiler() -> None:
    """It would take a second of every start, and 60 MB."""
    program = """
import sys
import torch
from backends.numba_kernels.recording import record
program = record(lambda rows: torch.empty(rows, 4)[:, :2], 8, 1)
assert program.num_bytes == 128, program.num_bytes
sys.exit("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
