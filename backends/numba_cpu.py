"""Attention over blocks on the CPU, with compiled kernels; float32, bfloat16, int8 and fp8 pools. The kernels stand in `backends.numba_kernels`.

A plan cuts the step into tiles whose shapes depend on each sequence alone: runs of queries for prefill, runs of keys (merged in a fixed
order) for a decode with a long context. Invariant: neighbours in the batch and the number of threads never change a bit of a result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata, DeviceInfo
from backends.kv_cache import KVCacheSpec
from backends.numba_kernels.attention import (
    FP8,
    INT8,
    PLAIN,
    TILE_FIELDS,
    attend_kernel,
    merge_kernel,
    store_kernel,
    store_quantised_kernel,
)
from backends.numba_kernels.threads import describe_threads
from backends.numba_kernels.vectors import HAS_BF16_DOT, HAS_WIDE

# Rows of (query, head) in a tile: enough that packing keys costs a few percent, few enough that the tile stays in L2.
TILE_ROWS = 48
# Keys of one part of a decode; longer contexts are split so that a batch of one still uses every thread.
PART_KEYS = 1024
# Under this many bytes of keys and values a second thread costs more than it saves.
PARALLEL_BYTES = 1 << 17

_DTYPES = (torch.float32, torch.bfloat16)
_ELEMENTS: Mapping[torch.dtype | None, str] = MappingProxyType({torch.int8: INT8, torch.float8_e4m3fn: FP8})


@dataclass(frozen=True, slots=True)
class NumbaPlan:
    """Tiles and merges of one step, with the tensors that they point into."""

    slots: Tensor  # [T] int64
    tables: Tensor  # [S, max_blocks] int32
    tiles: npt.NDArray[np.int64]  # [tiles, TILE_FIELDS]
    merges: npt.NDArray[np.int64]  # [merges, 4]
    part_sums: Tensor  # [parts, widest H * D] float32
    part_states: Tensor  # [parts, widest H, 2] float32
    num_rows: int  # rows of q that belong to a sequence
    num_keys: int  # keys that tiles read, over all tiles
    max_rows: int  # most rows of (query, head) of a tile
    num_threads: int


class NumbaCpuBackend:
    """Compiled paged attention on the threads that torch uses."""

    name = "numba-cpu"

    def unsupported(self, spec: KVCacheSpec, device: DeviceInfo) -> list[str]:
        """Return why `spec` cannot be served on `device`: only CPUs, float32 or bfloat16, head sizes that are multiples of 16."""
        reasons = spec.faults()
        if device.kind != "cpu":
            reasons.append(f"device is {device.kind}; this backend runs on a CPU")
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype is {spec.dtype}; float32 and bfloat16 have kernels")
        if spec.head_size % 16:
            reasons.append(f"head_size {spec.head_size} is not a multiple of 16")
        return reasons

    def describe(self) -> dict[str, str]:
        """Name the thread pool, the vectors in use and where compiled code is kept."""
        return {
            **describe_threads(),
            "vectors": "512 bit" if HAS_WIDE else "as wide as the processor's",
            "bfloat16": "AVX512_BF16 dot products" if HAS_BF16_DOT else "widened to float32",
        }

    def prepare(self, spec: KVCacheSpec, report: Callable[[str], None]) -> None:
        """Compile every kernel that `spec` needs: seconds the first time, milliseconds from the cache."""
        is_bf16 = spec.dtype == torch.bfloat16
        elements = _ELEMENTS.get(spec.quantised, PLAIN)
        report("preparing kernels: attention")
        attend_kernel(is_bf16, elements)
        report("preparing kernels: merge of split contexts")
        merge_kernel(is_bf16)
        report("preparing kernels: key and value writes")
        if elements:
            store_quantised_kernel(is_bf16, elements)
        else:
            store_kernel()

    def plan(self, meta: AttentionMetadata, layers: Sequence[AttentionLayer]) -> NumbaPlan:
        """Cut the step into tiles of at most TILE_ROWS rows, and decodes with more than PART_KEYS keys into parts."""
        starts: list[int] = meta.query_start_loc.tolist()
        lengths: list[int] = meta.seq_lens.tolist()
        table_bytes = meta.block_tables.stride(0) * 4
        group = max((layer.num_heads // layer.num_kv_heads for layer in layers), default=1)
        run = max(1, TILE_ROWS // group)
        tiles: list[tuple[int, ...]] = []
        merges: list[tuple[int, int, int, int]] = []
        num_parts = num_keys = longest = 0
        for s, length in enumerate(lengths):
            row, count = starts[s], starts[s + 1] - starts[s]
            position, table = length - count, s * table_bytes
            longest = max(longest, min(run, count))
            if count <= run and length > PART_KEYS:
                parts = (length + PART_KEYS - 1) // PART_KEYS
                for part in range(parts):
                    first = part * PART_KEYS
                    tiles.append(
                        (
                            row,
                            count,
                            position,
                            first,
                            min(first + PART_KEYS, length),
                            table,
                            num_parts + part * count + 1,
                        )
                    )
                merges.extend((row + i, num_parts + i, parts, count) for i in range(count))
                num_parts += parts * count
                num_keys += length
                continue
            # The last queries of a prompt see the most keys: they go first, so that no thread starts the longest tile last.
            for first in range((count - 1) // run * run, -1, -run):
                queries = min(run, count - first)
                last = position + first + queries
                tiles.append((row + first, queries, position + first, 0, last, table, 0))
                num_keys += max(last, 0)
        width = max((layer.num_heads * layer.head_size for layer in layers), default=0) if num_parts else 0
        heads = max((layer.num_heads for layer in layers), default=0) if num_parts else 0
        return NumbaPlan(
            slots=meta.slot_mapping,
            tables=meta.block_tables,
            tiles=np.array(tiles, dtype=np.int64).reshape(-1, TILE_FIELDS),
            merges=np.array(merges, dtype=np.int64).reshape(-1, 4),
            part_sums=torch.empty(num_parts, width),
            part_states=torch.empty(num_parts, heads, 2),
            num_rows=starts[-1],
            num_keys=num_keys,
            max_rows=longest * group,
            num_threads=torch.get_num_threads(),
        )

    def store_kv(self, k: Tensor, v: Tensor, layer: AttentionLayer, plan: NumbaPlan) -> None:
        """Copy the rows of k and v to their slots, or quantise them; 64-bit offsets throughout."""
        cache = layer.cache
        wanted = _kernel_dtype(k, layer)
        if k.dtype != wanted:
            k, v = k.to(wanted), v.to(wanted)
        T, Hkv, D = k.shape
        size = k.element_size()
        k_row, k_head, k_step = k.stride()
        v_row, v_head, v_step = v.stride()
        assert (k_step == 1 and v_step == 1) or D == 1 or T == 0, "the last dimension of k and v must be contiguous"
        num_threads = plan.num_threads if T * Hkv * D * size > PARALLEL_BYTES else 1
        rows = (k.data_ptr(), k_row * size, k_head * size, v.data_ptr(), v_row * size, v_head * size)
        slots = (plan.slots.data_ptr(), T, Hkv, cache.shape[3])
        if layer.scales is None:
            store_kernel().launch(num_threads, *rows, *_cache_arguments(cache), *slots, D * size)
        else:
            kernel = store_quantised_kernel(k.dtype == torch.bfloat16, _ELEMENTS[cache.dtype])
            kernel.launch(num_threads, *rows, *_cache_arguments(cache), *slots, D, *_scale_arguments(layer))

    def run(self, q: Tensor, layer: AttentionLayer, plan: NumbaPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend over all tiles, then merge split contexts. Rows of q past the last sequence (padding) become zeros and -inf."""
        cache = layer.cache
        wanted = _kernel_dtype(q, layer)
        if q.dtype != wanted or out.dtype != wanted:
            converted = torch.empty_like(out, dtype=wanted)
            self.run(q.to(wanted), layer, plan, converted, lse)
            out.copy_(converted)
            return
        is_bf16 = wanted == torch.bfloat16
        size = q.element_size()
        q_row, q_head, q_step = q.stride()
        out_row, out_head, out_step = out.stride()
        assert q_step == 1, "the last dimension of q must be contiguous"
        assert out_step == 1, "the last dimension of out must be contiguous"
        assert lse is None or lse.stride(1) == 1, "the last dimension of lse must be contiguous"
        H, Hkv, D = layer.num_heads, layer.num_kv_heads, layer.head_size
        lse_address, lse_row = (lse.data_ptr(), lse.stride(0) * 4) if lse is not None else (0, 0)
        read_bytes = plan.num_keys * Hkv * D * size
        attend_kernel(is_bf16, _ELEMENTS.get(cache.dtype, PLAIN)).launch(
            plan.num_threads if read_bytes > PARALLEL_BYTES else 1,
            q.data_ptr(), q_row * size, q_head * size, out.data_ptr(), out_row * size, out_head * size, lse_address, lse_row,
            *_cache_arguments(cache),
            plan.tiles.ctypes.data, len(plan.tiles), plan.tables.data_ptr(), cache.shape[3], D, H // Hkv, Hkv, layer.window or 0,
            _float_bits(layer.scale), _float_bits(layer.soft_cap or 0.0),
            plan.part_sums.data_ptr(), plan.part_states.data_ptr(), plan.max_rows, *_scale_arguments(layer),
        )  # fmt: skip
        if len(plan.merges):
            merge_kernel(is_bf16).launch(
                plan.num_threads, out.data_ptr(), out_row * size, out_head * size, lse_address, lse_row,
                plan.merges.ctypes.data, len(plan.merges), H, D, plan.part_sums.data_ptr(), plan.part_states.data_ptr(),
            )  # fmt: skip
        if plan.num_rows < q.shape[0]:
            out[plan.num_rows :] = 0
            if lse is not None:
                lse[plan.num_rows :] = -torch.inf


def _kernel_dtype(rows: Tensor, layer: AttentionLayer) -> torch.dtype:
    """Return the type that `rows` must have: the pool's own; for a quantised pool theirs, as far as kernels know it."""
    if layer.scales is None:
        return layer.cache.dtype
    return torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float32


def _cache_arguments(cache: Tensor) -> tuple[int, ...]:
    """Return address, block stride, value offset, head stride and slot stride, in bytes."""
    return (cache.data_ptr(), *(step * cache.element_size() for step in cache.stride()[:4]))


def _scale_arguments(layer: AttentionLayer) -> tuple[int, ...]:
    """Return address, block stride, value offset and head stride of the scales, in bytes; zeros without scales."""
    scales = layer.scales
    if scales is None:
        return (0, 0, 0, 0)
    assert scales.stride(3) == 1, "the slots of scales must be contiguous"
    return (scales.data_ptr(), *(step * 4 for step in scales.stride()[:3]))


def _float_bits(number: float) -> int:
    """Return the bits of a float32 as the integer that a kernel reads them from."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits
