"""How each kernel is launched: its name, grid, block, shared memory and arguments. Runs nothing.

Whoever runs a `Launch` looks its kernel up in the module of a `Variant` and passes the arguments on: CuPy on a GPU, the emulation in tests.
Pointers travel as integers of the machine's width, so that no array is wrapped; the caller keeps the tensors alive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from backends.interface import AttentionLayer
from backends.kernels.dispatch import DECODE_ROWS, WARP, Shape, attention_shape
from backends.kernels.variants import Variant, store_kernel
from backends.kernels.work import Work, divide

MERGE_WARPS = 4
STORE_WARPS = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: the arguments are numpy scalars in the order and of the types of the kernel's parameters."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[np.generic, ...]
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkOnDevice:
    """A `Work` whose arrays are on the device; rows may follow that are idle (their count of rows is zero)."""

    items: Tensor  # [n, 8] int32
    merges: Tensor  # [m, 8] int32
    part_out: Tensor  # [>= num_parts, Hkv, D] float32
    part_lse: Tensor  # [>= num_parts, Hkv] float32, base 2


def passes(
    variant: Variant,
    query_lens: NDArray[np.integer],
    seq_lens: NDArray[np.integer],
    group: int,
    window: int | None,
) -> list[tuple[Shape, Work]]:
    """Return the launches that one kind of layer needs: the sequences with few rows, then the others; one or none of them may be missing.

    Which of the two serves a sequence depends on that sequence alone, and so do the bits of its result.
    """
    has_few_rows = np.asarray(query_lens) * group <= DECODE_ROWS
    pairs = []
    for is_decode in (True, False):
        if not (has_few_rows == is_decode).any():
            continue
        shape = attention_shape(variant, group, is_decode)
        work = divide(query_lens, seq_lens, group, shape.tile_rows, window, has_few_rows == is_decode)
        if len(work.items):
            pairs.append((shape, work))
    return pairs


def attention(
    shape: Shape,
    q: Tensor,
    layer: AttentionLayer,
    scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    work: WorkOnDevice,
    out: Tensor,
    lse: Tensor | None,
) -> Launch:
    """Return the attention launch of `shape`, to be looked up in the variant that the shape was made for: grid (items, kv heads).

    q, out [T, H, D] with contiguous heads; scales [num_blocks, 2, Hkv, B] float32 if the cache is quantised; lse [T, H] float32, natural
    logarithm. 16-byte aligned rows are assumed, and a block size that is a power of two of at least 8.
    """
    score_scale, cap = score_constants(layer.scale, layer.soft_cap)
    arguments = (
        pointer(q),
        pointer(layer.cache),
        pointer(scales),
        pointer(block_tables),
        pointer(seq_lens),
        pointer(query_start_loc),
        pointer(work.items),
        pointer(out),
        pointer(lse),
        pointer(work.part_out),
        pointer(work.part_lse),
        np.int64(block_tables.stride(0)),
        np.int64(layer.cache.stride(0)),
        np.int64(0 if scales is None else scales.stride(0)),
        np.int64(q.stride(0)),
        np.int64(out.stride(0)),
        np.int32(layer.num_heads // layer.num_kv_heads),
        np.int32(block_shift(layer.cache.shape[3])),
        np.int32(layer.window or 0),
        np.float32(score_scale),
        np.float32(cap),
    )
    grid = (work.items.shape[0], layer.num_kv_heads, 1)
    return Launch(shape.kernel, grid, (shape.threads, 1, 1), arguments, shape.shared_bytes)


def merge(
    shape: Shape, layer: AttentionLayer, query_start_loc: Tensor, work: WorkOnDevice, out: Tensor, lse: Tensor | None
) -> Launch:
    """Return the launch that joins split ranges: grid (merges, kv heads, row groups), a warp per row. In the attention's own module."""
    arguments = (
        pointer(work.merges),
        pointer(query_start_loc),
        pointer(work.part_out),
        pointer(work.part_lse),
        pointer(out),
        pointer(lse),
        np.int64(out.stride(0)),
        np.int32(layer.num_heads // layer.num_kv_heads),
    )
    grid = (work.merges.shape[0], layer.num_kv_heads, -(-shape.tile_rows // MERGE_WARPS))
    return Launch("merge_parts", grid, (MERGE_WARPS * WARP, 1, 1), arguments)


def store_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, cache: Tensor, scales: Tensor | None) -> Launch:
    """Return the launch that writes k, v [T, Hkv, D] into their slots, quantised if `scales` is given: a warp per token, head and k or v."""
    T, Hkv, D = k.shape
    kernel = store_kernel(k.dtype, cache.dtype)
    assert kernel is not None, "unsupported() refuses what has no kernel"
    arguments = (
        pointer(k),
        pointer(v),
        pointer(slot_mapping),
        pointer(cache),
        pointer(scales),
        np.int64(k.stride(0)),
        np.int64(k.stride(1)),
        np.int64(v.stride(0)),
        np.int64(v.stride(1)),
        np.int64(cache.stride(0)),
        np.int64(0 if scales is None else scales.stride(0)),
        np.int32(Hkv),
        np.int32(D),
        np.int32(block_shift(cache.shape[3])),
    )
    return Launch(kernel, (T, -(-2 * Hkv // STORE_WARPS), 1), (STORE_WARPS * WARP, 1, 1), arguments)


def score_constants(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return what multiplies q · k and the cap, both for base-2 exponentials; see `capped` in attention.cuh. A cap of 0 means none."""
    if soft_cap is None:
        return scale * math.log2(math.e), 0.0
    return 2 * scale / soft_cap * math.log2(math.e), soft_cap * math.log2(math.e)


def pointer(tensor: Tensor | None) -> np.uint64:
    """Return the address of a tensor's first element; 0 for None."""
    return np.uint64(0 if tensor is None else tensor.data_ptr())


def block_shift(block_size: int) -> int:
    """Return log2 of a block size; the kernels divide by shifting."""
    return block_size.bit_length() - 1
