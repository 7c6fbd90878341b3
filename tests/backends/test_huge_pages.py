"""Memory in huge pages: parts of chunks that nobody else has, and that outlive what made them."""

from __future__ import annotations

import gc
import itertools
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from backends.huge_pages import ALIGNMENT, CHUNK_BYTES, HUGE_PAGE, Chunks
from backends.numba_linear import PackedLinear


def test_parts_are_aligned_and_no_byte_belongs_to_two() -> None:
    chunks, chooser = Chunks(), random.Random(1)
    sizes = [
        chooser.choice([1, 127, 128, 129, 5000, 1 << 20, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1]) for _ in range(60)
    ]
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(chunks.empty, sizes))
    for part, size in zip(parts, sizes, strict=True):
        assert part.shape == (size,)
        assert part.data_ptr() % ALIGNMENT == 0
    spans = sorted((part.data_ptr(), part.data_ptr() + len(part)) for part in parts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for number, part in enumerate(parts):
        part[0], part[-1] = number, number
    assert [int(part[0]) for part in parts] == list(range(60))


def test_what_is_large_begins_with_a_huge_page_and_empty_parts_are_no_fault() -> None:
    chunks = Chunks()
    assert chunks.empty(CHUNK_BYTES + 1).data_ptr() % HUGE_PAGE == 0
    assert chunks.empty(0).shape == (0,)


def test_a_part_lives_longer_than_its_chunks() -> None:
    chunks = Chunks()
    part = chunks.empty(1000)
    part.fill_(7)
    del chunks
    gc.collect()
    others = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(8)]
    assert len(others) == 8
    assert (part == 7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_packed_weight_lies_in_huge_pages_where_the_system_grants_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system grants none")
    linear = PackedLinear(torch.ones(8192, 2048, dtype=torch.bfloat16))  # 32 MiB
    assert huge_bytes_at(linear._packed.data_ptr()) >= 16 * HUGE_PAGE - HUGE_PAGE


def huge_bytes_at(address: int) -> int:
    """Read how much of the mapping around an address lies in huge pages."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and rest:
            start, _, end = first.partition("-")
            is_here = int(start, 16) <= address < int(end, 16)
        elif is_here and first == "AnonHugePages:":
            return int(rest.split()[0]) << 10
    return 0
