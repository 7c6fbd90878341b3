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
from backends.numba_kernels.attention import attend_kernel
from backends.numba_kernels.attention_tiles import attend_tiles_kernel
from backends.numba_kernels.matrix_tiles import has_matrix_tiles
from backends.numba_kernels.parts import HEADER_FIELDS, PART_KEYS, QUERY_FIELDS, TILE_FIELDS
from backends.numba_kernels.quantised import FP8, INT8, PLAIN
from backends.numba_kernels.storing import store_kernel, store_quantised_kernel
from backends.numba_kernels.threads import Kernel, describe_threads
from backends.numba_kernels.vectors import HAS_BF16_DOT, HAS_WIDE

# Rows of (query, head) in a tile: enough that packing keys costs a few percent, few enough that the tile stays in L2.
TILE_ROWS = 48
# Decodes are cut into parts until each thread has so many tiles of about the same size.
TILES_PER_THREAD = 4

_DTYPES = (torch.float32, torch.bfloat16)
_ELEMENTS: Mapping[torch.dtype | None, str] = MappingProxyType({torch.int8: INT8, torch.float8_e4m3fn: FP8})


@dataclass(frozen=True, slots=True)
class NumbaPlan:
    """One step as kernels read it, see `numba_kernels.parts`. `header` holds addresses of the other arrays and must not outlive them.

    Launches that were recorded with this plan compute another step once its header has been copied into this one's.
    """

    header: npt.NDArray[np.int64]  # [HEADER_FIELDS]
    address: int  # of the header
    tiles: npt.NDArray[np.int64]  # [tiles, TILE_FIELDS]
    queries: npt.NDArray[np.int64]  # [T, QUERY_FIELDS]
    slots: Tensor  # [T] int64
    tables: Tensor  # [S, max_blocks] int32
    part_sums: Tensor  # [places, widest H * D] float32
    part_states: Tensor  # [places, widest H, 2] float32
    parts_done: npt.NDArray[np.int64]  # [T, widest Hkv], zero between launches
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
            "attention": "matrix tiles" if has_matrix_tiles() else "vectors",
            "bfloat16": "AVX512_BF16 dot products" if HAS_BF16_DOT else "widened to float32",
        }

    def prepare(self, spec: KVCacheSpec, report: Callable[[str], None]) -> None:
        """Compile every kernel that `spec` needs: seconds the first time, milliseconds from the cache."""
        is_bf16 = spec.dtype == torch.bfloat16
        elements = _ELEMENTS.get(spec.quantised, PLAIN)
        report("preparing kernels: attention")
        _attend_kernel(is_bf16, elements, spec.block_size, spec.head_size)
        report("preparing kernels: key and value writes")
        if elements:
            store_quantised_kernel(is_bf16, elements)
        else:
            store_kernel()

    def plan(self, meta: AttentionMetadata, layers: Sequence[AttentionLayer]) -> NumbaPlan:
        """Cut the step into tiles of at most TILE_ROWS rows, and long decodes into parts where threads would else be idle.

        How a row's keys are cut into tiles changes no bit of its result (see `numba_kernels.parts`).
        """
        starts: list[int] = meta.query_start_loc.tolist()
        lengths: list[int] = meta.seq_lens.tolist()
        T, num_threads = meta.num_tokens, torch.get_num_threads()
        table_bytes = meta.block_tables.stride(0) * 4
        run = max(1, TILE_ROWS // max((layer.num_heads // layer.num_kv_heads for layer in layers), default=1))
        share = max(PART_KEYS * 3 // 2, sum(lengths) // (TILES_PER_THREAD * num_threads))
        tiles: list[tuple[int, ...]] = []
        queries = np.zeros((T, QUERY_FIELDS), np.int64)  # row of q, position, place of its first part, number of parts
        queries[:, 0] = np.arange(T)
        num_places = longest = 0
        for s, length in enumerate(lengths):
            row, count = starts[s], starts[s + 1] - starts[s]
            position, table = length - count, s * table_bytes
            queries[row : row + count, 1] = np.arange(position, length)
            longest = max(longest, min(run, count))
            if 0 < count <= run and length > share:
                parts = (length + PART_KEYS - 1) // PART_KEYS
                for part in range(parts):
                    first = part * PART_KEYS
                    tiles.append((row, count, first, min(first + PART_KEYS, length), table, part + 1))
                queries[row : row + count, 2] = num_places + np.arange(count) * parts
                queries[row : row + count, 3] = parts
                num_places += parts * count
                continue
            # The last queries of a prompt see the most keys: they go first, so that no thread starts the longest tile last.
            for first in range((count - 1) // run * run, -1, -run):
                size = min(run, count - first)
                tiles.append((row + first, size, 0, max(position + first + size, 0), table, 0))
        # Rows that belong to no sequence stand at no position and see no key: they become zeros.
        for row in range(starts[-1], T, run):
            queries[row : row + run, 1] = -1
            tiles.append((row, min(run, T - row), 0, 0, 0, 0))
            longest = max(longest, min(run, T - row))
        width = max((layer.num_heads * layer.head_size for layer in layers), default=0) if num_places else 0
        heads = max((layer.num_heads for layer in layers), default=0) if num_places else 0
        tile_array = np.array(tiles, dtype=np.int64).reshape(-1, TILE_FIELDS)
        part_sums, part_states = torch.empty(num_places, width), torch.empty(num_places, heads, 2)
        parts_done = np.zeros(T * heads, np.int64)
        header = np.array(
            (
                meta.slot_mapping.data_ptr(), meta.block_tables.data_ptr(), tile_array.ctypes.data, len(tiles),
                queries.ctypes.data, part_sums.data_ptr(), part_states.data_ptr(), parts_done.ctypes.data, T, longest,
            ),
            dtype=np.int64,
        )  # fmt: skip
        assert len(header) == HEADER_FIELDS
        return NumbaPlan(
            header=header,
            address=header.ctypes.data,
            tiles=tile_array,
            queries=queries,
            slots=meta.slot_mapping,
            tables=meta.block_tables,
            part_sums=part_sums,
            part_states=part_states,
            parts_done=parts_done,
            num_threads=num_threads,
        )

    def load_plan(self, captured: NumbaPlan, step: NumbaPlan) -> None:
        """Copy the header: all that launches know of a plan is where it stands."""
        captured.header[:] = step.header

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
        assert k_step == 1, "the last dimension of k must be contiguous"
        assert v_step == 1, "the last dimension of v must be contiguous"
        rows = (k.data_ptr(), k_row * size, k_head * size, v.data_ptr(), v_row * size, v_head * size)
        step = (plan.address, Hkv, cache.shape[3])
        if layer.scales is None:
            store_kernel().start(T * Hkv * D, *rows, *_cache_arguments(cache), *step, D * size)
        else:
            kernel = store_quantised_kernel(k.dtype == torch.bfloat16, _ELEMENTS[cache.dtype])
            kernel.start(T * Hkv * D, *rows, *_cache_arguments(cache), *step, D, *_scale_arguments(layer))

    def run(self, q: Tensor, layer: AttentionLayer, plan: NumbaPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend over all tiles, merging split contexts. Rows of q past the last sequence (padding) become zeros and -inf."""
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
        _attend_kernel(is_bf16, _ELEMENTS.get(cache.dtype, PLAIN), cache.shape[3], D).launch(
            plan.num_threads,
            q.data_ptr(), q_row * size, q_head * size, out.data_ptr(), out_row * size, out_head * size, lse_address, lse_row,
            *_cache_arguments(cache), plan.address, cache.shape[3], D, H // Hkv, Hkv, layer.window or 0,
            _float_bits(layer.scale), _float_bits(layer.soft_cap or 0.0), *_scale_arguments(layer),
        )  # fmt: skip


def _attend_kernel(is_bf16: bool, elements: str, block_size: int, head_size: int) -> Kernel:
    """Return the kernel for a shape; nothing about a step is asked, or its rows could depend on their neighbours."""
    if is_bf16 and block_size % 16 == 0 and head_size % 32 == 0 and has_matrix_tiles():
        return attend_tiles_kernel(elements)
    return attend_kernel(is_bf16, elements)


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
