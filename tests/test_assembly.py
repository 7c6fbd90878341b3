"""What the options leave to the device."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from backends.interface import DeviceInfo
from backends.numba_kernels import matrix_tiles
from service.assembly import scheduling
from service.config import SchedulerConfig

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "token_budget", "given", "expected"),
    [("cpu", 256, None, 1024), ("cpu", 4096, None, 4096), ("cuda", 256, None, 2048), ("cpu", 256, 300, 300)],
)
def test_the_budget_without_streams_is_the_device_s_unless_given_and_never_below_the_other(
    kind: str, token_budget: int, given: int | None, expected: int
) -> None:
    decided = scheduling(SchedulerConfig(token_budget=token_budget, prefill_budget=given), DeviceInfo(kind=kind), BF16)
    assert decided.prefill_budget == expected


@pytest.mark.parametrize(
    ("kind", "has_tiles", "given", "expected"),
    [("cpu", False, None, 64), ("cpu", True, None, 256), ("cpu", True, 100, 100), ("cuda", False, None, None)],
)
def test_prompts_share_a_step_until_they_keep_the_processor_busy(
    kind: str, has_tiles: bool, given: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_tiles, "has_matrix_tiles", lambda: has_tiles)
    decided = scheduling(SchedulerConfig(saturating_tokens=given), DeviceInfo(kind=kind), BF16)
    assert decided.saturating_tokens == expected


def test_steps_overlap_on_a_gpu_unless_told_otherwise() -> None:
    assert scheduling(SchedulerConfig(), DeviceInfo(kind="cuda"), BF16).overlap
    assert not scheduling(SchedulerConfig(overlap=False), DeviceInfo(kind="cuda"), BF16).overlap


@pytest.mark.parametrize(
    ("kind", "dtype", "given", "expected"),
    [
        ("cpu", BF16, "auto", "ngram"),
        ("cpu", torch.float32, "auto", "off"),
        ("cuda", BF16, "auto", "off"),
        ("cpu", BF16, "off", "off"),
        ("cuda", BF16, "ngram", "ngram"),
    ],
)
def test_tokens_are_guessed_where_that_changes_no_bit_unless_told_otherwise(
    kind: str, dtype: torch.dtype, given: Literal["auto", "off", "ngram"], expected: str
) -> None:
    assert scheduling(SchedulerConfig(speculation=given), DeviceInfo(kind=kind), dtype).speculation == expected
