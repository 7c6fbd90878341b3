"""Attention over blocks on the CPU, with compiled kernels; float32, bfloat16, int8 and fp8 pools. The kernels stand in `backends.numba_kernels`.

A plan cuts the step into tiles by whatever is fastest, and kernels see to it that the cutting does not show. Invariant: neighbours in the
batch, the number of queries computed together and the number of threads never change a bit of a row's result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata, DeviceInfo
from backends.kv_cache import KVCacheSpec
from backends.numba_kernels.attention import attend_kernel
from backends.numba_kernels.attention_tiles import attend_tiles_kernel
from backends.numba_kernels.matrix_tiles import has_matrix_tiles
from backends.numba_kernels.quantised import FP8, INT8, PLAIN
from backends.numba_kernels.storing import store_kernel, store_quantised_kernel
from backends.numba_kernels.threads import Kernel, describe_threads
from backends.numba_kernels.vectors import HAS_BF16_DOT, HAS_WIDE
from backends.numba_plan import NumbaPlan, make_plan

_DTYPES = (torch.float32, torch.bfloat16)
_ELEMENTS: Mapping[torch.dtype | None, str] = MappingProxyType({torch.int8: INT8, torch.float8_e4m3fn: FP8})


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
        """Cut the step into tiles, see `numba_plan`."""
        return make_plan(meta, layers, torch.get_num_threads())

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
