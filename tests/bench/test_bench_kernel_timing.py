"""Kernel timing: measuring memory must not change how many threads are measured afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_timing import read_bandwidth


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_read_rate_is_measured_without_changing_the_number_of_threads() -> None:
    torch.set_num_threads(1)
    assert read_bandwidth(1 << 20) > 0
    assert torch.get_num_threads() == 1
