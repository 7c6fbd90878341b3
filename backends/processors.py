"""Which processors threads are bound to. Knows cores and threads, not what runs on them; Linux only, elsewhere nothing is bound.

Invariant: a thread is bound only to a processor that the process was allowed to use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def by_core(allowed: Iterable[int], siblings_of: Callable[[int], str] | None = None) -> list[int]:
    """Order processors so that the first ones share no core: one of each core, then the second of each, and so on.

    `siblings_of` gives Linux's list of a core's processors ("0,4", "0-1"), by default the system's.
    """
    read = siblings_of or _siblings_of
    seen: dict[str, int] = {}
    turns = []
    for processor in sorted(allowed):
        core = read(processor)
        turns.append((seen.get(core, 0), processor))
        seen[core] = seen.get(core, 0) + 1
    return [processor for _, processor in sorted(turns)]


def pin_compute_threads() -> list[int]:
    """Bind the calling thread and each worker of the kernels to a processor of its own, by core; return the processors, none if that cannot be."""
    if sys.platform != "linux":
        return []
    from backends.numba_kernels.pool import worker_pool

    pool = worker_pool()
    if pool is None:
        return []
    processors = by_core(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[0]})  # of the calling thread alone
    pool.pin([*processors[1:], processors[0]])
    return processors


def _siblings_of(processor: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # not told: a core of its own
        return str(processor)
