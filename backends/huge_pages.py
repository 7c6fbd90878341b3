"""Memory for what every step reads from end to end: weights. It lies in huge pages where the system grants them.

A weight of a small model is smaller than a huge page (2 MiB), so weights share chunks. With small pages, streaming them costs a walk of the
page tables every 4 KiB: a decode step of one sequence took 1.08 times as long in bfloat16, 1.04 in four bits (Zen 4).

Invariant: a chunk lives as long as a tensor in it, and no byte belongs to two tensors.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes; two cache lines, because processors fetch lines in pairs
HUGE_PAGE = 2 << 20
CHUNK_BYTES = 16 * HUGE_PAGE


class Chunks:
    """Hands out parts of chunks, one behind the other; what is larger than a quarter of a chunk has a chunk of its own. For any thread."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, num_bytes: int) -> Tensor:
        """Return a tensor [num_bytes] uint8, aligned to ALIGNMENT; its contents are undefined."""
        if num_bytes > CHUNK_BYTES // 4:
            return _map(num_bytes)[:num_bytes]
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                self._chunk, self._used = _map(CHUNK_BYTES), 0
            first = self._used
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return self._chunk[first : first + num_bytes]


def _map(num_bytes: int) -> Tensor:
    """Ask the system for at least so many bytes, beginning with a huge page; none is taken before it is written to."""
    # Older kernels place a mapping anywhere: room to begin at a multiple.
    size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        mapping = mmap.mmap(-1, size)
    else:  # Linux; shared memory, the default, would get small pages
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without huge pages: the memory is as good
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping
    skipped = -memory.data_ptr() % HUGE_PAGE
    return memory[skipped : skipped + len(memory) - HUGE_PAGE]


_chunks = Chunks()


def empty_weight(num_bytes: int) -> Tensor:
    """Return a tensor [num_bytes] uint8, aligned to ALIGNMENT, from the chunks that all weights of this process share."""
    return _chunks.empty(num_bytes)
