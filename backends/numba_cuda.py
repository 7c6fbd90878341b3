"""Attention over blocks in Numba CUDA: the GPU kernels that read like Python. Half to three quarters of the CuPy backend's speed at best.

No warp operations and no inline assembly, so that every kernel also runs in Numba's simulator on a CPU (`NUMBA_ENABLE_CUDASIM=1`, very
slowly); element types are told apart by a number at run time, so that the functions stand at module level and Numba can cache their code.
Work is divided as for the CUDA C++ kernels (`backends.kernels.work`). Invariant: launches go to torch's current stream and wait for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

import numba
import numpy as np
import torch
from numba import core, float32
from numba import cuda as numba_cuda_module
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata, DeviceInfo
from backends.kernels.backend import host_lengths
from backends.kernels.work import divide
from backends.kv_cache import KVCacheSpec
from backends.staging import Staging

cuda: Any = numba_cuda_module  # Numba has no usable types
_config: Any = core.config
IS_SIMULATED = bool(_config.ENABLE_CUDASIM)

THREADS = 64
ROWS = 8  # rows (query, head of the group) of a tile
KEYS = 16  # keys of a pass
MAX_HEAD_SIZE = 256
MERGE_THREADS = 64
STORE_THREADS = 64
NO_SCORE = np.float32(-1e30)
ROUND = np.float32(1.5 * 2**23)  # adding it leaves the nearest integer, ties to even, in the low bits of a float32

F32, F16, BF16, INT8, FP8 = range(5)
KINDS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.int8: INT8, torch.float8_e4m3fn: FP8}
)
# Types that arrays of Numba do not know travel as integers.
CARRIERS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
)

if IS_SIMULATED:

    def _bits_to_float(bits: Any) -> Any:
        return np.array(int(bits) & 0xFFFFFFFF, np.uint32).view(np.float32)[()]

    def _float_to_bits(x: Any) -> Any:
        return int(np.float32(x).view(np.int32))
else:

    def _bits_to_float(bits: Any) -> Any:
        return cuda.libdevice.int_as_float(np.int32(bits))

    def _float_to_bits(x: Any) -> Any:
        return cuda.libdevice.float_as_int(np.float32(x))


bits_to_float = cuda.jit(device=True)(_bits_to_float)
float_to_bits = cuda.jit(device=True)(_float_to_bits)


def _to_float(x: Any, kind: int) -> Any:
    """Read an element; those of a quantised pool without their scale. float8's codes of NaN read as ±480, and their scale is NaN."""
    if kind == BF16:
        return bits_to_float(np.int32(x) << 16)
    if kind == FP8:
        magnitude = np.int32(x) & 0x7F
        if magnitude < 8:
            value = np.float32(magnitude) * np.float32(2.0**-9)
        else:
            value = bits_to_float((magnitude << 20) + (120 << 23))
        return -value if np.int32(x) & 0x80 else value
    return np.float32(x)


to_float = cuda.jit(device=True)(_to_float)


