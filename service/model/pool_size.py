"""How many blocks the pool gets, and how long a context then fits. Knows bytes and tokens, not models, devices or requests.

Invariant: a pool that is returned holds at least one sequence of the `max_model_len` that comes with it, so that whatever the edge admits
can run to its end alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from backends.kv_cache import KVCacheSpec
from service.config import CacheConfig, parse_bytes
from service.errors import ConfigError

AUTO_SHARE = 5  # "auto" takes a fifth of the free memory,
AUTO_LIMIT_BYTES = 4 * 2**30  # and no more than this,
# nor than so many tokens for each sequence that may run, since every decode reads all of them: on a CPU longer contexts at that concurrency
# are slow for their reads (64 of 384 tokens of SmolLM2-135M: 566 MB a step) long before they want for room. One full context fits anyway.
TYPICAL_CONTEXT = 384
NULL_BLOCKS = 1  # block 0 holds no sequence

# `cache.kv_dtype` → the elements of a quantised pool, None for the model's own.
QUANTISED_DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`num_blocks` counts the null block; `max_model_len` is what one sequence may hold, in tokens."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A GPU's memory: bytes that were free before the weights were loaded, and bytes in use after the largest step, `profiling.measure`."""

    free_bytes: int
    used_bytes: int


def size_pool(
    cache: CacheConfig,
    spec: KVCacheSpec,
    *,
    free_memory_bytes: int,
    declared_len: int,
    requested_len: int | None,
    max_num_seqs: int,
    device: DeviceShare | None = None,
) -> PoolSize:
    """Decide the pool: `cache.num_blocks` before `cache.size` before a share of the free memory.

    `declared_len` is the model's own context length, `requested_len` what the user set, None for as much as the model and the pool allow.
    An automatic pool has room for `max_num_seqs` contexts of typical length, or one full context where that is more, as far as a share of
    `free_memory_bytes` holds it: a pool fills with cached prefixes sooner or later, and on a CPU other programs want that memory. On a GPU
    it takes all that `cache.gpu_memory_utilization` grants and the measured `device` leaves, since nothing else wants that.
    Raises `ConfigError`, naming the longest context that would fit, when a requested one does not, and when the memory holds no block at all.
    """
    wanted_len = declared_len if requested_len is None else requested_len
    if device is not None and cache.num_blocks is None and cache.size == "auto":
        num_blocks = _blocks_on_device(cache, spec, device)
    else:
        most_useful = max(
            max_num_seqs * _blocks_of(min(wanted_len, TYPICAL_CONTEXT), spec), _blocks_of(wanted_len, spec)
        )
        num_blocks = _num_blocks(cache, spec, free_memory_bytes, most_useful)
    longest = (num_blocks - NULL_BLOCKS) * spec.block_size
    if longest < 1:
        raise ConfigError(
            f"the block pool would hold no block: one of {spec.block_size} tokens takes {spec.bytes_per_block} bytes, beside the null "
            f"block of the same size; give cache.size at least {(NULL_BLOCKS + 1) * spec.bytes_per_block} bytes (at $.cache.size)",
            param="cache.size",
        )
    if requested_len is not None and longest < requested_len:
        needed = NULL_BLOCKS + _blocks_of(requested_len, spec)
        raise ConfigError(
            f"max_model_len {requested_len} does not fit the block pool: {num_blocks} blocks of {spec.block_size} tokens hold a context of at "
            f"most {longest}; lower max_model_len or give the cache {needed} blocks ({needed * spec.bytes_per_block} bytes) "
            "(at $.model.max_model_len)",
            param="model.max_model_len",
        )
    return PoolSize(num_blocks, min(wanted_len, longest))


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take: what the system has, or what its control group leaves if that is less.

    Memory that only caches files counts as free in both. `root` is where `proc` and `sys` lie. Raises `ConfigError` where the system does
    not say (then the size has to be given).
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError) as error:
        raise ConfigError(
            "the system does not say how much memory is free (no MemAvailable in /proc/meminfo); set cache.size (at $.cache.size)",
            param="cache.size",
        ) from error
    return min([available, *_group_memory(root)])


def _num_blocks(cache: CacheConfig, spec: KVCacheSpec, free_memory_bytes: int, most_useful: int) -> int:
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.size != "auto":
        return parse_bytes(cache.size) // spec.bytes_per_block
    affordable = min(free_memory_bytes // AUTO_SHARE, AUTO_LIMIT_BYTES) // spec.bytes_per_block
    return min(affordable, NULL_BLOCKS + most_useful)


def _blocks_on_device(cache: CacheConfig, spec: KVCacheSpec, device: DeviceShare) -> int:
    granted = int(device.free_bytes * cache.gpu_memory_utilization)
    left = granted - device.used_bytes
    num_blocks = left // spec.bytes_per_block
    if num_blocks <= NULL_BLOCKS:
        raise ConfigError(
            f"the GPU leaves no memory for the block pool: {cache.gpu_memory_utilization:g} of the {device.free_bytes} bytes that were free are "
            f"{granted}, and weights and the largest step take {device.used_bytes}; a block of {spec.block_size} tokens takes "
            f"{spec.bytes_per_block}, and the null block as much. Raise cache.gpu_memory_utilization, lower scheduler.prefill_budget, "
            "scheduler.token_budget or scheduler.max_num_seqs, or take a smaller model (at $.cache.gpu_memory_utilization)",
            param="cache.gpu_memory_utilization",
        )
    return num_blocks


def _blocks_of(num_tokens: int, spec: KVCacheSpec) -> int:
    return -(-num_tokens // spec.block_size)


def _group_memory(root: Path) -> list[int]:
    """Return what each limited control group around this process leaves, for version 2 and for version 1."""
    folders = []
    for line in _lines(root / "proc/self/cgroup"):  # "0::/a/b", or "4:memory:/a/b" in version 1
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            folders.append((root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            folders.append((root / "sys/fs/cgroup/memory", path, *names))
    left = []
    for base, path, limit_name, usage_name, cached_name in folders:
        # A limit may stand at any level; inside a container the path is often the host's and only the base exists.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            folder = base.joinpath(*parts[:depth])
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is None or usage is None:
                continue
            cached = [
                int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(f"{cached_name} ")
            ]
            left.append(max(0, limit - usage + sum(cached)))
    return left


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit
