"""Timing for the kernel benchmarks: contenders take turns, and the best time of each counts.

A shared machine only ever adds time, so the minimum over rounds says most about the code; taking turns gives every contender the same
quiet and noisy moments, so that ratios hold even when the times do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from backends.huge_pages import empty_weight


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


def read_bandwidth(num_bytes: int = 1 << 28) -> float:
    """Return bytes a second that all threads read from a buffer of `num_bytes`: the better one of two readers.

    torch's sum is slower than memory on some machines; a compiled loop that only combines integers is not.
    """
    numbers = empty_weight(num_bytes // 8 * 8).view(torch.int64).fill_(1)  # where weights lie
    words, singles = numbers.numpy(), numbers.view(torch.float32)
    num_threads = torch.get_num_threads()
    best = best_times({"sum": singles.sum, "combine": lambda: _combine(words, num_threads)}, rounds=9)
    torch.set_num_threads(
        num_threads
    )  # Numba's threads and torch's may be one team, and then each sets the number for both
    return numbers.numel() * 8 / min(best.values())


def matmul_rate() -> float:
    """Return operations a second of the best bfloat16 matrix product, of two square sizes."""
    best = 0.0
    for size in (2048, 4096):
        matrix = torch.ones(size, size, dtype=torch.bfloat16)
        seconds = best_times({"product": lambda matrix=matrix: matrix @ matrix}, rounds=4)["product"]
        best = max(best, 2 * size**3 / seconds)
    return best


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _combine(words: NDArray[np.int64], num_parts: int) -> NDArray[np.int64]:
    """Read every word once, in `num_parts` stretches at the same time."""
    found = np.zeros(num_parts, np.int64)
    length = words.shape[0] // num_parts
    for part in numba.prange(num_parts):
        combined = np.int64(0)
        for index in range(part * length, (part + 1) * length):
            combined ^= words[index]
        found[part] = combined
    return found