def _to_bf16(x: Any) -> Any:
    """Round to the bits of bfloat16, ties to even."""
    if x != x:
        return np.int32(0x7FC0)
    bits = np.int32(float_to_bits(x))
    return np.int32((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def _to_fp8(x: Any) -> Any:
    """Round a float32 of at most 448 in magnitude to float8 e4m3fn, ties to even."""
    bits = np.int32(float_to_bits(x))
    magnitude = bits & 0x7FFFFFFF
    sign = 0x80 if bits < 0 else 0
    if magnitude < 121 << 23:  # below 2**-6 the steps are 2**-9 wide
        steps = np.float32(abs(x) * np.float32(512.0)) + ROUND
        return (np.int32(float_to_bits(np.float32(steps))) & 0xF) | sign
    return (((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)) | sign


to_bf16 = cuda.jit(device=True)(_to_bf16)
to_fp8 = cuda.jit(device=True)(_to_fp8)


def _attend(
    q: Any,
    cache: Any,
    scales: Any,
    tables: Any,
    seq_lens: Any,
    starts: Any,
    items: Any,
    out: Any,
    lse: Any,
    part_out: Any,
    part_lse: Any,
    q_kind: int,
    kv_kind: int,
    has_scales: bool,
    has_lse: bool,
    group: int,
    window: int,
    scale: Any,
    cap: Any,
) -> None:
    """One block: one item (a tile of rows and a range of keys) for one kv head; grid (items, kv heads), THREADS threads.

    Shared memory: queries and sums [ROWS, 256], keys or values [KEYS, 256], weights and states: 33 KiB whatever the head size.
    """
    queries = cuda.shared.array((ROWS, MAX_HEAD_SIZE), float32)
    sums = cuda.shared.array((ROWS, MAX_HEAD_SIZE), float32)
    tile = cuda.shared.array((KEYS, MAX_HEAD_SIZE), float32)
    weights = cuda.shared.array((ROWS, KEYS), float32)
    states = cuda.shared.array((ROWS, 3), float32)  # maximum, sum, factor by which earlier sums shrink
    item, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    D, B = q.shape[2], cache.shape[3]
    sequence, first_row, rows = items[item, 0], items[item, 1], items[item, 2]
    first_key, last_key = items[item, 3], items[item, 4]
    start = starts[sequence]
    past = seq_lens[sequence] - (starts[sequence + 1] - start)  # position of the first query
    if window > 0:
        first_key = max(first_key, past + first_row // group - window + 1)
    for e in range(thread, rows * D, THREADS):
        r = e // D
        row = first_row + r
        x = to_float(q[start + row // group, head * group + row % group, e - r * D], q_kind)
        queries[r, e - r * D] = x * scale
        sums[r, e - r * D] = np.float32(0)
    if thread < rows:
        states[thread, 0] = NO_SCORE
        states[thread, 1] = np.float32(0)
    cuda.syncthreads()
    for begin in range(first_key, last_key, KEYS):
        count = min(KEYS, last_key - begin)
        for e in range(thread, count * D, THREADS):
            t = e // D
            block, slot = tables[sequence, (begin + t) // B], (begin + t) % B
            x = to_float(cache[block, 0, head, slot, e - t * D], kv_kind)
            tile[t, e - t * D] = x * scales[block, 0, head, slot] if has_scales else x
        cuda.syncthreads()
        for e in range(thread, rows * count, THREADS):
            r = e // count
            t = e - r * count
            position = past + (first_row + r) // group
            score = np.float32(0)
            for d in range(D):
                score += queries[r, d] * tile[t, d]
            if cap > np.float32(0):
                score = cap * np.float32(math.tanh(score / cap))
            is_visible = begin + t <= position and (window == 0 or begin + t > position - window)
            weights[r, t] = score if is_visible else np.float32(2) * NO_SCORE
        cuda.syncthreads()
        if thread < rows:
            old = states[thread, 0]
            best = old
            for t in range(count):
                # Written so that a NaN wins.
                if not weights[thread, t] <= best:
                    best = weights[thread, t]
            total = np.float32(0)
            for t in range(count):
                weight = np.float32(0)
                if not weights[thread, t] <= NO_SCORE:
                    weight = np.float32(math.exp(weights[thread, t] - best))
                weights[thread, t] = weight
                total += weight
            shrink = np.float32(math.exp(old - best))
            states[thread, 0] = best
            states[thread, 1] = states[thread, 1] * shrink + total
            states[thread, 2] = shrink
        for e in range(thread, count * D, THREADS):
            t = e // D
            block, slot = tables[sequence, (begin + t) // B], (begin + t) % B
            x = to_float(cache[block, 1, head, slot, e - t * D], kv_kind)
            tile[t, e - t * D] = x * scales[block, 1, head, slot] if has_scales else x
        cuda.syncthreads()
        for e in range(thread, rows * D, THREADS):
            r = e // D
            x = sums[r, e - r * D] * states[r, 2]
            for t in range(count):
                x += weights[r, t] * tile[t, e - r * D]
            sums[r, e - r * D] = x
        cuda.syncthreads()
    is_part, part = items[item, 5], items[item, 6]
    for e in range(thread, rows * D, THREADS):
        r = e // D
        row, d = first_row + r, e - r * D
        total = states[r, 1]
        x = sums[r, d] / total if total != np.float32(0) else np.float32(0)
        log_sum = states[r, 0] + np.float32(math.log(total)) if total != np.float32(0) else np.float32(-math.inf)
        if is_part:
            part_out[part + r, head, d] = x
            if d == 0:
                part_lse[part + r, head] = log_sum
        else:
            out[start + row // group, head * group + row % group, d] = to_bf16(x) if q_kind == BF16 else x
            if d == 0 and has_lse:
                lse[start + row // group, head * group + row % group] = log_sum


def _merge(
    merges: Any,
    starts: Any,
    part_out: Any,
    part_lse: Any,
    out: Any,
    lse: Any,
    q_kind: int,
    has_lse: bool,
    group: int,
) -> None:
    """Join the parts of split ranges, in order. One block: the rows of one tile for one kv head; grid (merges, kv heads)."""
    index, head = cuda.blockIdx.x, cuda.blockIdx.y
    D = out.shape[2]
    sequence, first_row, rows = merges[index, 0], merges[index, 1], merges[index, 2]
    first, splits, distance = merges[index, 3], merges[index, 4], merges[index, 5]
    for e in range(cuda.threadIdx.x, rows * D, MERGE_THREADS):
        r = e // D
        row, d = first_row + r, e - r * D
        best = NO_SCORE
        for i in range(splits):
            if not part_lse[first + i * distance + r, head] <= best:
                best = part_lse[first + i * distance + r, head]
        total = np.float32(0)
        x = np.float32(0)
        for i in range(splits):
            factor = np.float32(math.exp(part_lse[first + i * distance + r, head] - best))
            total += factor
            x += factor * part_out[first + i * distance + r, head, d]
        token, query_head = starts[sequence] + row // group, head * group + row % group
        x = x / total if total != np.float32(0) else np.float32(0)
        out[token, query_head, d] = to_bf16(x) if q_kind == BF16 else x
        if d == 0 and has_lse:
            lse[token, query_head] = best + np.float32(math.log(total)) if total != np.float32(0) else -math.inf


def _store(k: Any, v: Any, slots: Any, cache: Any, scales: Any, q_kind: int, kv_kind: int) -> None:
    """Write or quantise a row of keys or values. One thread: one token, head and side; grid over all of them."""
    row = cuda.blockIdx.x * STORE_THREADS + cuda.threadIdx.x
    T, Hkv, D = k.shape
    if row >= T * Hkv * 2:
        return
    side = row % 2
    head, token = row // 2 % Hkv, row // 2 // Hkv
    block, slot = slots[token] // cache.shape[3], slots[token] % cache.shape[3]
    if kv_kind != INT8 and kv_kind != FP8:
        for d in range(D):
            cache[block, side, head, slot, d] = k[token, head, d] if side == 0 else v[token, head, d]
        return
    limit = np.float32(127) if kv_kind == INT8 else np.float32(448)
    largest = np.float32(0)
    for d in range(D):
        x = abs(to_float(k[token, head, d] if side == 0 else v[token, head, d], q_kind))
        if not x <= largest and largest == largest:  # a NaN stays
            largest = x
    scale = np.float32(largest / limit)
    scales[block, side, head, slot] = scale
    divisor = scale if scale != np.float32(0) else np.float32(1)
    for d in range(D):
        x = np.float32(to_float(k[token, head, d] if side == 0 else v[token, head, d], q_kind) / divisor)
        x = min(max(x, -limit), limit) if x == x else np.float32(0)
        if kv_kind == INT8:
            cache[block, side, head, slot, d] = np.int32(np.float32(x + ROUND) - ROUND)
        else:
            cache[block, side, head, slot, d] = to_fp8(x)


_OPTIONS = {} if IS_SIMULATED else {"cache": True}  # kept beside the source or in NUMBA_CACHE_DIR
attend_kernel = cuda.jit(**_OPTIONS)(_attend)
merge_kernel = cuda.jit(**_OPTIONS)(_merge)
store_kernel = cuda.jit(**_OPTIONS)(_store)


@dataclass(frozen=True, slots=True)
class WindowWork:
    """The work of the layers with one window and group, on the device, with its workspace."""

    items: Tensor
    merges: Tensor
    part_out: Tensor
    part_lse: Tensor


@dataclass(frozen=True, slots=True)
class NumbaCudaPlan:
    """One step: metadata, and the work by (window, group, kv heads, head size)."""

    meta: AttentionMetadata
    works: dict[tuple[int | None, int, int, int], WindowWork]
    num_rows: int


class NumbaCudaBackend:
    """Numba's kernels on an NVIDIA GPU, or in Numba's simulator."""

    name = "numba-cuda"

    def __init__(self) -> None:
        """Grant nothing yet."""
        self._staging: dict[torch.device, Staging] = {}

    def unsupported(self, spec: KVCacheSpec, device: DeviceInfo) -> list[str]:
        """Return why `spec` cannot be served on `device`: device, library, head size, dtype."""
        reasons = spec.faults()
        if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(f"dtype is {spec.dtype}; float32, float16 and bfloat16 have kernels")
        if spec.head_size > MAX_HEAD_SIZE:
            reasons.append(f"head_size is {spec.head_size}; kernels exist up to {MAX_HEAD_SIZE}")
        if IS_SIMULATED:
            if device.kind != "cpu":
                reasons.append("NUMBA_ENABLE_CUDASIM is set: the simulator runs on a CPU")
            return reasons
        if device.kind != "cuda":
            reasons.append(
                f"device is {device.kind}; this backend runs on an NVIDIA GPU, or with NUMBA_ENABLE_CUDASIM=1 slowly on a CPU"
            )
            return reasons
        try:
            metadata.version("numba-cuda")
        except metadata.PackageNotFoundError:
            reasons.append("numba-cuda is not installed; pip install looseleaf[numba-cuda]")
        if not cuda.is_available():
            reasons.append("Numba finds no CUDA driver or device")
        return reasons

    def describe(self) -> dict[str, str]:
        """Say whether this is the simulator."""
        facts = {"threads": str(torch.get_num_threads()), "numba": numba.__version__}
        return {**facts, "device": "Numba's simulator" if IS_SIMULATED else str(cuda.get_current_device().name)}

    def prepare(self, spec: KVCacheSpec, report: Callable[[str], None]) -> None:
        """Leave compiling to the warm-up: Numba compiles for the types of real arguments, and keeps the result on disk."""
        report(f"preparing kernels: Numba compiles those for {spec.element_dtype} pools at the first step, once")

    def plan(self, meta: AttentionMetadata, layers: Sequence[AttentionLayer]) -> NumbaCudaPlan:
        """Cut the step for each kind of layer."""
        query_lens, seq_lens = host_lengths(meta)
        device = meta.seq_lens.device
        works: dict[tuple[int | None, int, int, int], WindowWork] = {}
        for layer in layers:
            key = _key(layer)
            if key in works:
                continue
            work = divide(query_lens, seq_lens, key[1], ROWS, layer.window)
            parts = max(work.num_parts, 1)
            if device not in self._staging:
                self._staging[device] = Staging(device, num_buffers=4)
            items, merges = self._staging[device].send([work.items, work.merges])
            works[key] = WindowWork(
                items,
                merges,
                torch.empty(parts, layer.num_kv_heads, layer.head_size, device=device),
                torch.empty(parts, layer.num_kv_heads, device=device),
            )
        return NumbaCudaPlan(meta, works, int(query_lens.sum()))

    def store_kv(self, k: Tensor, v: Tensor, layer: AttentionLayer, plan: NumbaCudaPlan) -> None:
        """Write or quantise k and v into their slots."""
        T, Hkv, _ = k.shape
        if not T:
            return
        wanted = layer.dtype or layer.cache.dtype
        k, v = k.to(wanted), v.to(wanted)
        arguments = (_array(k), _array(v), _array(plan.meta.slot_mapping), _array(layer.cache), _scales(layer))
        grid = -(-T * Hkv * 2 // STORE_THREADS)
        _launch(store_kernel, grid, STORE_THREADS, *arguments, KINDS[wanted], KINDS[layer.cache.dtype])

    def run(
        self, q: Tensor, layer: AttentionLayer, plan: NumbaCudaPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend, then merge what was split. Rows of q past the last sequence (padding) become zeros and -inf."""
        wanted = layer.dtype or layer.cache.dtype
        if q.dtype != wanted or out.dtype != wanted or (IS_SIMULATED and not out.is_contiguous()):
            converted = torch.empty(out.shape, dtype=wanted, device=out.device)
            self.run(q.to(wanted), layer, plan, converted, lse)
            out.copy_(converted)
            return
        meta, key = plan.meta, _key(layer)
        work, group = plan.works[key], key[1]
        target = _array(lse if lse is not None else work.part_lse)
        kinds = (KINDS[wanted], KINDS[layer.cache.dtype])
        parts = (_array(work.part_out), _array(work.part_lse))
        if len(work.items):
            _launch(
                attend_kernel, (len(work.items), layer.num_kv_heads), THREADS,
                _array(q), _array(layer.cache), _scales(layer), _array(meta.block_tables), _array(meta.seq_lens),
                _array(meta.query_start_loc), _array(work.items), _array(out), target, *parts, *kinds,
                layer.scales is not None, lse is not None, group, layer.window or 0,
                np.float32(layer.scale), np.float32(layer.soft_cap or 0.0),
            )  # fmt: skip
        if len(work.merges):
            _launch(
                merge_kernel, (len(work.merges), layer.num_kv_heads), MERGE_THREADS,
                _array(work.merges), _array(meta.query_start_loc), *parts, _array(out), target,
                kinds[0], lse is not None, group,
            )  # fmt: skip
        if plan.num_rows < q.shape[0]:
            out[plan.num_rows :] = 0
            if lse is not None:
                lse[plan.num_rows :] = -torch.inf


def _key(layer: AttentionLayer) -> tuple[int | None, int, int, int]:
    return layer.window, layer.num_heads // layer.num_kv_heads, layer.num_kv_heads, layer.head_size


def _scales(layer: AttentionLayer) -> Any:
    """Return the scales; without any, an array of their shape's rank that no kernel reads."""
    scales = layer.scales
    return _array(layer.cache.new_empty((1, 1, 1, 1), dtype=torch.float32) if scales is None else scales)


def _array(tensor: Tensor) -> Any:
    """Return what Numba takes for a tensor, the same memory: numpy's view in the simulator, the CUDA array interface on a GPU."""
    carried = tensor.detach().view(CARRIERS.get(tensor.dtype, tensor.dtype))
    return (
        carried.contiguous().numpy() if IS_SIMULATED else carried
    )  # its arrays have no gaps: strided inputs are copied


def _launch(kernel: Any, grid: Any, threads: int, *arguments: Any) -> None:
    """Launch on torch's current stream."""
    if IS_SIMULATED:
        kernel[grid, threads](*arguments)
        return
    kernel[grid, threads, cuda.external_stream(torch.cuda.current_stream().cuda_stream)](*arguments)
