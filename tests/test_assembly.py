"""What the options leave to the device."""

from __future__ import annotations

import pytest

from backends.interface import DeviceInfo
from service.assembly import scheduling
from service.config import SchedulerConfig


@pytest.mark.parametrize(
    ("kind", "token_budget", "given", "expected"),
    [("cpu", 256, None, 1024), ("cpu", 4096, None, 4096), ("cuda", 256, None, 2048), ("cpu", 256, 300, 300)],
)
def test_the_budget_without_streams_is_the_device_s_unless_given_and_never_below_the_other(
    kind: str, token_budget: int, given: int | None, expected: int
) -> None:
    decided = scheduling(SchedulerConfig(token_budget=token_budget, prefill_budget=given), DeviceInfo(kind=kind))
    assert decided.prefill_budget == expected


def test_steps_overlap_on_a_gpu_unless_told_otherwise() -> None:
    assert scheduling(SchedulerConfig(), DeviceInfo(kind="cuda")).overlap
    assert not scheduling(SchedulerConfig(overlap=False), DeviceInfo(kind="cuda")).overlap
