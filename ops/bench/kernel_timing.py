"""Timing for the kernel benchmarks: contenders take turns, and the best time of each counts.

A shared machine only ever adds time, so the minimum over rounds says most about the code; taking turns gives every contender the same
quiet and noisy moments, so that ratios hold even when the times do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def best_times(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run all contenders in turn, `rounds` times after one warm-up; return the best seconds of each."""
    best = dict.fromkeys(contenders, float("inf"))
    for contender in contenders.values():
        contender()
    for _ in range(rounds):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def read_bandwidth() -> float:
    """Return bytes a second that torch reads from memory on its threads: the sum of 256 MiB."""
    numbers = torch.ones(1 << 26)
    return numbers.numel() * 4 / best_times({"sum": numbers.sum}, rounds=9)["sum"]
