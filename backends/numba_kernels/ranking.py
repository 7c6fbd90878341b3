"""The kernel that draws among the likeliest ids of a row: top-k, top-p and min-p, then one number through the running sum in the order of ids.

A row's weights are written once. How many of them matter is found by looking at how many, and what share of the whole, lie above falling
bounds; only those are sorted, largest first and equal ones by the lower id. One item: one row.

Invariant: what comes out for a row depends on that row and its parameters alone, bit for bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, types

from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.rows import read_vector, vectors_of
from backends.numba_kernels.sampling import BLOCK, fill_row, largest_of, read_double, weigh
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.vectors import (
    LANES,
    VF,
    Builder,
    Value,
    cgutils,
    constant,
    emit_reduce,
    emit_splat,
    intrinsic,
    keep,
    read_float,
    read_int64,
    take_next,
    write_int64,
)

STEP = np.float32(1 / 16)  # from one bound to the next, while it is too high
LOWEST_BOUND = np.float32(1e-30)
MOST_HALVINGS, FEW = 8, 256  # so often a bound is brought nearer, unless this few ids are above it
MOST_SORTED = 2048  # ids that are sorted even if it can be said that some of them are kept
# Bounds are judged by sums in float32: what lies above one must exceed the share that is wanted by more than their error.
SURPLUS = 1.0001


@intrinsic
def _above(typing_context: Any, row: Any, count: Any, bound: Any) -> Any:
    """Return the sum and the number of those of `count` float32 that are at least `bound`."""

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        row, count, bound = arguments
        least = emit_splat(b, bound, VF)
        total, number = (cgutils.alloca_once_value(b, constant(0.0)) for _ in range(2))
        with vectors_of(b, count) as (i, _):
            x = read_vector(b, False, row, i)
            is_above = b.fcmp_ordered(">=", x, least)
            b.store(b.fadd(b.load(total), b.select(is_above, x, constant(0.0))), total)
            b.store(b.fadd(b.load(number), b.select(is_above, constant(1.0), constant(0.0))), number)
        sums = [emit_reduce(b, b.load(place), lambda x, y: b.fadd(x, y)) for place in (total, number)]
        return cgutils.pack_array(b, sums)

    pair = types.UniTuple(types.float32, 2)  # type: ignore[no-untyped-call]
    return pair(types.int64, types.int64, types.float32), generate


@njit(nogil=True, error_model="numpy")
def _write_weights(tag: Any, size: int, row: int, V: int, temperature: Any, target: int) -> float:
    """Write the weights of a row to address `target`, zeros behind them; return their sum."""
    whole = V // BLOCK * BLOCK
    tail = np.empty(BLOCK, np.uint32)
    fill_row(tail, size, row, whole, V - whole, np.uint32(0xFF800000))  # -inf
    largest, _ = largest_of(tag, row, V // LANES * LANES)
    most, _ = largest_of(np.float32(0), tail.ctypes.data, BLOCK)
    largest = max(largest, most)
    total, none = 0.0, np.float32(0)
    for first in range(0, whole, BLOCK):
        total += weigh(tag, row + first * size, BLOCK, largest, temperature, none, target + first * 4)
    if whole < V:
        total += weigh(np.float32(0), tail.ctypes.data, BLOCK, largest, temperature, none, target + whole * 4)
    keep(tail)
    return total


@njit(nogil=True, error_model="numpy")
def _bounds(target: int, width: int, total: float, top_k: int, top_p: float) -> tuple[Any, Any]:
    """Return two bounds: no id under the first is kept, and all from the second on are (infinity where that cannot be said).

    What top-k leaves is known once so many ids are above a bound, what top-p leaves once they hold more than its share.
    """
    ranks_all = top_k >= width
    low, high, sure = STEP, np.float32(2), np.float32(np.inf)
    number = np.float32(0)
    while low > LOWEST_BOUND:
        share, number = _above(target, width, low)
        if number >= top_k if not ranks_all else share > top_p * total * SURPLUS:
            break
        if ranks_all and share * SURPLUS < top_p * total:
            sure = low
        low, high = low * STEP, low
    if low <= LOWEST_BOUND:
        return np.float32(0), sure
    for _ in range(MOST_HALVINGS):
        if number <= FEW:
            break
        middle = (low + high) * np.float32(0.5)
        share, above = _above(target, width, middle)
        if above >= top_k if not ranks_all else share > top_p * total * SURPLUS:
            low, number = middle, above
        else:
            high = middle
            if ranks_all and share * SURPLUS < top_p * total:
                sure = middle
    if number <= MOST_SORTED:
        sure = np.float32(np.inf)
    return low, sure


@njit(nogil=True, error_model="numpy")
def _rank(weights: Any, V: int, low: Any, sure: Any, order: Any) -> int:
    """Write the ids of weights from `low` to under `sure`, in their order, to the front of `order` [V] int64; return how many there are."""
    count = 0
    bits = weights.view(np.int32)
    for i in range(V):
        if low <= weights[i] < sure and weights[i] > 0:
            # Positive floats are ordered as their bits are; equal ones by the lower id, when the sort is read from its end.
            order[count] = np.int64(bits[i]) << 32 | (0xFFFFFFFF - i)
            count += 1
    order[:count].sort()
    for i in range((count + 1) // 2):
        first, last = order[i], order[count - 1 - i]
        order[i], order[count - 1 - i] = 0xFFFFFFFF - (last & 0xFFFFFFFF), 0xFFFFFFFF - (first & 0xFFFFFFFF)
    return count


@njit(nogil=True, error_model="numpy")
def _count_kept(
    weights: Any, order: Any, count: int, before: Any, total: Any, top_k: int, top_p: float, floor: Any
) -> int:
    """Return how many of the ranked ids pass top-k, top-p and min-p; `before` is the sum of those that are kept anyhow, 0 for none.

    Top-p is a share of what top-k left, or of everything. The likeliest id always stays.
    """
    mass = total
    if top_k < len(weights):
        count = min(count, top_k)
        mass = 0.0
        for i in range(count):
            mass += weights[order[i]]
    for i in range(count):
        weight = weights[order[i]]
        if before > 0 and ((top_p < 1.0 and before >= top_p * mass) or weight < floor):
            return i
        before += weight
    return count


@njit(nogil=True, error_model="numpy")
def _keep(weights: Any, V: int, sure: Any, order: Any, count: int) -> int:
    """Write the ids of weights from `sure` on and the first `count` of `order`, sorted as numbers, to `order`; return how many there are."""
    if sure == np.float32(np.inf):
        order[:count].sort()
        return count
    last, ties = sure, 0  # the smallest weight that is kept, and how many of it
    if count > 0:
        last = weights[order[count - 1]]
        for i in range(count):
            ties += weights[order[i]] == last
    else:
        ties = V
    kept = 0
    for i in range(V):
        if weights[i] > last or (weights[i] == last and ties > 0):
            ties -= weights[i] == last
            order[kept] = i
            kept += 1
    return kept


@njit(nogil=True, error_model="numpy")
def _draw_ranked(arguments: int, tag: Any, size: int) -> None:
    """Arguments: those of `sampling.draw`, then top-k (int64, V for none) and top-p (float64)."""
    logits, stride, rows = read_int64(arguments + 8), read_int64(arguments + 16), read_int64(arguments + 24)
    N, V = read_int64(arguments + 32), read_int64(arguments + 40)
    temperatures, floors = read_int64(arguments + 48), read_int64(arguments + 56)
    numbers, S, found = read_int64(arguments + 64), read_int64(arguments + 72), read_int64(arguments + 80)
    top_ks, top_ps = read_int64(arguments + 88), read_int64(arguments + 96)
    item = take_next(arguments)
    if item >= N:
        return
    width = (V + BLOCK - 1) // BLOCK * BLOCK
    weights = np.empty(width, np.float32)
    target = weights.ctypes.data
    order = np.empty(V, np.int64)
    while item < N:
        row = logits + read_int64(rows + item * 8) * stride
        top_k, top_p = read_int64(top_ks + item * 8), read_double(top_ps + item * 8)
        if top_k >= V:
            top_k = width
        floor = read_float(floors + item * 4)
        total = _write_weights(tag, size, row, V, read_float(temperatures + item * 4), target)
        low, sure = _bounds(target, width, total, top_k, top_p)
        if floor > 0:
            sure = np.float32(np.inf)
        before = 0.0
        if sure < np.float32(np.inf):
            for i in range(V):
                if weights[i] >= sure:
                    before += weights[i]
        count = _rank(weights, V, low, sure, order)
        count = _count_kept(weights, order, count, before, total, top_k, top_p, floor)
        count = _keep(weights, V, sure, order, count)
        mass = 0.0
        for i in range(count):
            mass += weights[order[i]]
        for s in range(S):
            place = (item * S + s) * 8
            wanted = read_double(numbers + place) * mass
            running, chosen = 0.0, order[count - 1]
            for i in range(count):
                running += weights[order[i]]
                if running > wanted:
                    chosen = order[i]
                    break
            write_int64(found + place, chosen)
        item = take_next(arguments)
    keep(weights)


@lru_cache(maxsize=2)
def draw_ranked_kernel(is_bf16: bool) -> Kernel:
    """Compile the drawing for one element type, or load it from the cache."""
    key = source_key()

    def draw_ranked_bf16(arguments: int) -> None:
        if key:
            _draw_ranked(arguments, np.uint16(0), 2)

    def draw_ranked_f32(arguments: int) -> None:
        if key:
            _draw_ranked(arguments, np.float32(0), 4)

    return Kernel(draw_ranked_bf16 if is_bf16 else draw_ranked_f32, 12)
