"""The pool's memory: sizes, layer views, and block copies that are all or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.errors import BlockCopyError
from backends.kv_cache import KVCache, KVCacheSpec

SPEC = KVCacheSpec(num_layers=3, num_heads=4, num_kv_heads=2, head_size=16, block_size=8, dtype=torch.bfloat16)


def filled(num_blocks: int = 6) -> KVCache:
    cache = KVCache(SPEC, num_blocks, torch.device("cpu"))
    for index in range(SPEC.num_layers):
        layer = cache.layer(index)
        layer.copy_(torch.arange(num_blocks).view(-1, 1, 1, 1, 1) + 10 * index)
    return cache


def contents(cache: KVCache) -> list[list[float]]:
    """The one number that fills each block, per layer."""
    layers = [cache.layer(index) for index in range(SPEC.num_layers)]
    assert all((layer == layer[:, :1, :1, :1, :1]).all() for layer in layers)
    return [layer[:, 0, 0, 0, 0].tolist() for layer in layers]


def test_sizes_count_keys_and_values_of_all_layers() -> None:
    assert SPEC.bytes_per_block == 3 * 2 * 2 * 8 * 16 * 2
    assert SPEC.bytes_per_token * SPEC.block_size == SPEC.bytes_per_block


def test_one_head_of_a_block_is_one_run_of_memory() -> None:
    layer = KVCache(SPEC, 4, torch.device("cpu")).layer(1)
    assert tuple(layer.shape) == (4, 2, 2, 8, 16)
    assert layer[2, 1, 1].is_contiguous()


@pytest.mark.parametrize("num_blocks", [2, 40_000])
def test_elements_and_scales_begin_with_a_cache_line(num_blocks: int) -> None:
    """Large areas come from the system with a header before them, and a row of 64 bytes must not lie in two lines."""
    pool = KVCache(replace(SPEC, quantised=torch.int8), num_blocks, torch.device("cpu"))
    scales = pool.scales(0)
    assert scales is not None
    assert pool.layer(0).data_ptr() % 64 == scales.data_ptr() % 64 == 0


def test_a_copy_takes_every_layer_and_leaves_the_source() -> None:
    cache = filled()
    cache.copy_blocks([(2, 5), (3, 1)])
    assert contents(cache) == [[0, 3, 2, 3, 4, 2], [10, 13, 12, 13, 14, 12], [20, 23, 22, 23, 24, 22]]


def test_sources_are_read_before_any_destination_is_written() -> None:
    cache = filled()
    cache.copy_blocks([(1, 2), (2, 3), (3, 1), (4, 4), (1, 5)])
    assert contents(cache)[0] == [0, 3, 1, 2, 4, 1]


def test_no_copies_are_fine() -> None:
    cache = filled()
    cache.copy_blocks([])
    assert contents(cache)[0] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("copies", [[(1, 6)], [(6, 1)], [(-1, 2)], [(1, -1)], [(1, 2), (3, 2)], [(2, 3), (1, 99)]])
def test_a_bad_copy_is_refused_and_nothing_is_copied(copies: list[tuple[int, int]]) -> None:
    cache = filled()
    with pytest.raises(BlockCopyError):
        cache.copy_blocks(copies)
    assert contents(cache)[0] == [0, 1, 2, 3, 4, 5]
