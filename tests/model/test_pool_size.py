"""The size of the pool, from options, memory and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.kv_cache import KVCacheSpec
from service.config import CacheConfig
from service.errors import ConfigError
from service.model.pool_size import PoolSize, free_memory, size_pool

SPEC = KVCacheSpec(num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, block_size=16, dtype=torch.float32)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4
GIB = 2**30


def sized(cache: CacheConfig | None = None, **more: Any) -> PoolSize:
    arguments: dict[str, Any] = {
        "free_memory_bytes": 10 * GIB,
        "declared_len": 512,
        "requested_len": None,
        "max_num_seqs": 4,
        **more,
    }
    return size_pool(cache or CacheConfig(), SPEC, **arguments)


def test_a_number_of_blocks_counts_before_a_size_and_a_size_before_the_memory() -> None:
    assert sized(CacheConfig(num_blocks=50, size="1GiB")).num_blocks == 50
    assert sized(CacheConfig(size=str(77 * BLOCK_BYTES + 5))).num_blocks == 77


def test_an_automatic_pool_takes_a_fifth_of_the_memory_at_most_4_gib_and_no_more_than_all_sequences_need() -> None:
    assert sized(declared_len=10**9, max_num_seqs=64, free_memory_bytes=GIB).num_blocks == GIB // 5 // BLOCK_BYTES
    assert sized(declared_len=10**9, max_num_seqs=64, free_memory_bytes=900 * GIB).num_blocks == 4 * GIB // BLOCK_BYTES
    assert sized(declared_len=380, max_num_seqs=4) == PoolSize(1 + 4 * 24, 380)
    assert sized(declared_len=512, requested_len=100, max_num_seqs=4) == PoolSize(1 + 4 * 7, 100)


def test_an_automatic_pool_has_room_for_typical_contexts_or_for_one_full_one() -> None:
    assert sized(declared_len=8192, max_num_seqs=64) == PoolSize(1 + 64 * 24, 8192)
    assert sized(declared_len=8192, max_num_seqs=4) == PoolSize(1 + 512, 8192)
    assert sized(declared_len=512, requested_len=4096, max_num_seqs=2) == PoolSize(1 + 256, 4096)


def test_a_context_that_nobody_asked_for_shrinks_to_the_pool() -> None:
    assert sized(CacheConfig(num_blocks=5)) == PoolSize(5, 64)
    assert sized(CacheConfig(num_blocks=33)) == PoolSize(33, 512)
    assert sized(CacheConfig(num_blocks=34)) == PoolSize(34, 512)


@pytest.mark.parametrize(("requested", "num_blocks"), [(63, 5), (64, 5), (65, 6)])
def test_a_requested_context_fits_exactly_or_is_refused_with_the_longest_that_would(
    requested: int, num_blocks: int
) -> None:
    """BLK-11: with the null block, one block less is one too few."""
    assert sized(CacheConfig(num_blocks=num_blocks), requested_len=requested).max_model_len == requested
    longest = (num_blocks - 2) * 16
    with pytest.raises(ConfigError, match=f"max_model_len {requested} .* at most {longest};") as caught:
        sized(CacheConfig(num_blocks=num_blocks - 1), requested_len=requested)
    assert caught.value.param == "model.max_model_len"


def test_memory_for_no_block_at_all_is_an_error_that_says_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=f"at least {2 * BLOCK_BYTES} bytes"):
        sized(CacheConfig(size=str(2 * BLOCK_BYTES - 1)))
    with pytest.raises(ConfigError, match="no block"):
        sized(free_memory_bytes=1000)
    assert sized(CacheConfig(size=str(2 * BLOCK_BYTES))) == PoolSize(2, 16)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")


MEMINFO = "MemTotal:       64000 kB\nMemFree:         100 kB\nMemAvailable:   50000 kB\n"


def test_free_memory_is_what_the_system_has_available(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.stat": "anon 1\n"})
    assert free_memory(tmp_path) == 50_000 * 1024


def test_a_limit_of_any_group_above_the_process_lowers_it_and_cached_files_count_as_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "9000000\n",
            "sys/fs/cgroup/outer/memory.current": "4000000\n",
            "sys/fs/cgroup/outer/memory.stat": "file 9\ninactive_file 1000000\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "3000000\n",
        },
    )
    assert free_memory(tmp_path) == 6_000_000


def test_inside_a_container_the_limit_stands_at_the_root_of_the_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/../../system.slice/box\n",
            "sys/fs/cgroup/memory.max": "5000000\n",
            "sys/fs/cgroup/memory.current": "6000000\n",
        },
    )
    assert free_memory(tmp_path) == 0


def test_a_limit_of_the_first_version_of_groups_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "10\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "8000000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000000\n",
            "sys/fs/cgroup/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
        },
    )
    assert free_memory(tmp_path) == 7_500_000


def test_a_system_that_does_not_say_asks_for_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set cache\.size"):
        free_memory(tmp_path)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has /proc/meminfo")
def test_this_machine_has_memory() -> None:
    assert free_memory() > 0
