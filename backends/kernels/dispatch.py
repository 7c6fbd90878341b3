"""Which shipped variant serves a device, and the shape of its launches: what a kernel's constants are to whoever launches it.

Compiles and launches nothing. Invariant: a device gets at most one variant for a combination of types and head size, one whose shared memory
it has; what no device gets is not compiled either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.kernels.variants import CACHE, ROWS, SHIPPED, Variant

WARP = 32
DECODE_ROWS = 16  # one warp's rows of a tensor-core tile


@dataclass(frozen=True, slots=True)
class Shape:
    """What the launch of an attention kernel needs to know of it. Mirrors the constants of the sources."""

    kernel: str
    tile_rows: int
    threads: int
    shared_bytes: int


def attention_shape(variant: Variant, group: int, is_decode: bool) -> Shape:
    """Return the kernel for sequences with few rows (`is_decode`, up to `DECODE_ROWS`) or many."""
    D = variant.head_size
    if D is None or variant.kv_dtype is None:
        raise ValueError(f"{variant.name} is not an attention variant")
    if variant.stages is None:
        rows = 1 if group == 1 and is_decode else 4
        return Shape(f"attention_simt_{rows}", rows, 4 * WARP, 4 * rows * (D + 2) * 4)
    is_wide = D > 128
    row_warps, key_warps = (1, 2 if is_wide else 4) if is_decode else (4, 1)
    keys = 32 if is_wide else 64
    # An odd number of 16-byte chunks a row: see attention_mma.cu.
    ring = variant.stages * keys * 2 * (D * variant.kv_dtype.itemsize // 16 | 1) * 16
    scales = variant.stages * keys * 2 * 4 if variant.is_quantised else 0
    has_shared_queries = is_wide or (variant.is_quantised and not is_decode and D == 128)
    queries = 16 * row_warps * (D * 2 // 16 | 1) * 16 if has_shared_queries else 0
    meeting = 16 * row_warps * key_warps * (D + 2) * 4 if key_warps > 1 else 0
    name = "attention_mma_decode" if is_decode else "attention_mma_prefill"
    return Shape(name, 16 * row_warps, WARP * row_warps * key_warps, max(ring + scales + queries, meeting))


def shared_bytes_limit(capability: tuple[int, int]) -> int:
    """Return the shared memory that one block may ask for (CUDA C++ Programming Guide, table of compute capabilities)."""
    if capability < (8, 0):
        return 64 << 10
    if capability in ((8, 6), (8, 9)) or capability >= (12, 0):
        return 99 << 10
    return (163 if capability < (9, 0) else 227) << 10


def attention_variant(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, capability: tuple[int, int]
) -> Variant | None:
    """Return the shipped attention module for these types on that compute capability, or None: then nothing serves them."""
    for variant in SHIPPED:
        if (
            variant.head_size == head_size
            and (variant.q_dtype, variant.kv_dtype) == (q_dtype, kv_dtype)
            and capability >= variant.minimum_capability
            and _fits(variant, capability)
        ):
            return variant
    return None


def dispatched(capability: tuple[int, int]) -> list[Variant]:
    """Return all that a device of that compute capability can be served with, in the order of `SHIPPED`."""
    chosen = {
        attention_variant(variant.q_dtype, variant.kv_dtype, variant.head_size, capability)
        for variant in SHIPPED
        if variant.q_dtype is not None and variant.kv_dtype is not None and variant.head_size is not None
    }
    return [
        variant
        for variant in SHIPPED
        if variant in chosen or (variant in (CACHE, ROWS) and capability >= variant.minimum_capability)
    ]


def _fits(variant: Variant, capability: tuple[int, int]) -> bool:
    needed = (attention_shape(variant, 4, is_decode).shared_bytes for is_decode in (True, False))
    return max(needed) <= shared_bytes_limit(capability)
