"""x @ weight.T on matrix tiles, for bfloat16 x. Layout, arguments and what an activation does: see `linear`; K is a multiple of 32.

Weights are bfloat16 in panels, or integers in strips (`group_kinds`, two strips to a panel), by the `kind` argument. An item's panels of
integers are made into bfloat16 in memory of the thread's own (`widening`) and then multiplied as if they had been packed so.

With few rows, an item is a panel, which is read from memory once and in order. With many, it is a block that stays in the second-level
cache, and memory would idle while later rows meet a panel that is there already. So the thread's next panels are fetched meanwhile; with
few rows only their beginnings, from where the processor's own prefetching takes over (a tenth faster than without, or with all of it).
Integers are widened meanwhile as well: tiles keep the vector units idle, and a product of a few rows leaves tiles waiting.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, types

from backends.numba_kernels.activations import NONE
from backends.numba_kernels.compiling import source_key
from backends.numba_kernels.group_kinds import KINDS
from backends.numba_kernels.linear import NUM_ARGUMENTS, PANEL
from backends.numba_kernels.matrix_tiles import (
    CONFIGURATION_BYTES,
    LINE_BYTES,
    MAX_TILE_ROWS,
    STEP_BYTES,
    configure_tiles,
    emit_fetch,
    emit_products,
    release_tiles,
)
from backends.numba_kernels.threads import Kernel
from backends.numba_kernels.tile_results import emit_write_gated_rows, emit_write_rows, write_gated_rows, write_rows
from backends.numba_kernels.vectors import (
    I64,
    LANES,
    Builder,
    Value,
    cgutils,
    intrinsic,
    keep,
    read_int64,
    take_next,
    write_float,
)
from backends.numba_kernels.widening import (
    FETCH_LEAD,
    NOT_WIDENED,
    emit_fetch_step,
    emit_widen_step,
    is_integer,
    is_widened,
    panel_bytes_of,
    widen_step,
)

STEP_WORDS = 16  # words of k in a step
# Rows x steps of a block of x are at most 768 KiB of second-level cache, beside 2 panels of as many steps (200 KiB).
BLOCK_PANELS, BLOCK_ROWS, BLOCK_STEPS = 2, 256, 48
BLOCK_CELLS = BLOCK_ROWS * BLOCK_STEPS
FETCHED_LINES = 16  # of the 32 lines of a step, at most
STEP_PANEL_BYTES = STEP_WORDS * PANEL * 4  # of a step in bfloat16
RING_BYTES, RING_LEAD = 4 * STEP_PANEL_BYTES, 2  # a power of two; steps that are widened before they are met


@intrinsic
def multiply_and_prepare(
    typing_context: Any,
    kind: Any,
    rows: Any,
    columns: Any,
    a: Any,
    a_stride: Any,
    b_: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    steps: Any,
    adds: Any,
    fetched: Any,
    places: Any,
    widening: Any,
    result: Any,
) -> Any:
    """Do what `multiply_tiles` does for bfloat16; meanwhile prepare a later product and finish an earlier one, with units that would be idle.

    The last four are tuples. `fetched`: what is wanted soon, and how many cache lines of it to ask for beside each step.

    `places`: the place of the first step of b, and a mask; places lie STEP_PANEL_BYTES apart and only the bits of the mask of a distance count.
    `widening`: lead, panel of integers, next panel, sides, target, first place there. Beside step s, step s + lead of the panel is widened, or
    after its last step one of the next panel (0: none), both sides of it or one by the bits of `sides`.

    `result`: pending rows, pending, target, target_stride, factor, bias, activation. target[r, :] = pending[r, :] * factor + bias for
    0 … MAX_TILE_ROWS rows of 32 float32 that lie next to each other, rounded to bfloat16. With an activation (not NONE), the first 16 of
    these gate the others and a row of target is their 16 products, see `write_gated_rows`.
    """
    signature = types.void(kind, *[types.int64] * 9, types.boolean, fetched, places, widening, result)

    def generate(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, rows, columns, *operands = arguments[:11]
        fetched, places, widening, result = (cgutils.unpack_tuple(b, x) for x in arguments[11:])
        pending_rows, pending, target, target_stride, factor, bias, activation = result
        steps = operands[6]
        share = b.sdiv(b.add(pending_rows, b.sub(steps, I64(1))), steps)

        def meanwhile(step: Value) -> None:
            emit_fetch(b, step, *fetched)
            first = b.mul(step, share)
            last = b.add(first, share)
            last = b.select(b.icmp_signed("<", last, pending_rows), last, pending_rows)
            stride = I64(2 * STEP_BYTES)
            with b.if_else(b.icmp_signed("==", activation, I64(NONE))) as (plain, gated):
                with plain:
                    emit_write_rows(b, 2, first, last, pending, stride, target, target_stride, factor, bias)
                with gated:
                    emit_write_gated_rows(
                        b, activation, first, last, pending, stride, target, target_stride, factor, bias
                    )
            if is_integer(kind):
                _emit_widening(b, kind, step, steps, places[1], *widening)

        def place(step: Value) -> Value:
            return _emit_place(b, step, *places)

        emit_products(b, "tdpbf16ps", rows, columns, operands, meanwhile, place if is_integer(kind) else None)
        return context.get_dummy_value()

    return signature, generate


def _emit_place(b: Builder, step: Value, first: Value, mask: Value) -> Value:
    return b.and_(b.mul(b.add(step, first), I64(STEP_PANEL_BYTES)), mask)


def _emit_widening(
    b: Builder,
    kind: Any,
    step: Value,
    steps: Value,
    mask: Value,
    lead: Value,
    panel: Value,
    next_panel: Value,
    sides: Value,
    widened: Value,
    widened_place: Value,
) -> None:
    def locate(step: Value) -> tuple[Value, Value]:
        is_next = b.icmp_signed(">=", step, steps)
        return b.select(is_next, next_panel, panel), b.select(is_next, b.sub(step, steps), step)

    def is_wanted(source: Value, side: int) -> Value:
        exists = b.icmp_signed("!=", source, I64(0))
        return b.and_(exists, b.icmp_signed("!=", b.and_(sides, I64(1 << side)), I64(0)))

    ahead = b.add(step, lead)
    source, at = locate(b.add(ahead, I64(FETCH_LEAD)))
    with b.if_then(is_wanted(source, 0)):
        emit_fetch_step(b, kind, source, at)
    source, at = locate(ahead)
    target = b.add(widened, _emit_place(b, step, widened_place, mask))
    for side in range(2):
        with b.if_then(is_wanted(source, side)):
            emit_widen_step(b, kind, source, at, side, target)


@njit(nogil=True, error_model="numpy")
def _part(index: int, count: int, total: int) -> int:
    """Return where part `index` begins when `total` is divided as evenly as it goes into `count` parts."""
    return index * total // count


@njit(nogil=True, error_model="numpy")
def _widen(kind: Any, panel: int, step: int, steps: int, target: int) -> None:
    """Widen some steps of a panel."""
    for at in range(steps):
        widen_step(kind, panel, step + at, target + at * STEP_PANEL_BYTES)


@njit(nogil=True, error_model="numpy")
def _linear(arguments: int, kind: Any) -> None:
    x, x_stride = read_int64(arguments + 8), read_int64(arguments + 16)
    packed, factors, bias = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    y, y_stride = read_int64(arguments + 48), read_int64(arguments + 56)
    T, N, words = read_int64(arguments + 64), read_int64(arguments + 72), read_int64(arguments + 80)
    num_threads, activation = read_int64(arguments + 88), read_int64(arguments + 96)
    num_panels = (N + PANEL - 1) // PANEL
    num_groups = (T + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    steps = words // STEP_WORDS

    # The blocks: of panels, of groups of rows, and of steps.
    panel_blocks, row_blocks, step_blocks = num_panels, 1, 1
    if num_groups > 1:
        step_blocks = (steps + BLOCK_STEPS - 1) // BLOCK_STEPS
        block_groups = max(1, BLOCK_CELLS * step_blocks // (steps * MAX_TILE_ROWS))
        row_blocks = (num_groups + block_groups - 1) // block_groups
        panel_blocks = (num_panels + BLOCK_PANELS - 1) // BLOCK_PANELS
        # As many items for each thread.
        panel_blocks = min(num_panels, (panel_blocks + num_threads - 1) // num_threads * num_threads)
        if panel_blocks == num_panels and panel_blocks * row_blocks < 2 * num_threads:
            row_blocks = max(row_blocks, min(num_groups, (2 * num_threads + num_panels - 1) // num_panels))
    y_width = 2 if activation == NONE else 1  # bytes of y for an output
    num_items = panel_blocks * row_blocks
    looks_ahead = num_items >= 2 * num_threads
    panel_bytes = panel_bytes_of(kind, words) if is_widened(kind) else words * PANEL * 4
    # Panels of whole weights are widened while the item before them is multiplied, others right before they are.
    widens_ahead = is_widened(kind) and looks_ahead and step_blocks == 1
    most_groups = (num_groups + row_blocks - 1) // row_blocks
    most_panels = (num_panels + panel_blocks - 1) // panel_blocks
    tile_bytes = MAX_TILE_ROWS * PANEL * 4
    num_tiles = 2 if step_blocks == 1 else most_groups * most_panels
    most_steps = (steps + step_blocks - 1) // step_blocks
    widened_bytes = most_steps * STEP_PANEL_BYTES if is_widened(kind) else 0  # of a panel
    # Few rows meet a step once, and it goes through a ring that stays in the first-level cache; else this item's panels and the next one's.
    has_ring = widens_ahead and num_groups <= 1
    place, mask, lead, room = 0, np.int64(-1), steps, 2 * most_panels * widened_bytes
    if has_ring:
        mask, lead, room = np.int64(RING_BYTES - 1), min(RING_LEAD, steps), RING_BYTES
    area = np.empty(
        LINE_BYTES + CONFIGURATION_BYTES + 2 * PANEL * 4 + num_tiles * tile_bytes + room,
        np.uint8,
    )
    configuration = (area.ctypes.data + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    no_bias = configuration + CONFIGURATION_BYTES  # minus zeros: adding them changes no number
    no_factor = no_bias + PANEL * 4
    for i in range(PANEL):
        write_float(no_bias + 4 * i, np.float32(-0.0))
        write_float(no_factor + 4 * i, np.float32(1))
    sums = no_factor + PANEL * 4
    widened = sums + num_tiles * tile_bytes
    widened_next = widened if has_ring else widened + most_panels * widened_bytes
    configured = 0
    # A tile of sums is rounded and written while the next one is computed.
    pending_rows, pending, where, factor, shift = 0, sums, y, no_factor, no_bias
    item = take_next(arguments)
    if widens_ahead and item < num_items:
        panel = _part(item % panel_blocks, panel_blocks, num_panels)
        for index in range(_part(item % panel_blocks + 1, panel_blocks, num_panels) - panel):
            _widen(kind, packed + (panel + index) * panel_bytes, 0, lead, widened_next + index * widened_bytes)
    while item < num_items:
        # Drawn ahead, to be fetched and widened meanwhile.
        upcoming = take_next(arguments) if looks_ahead else num_items
        panel, last_panel = (
            _part(item % panel_blocks, panel_blocks, num_panels),
            _part(item % panel_blocks + 1, panel_blocks, num_panels),
        )
        first_group, last_group = (
            _part(item // panel_blocks, row_blocks, num_groups),
            _part(item // panel_blocks + 1, row_blocks, num_groups),
        )
        later_panel, later_last = 0, 0
        if upcoming < num_items:
            later_panel, later_last = (
                _part(upcoming % panel_blocks, panel_blocks, num_panels),
                _part(upcoming % panel_blocks + 1, panel_blocks, num_panels),
            )
        widened, widened_next = widened_next, widened
        groups = max(1, last_group - first_group)  # none for no rows
        step_bytes = panel_bytes // steps
        lines = min(FETCHED_LINES, (step_bytes // LINE_BYTES + groups - 1) // groups)
        for block in range(step_blocks):
            step = _part(block, step_blocks, steps)
            block_steps = _part(block + 1, step_blocks, steps) - step
            if is_widened(kind) and not widens_ahead:
                for index in range(last_panel - panel):
                    source = packed + (panel + index) * panel_bytes
                    _widen(kind, source, step, block_steps, widened + index * widened_bytes)
            next_panel, next_step = panel, _part(block + 1, step_blocks, steps)
            if block == step_blocks - 1:
                next_panel, next_step = later_panel, 0
            fetched_lines = 0
            if looks_ahead and not widens_ahead and (block < step_blocks - 1 or upcoming < num_items):
                fetched_lines = lines
            for group in range(first_group, last_group):
                row = group * MAX_TILE_ROWS
                count = min(MAX_TILE_ROWS, T - row)
                if count != configured:
                    configure_tiles(configuration, count)
                    configured = count
                for index in range(last_panel - panel):
                    column = (panel + index) * PANEL
                    width = min(PANEL, N - column)
                    if step_blocks == 1:
                        target = sums + tile_bytes if pending == sums else sums
                    else:
                        target = sums + ((group - first_group) * most_panels + index) * tile_bytes
                    source, source_stride = packed + column * words * 4 + step * STEP_WORDS * width * 4, width * 4
                    if is_widened(kind):
                        source, source_stride = widened + index * widened_bytes, PANEL * 4
                    following = packed + (next_panel + index) * panel_bytes + next_step * step_bytes
                    # Both sides of the panel with the same index there, or one beside each of the first two groups of rows.
                    later, sides = np.int64(0), 3 if groups == 1 else 1 << min(group - first_group, 2) & 3
                    if widens_ahead and later_panel + index < later_last:
                        later = packed + (later_panel + index) * panel_bytes
                    multiply_and_prepare(
                        kind,
                        count,
                        width // LANES,
                        x + row * x_stride + step * STEP_WORDS * 4,
                        x_stride,
                        source,
                        source_stride,
                        target,
                        PANEL * 4,
                        block_steps,
                        block > 0,
                        (following + (group - first_group) * block_steps * lines * LINE_BYTES, fetched_lines),
                        (place, mask),
                        (
                            lead,
                            packed + panel * panel_bytes,
                            later,
                            sides,
                            widened_next + index * widened_bytes,
                            place + lead if has_ring else 0,
                        ),
                        (pending_rows, pending, where, y_stride, factor, shift, activation),
                    )
                    pending_rows = 0
                    if has_ring:
                        place += steps
                    if block == step_blocks - 1:
                        pending, where = target, y + row * y_stride + column * y_width
                        factor = factors + column * 4 if factors else no_factor
                        shift = bias + column * 4 if bias else no_bias
                        if width == PANEL:
                            pending_rows = count
                        else:
                            write_rows(count, 1, pending, PANEL * 4, where, y_stride, factor, shift)
        if widens_ahead:
            for index in range(last_panel - panel, later_last - later_panel):
                _widen(
                    kind, packed + (later_panel + index) * panel_bytes, 0, steps, widened_next + index * widened_bytes
                )
        item = upcoming if looks_ahead else take_next(arguments)
    if activation == NONE:
        write_rows(pending_rows, 2, pending, PANEL * 4, where, y_stride, factor, shift)
    else:
        write_gated_rows(activation, pending_rows, pending, PANEL * 4, where, y_stride, factor, shift)
    release_tiles()
    keep(area)


@lru_cache(maxsize=1 + len(KINDS))
def linear_tiles_kernel(kind: str) -> Kernel:
    """Compile the body for "bfloat16" or a format of `KINDS`, or load it from the cache. Tiles must have been granted, see `has_matrix_tiles`."""
    key = source_key()

    def linear_tiles_bfloat16(arguments: int) -> None:
        if key:
            _linear(arguments, NOT_WIDENED)

    def linear_tiles_q4_0(arguments: int) -> None:
        if key:
            _linear(arguments, np.int16(0))

    def linear_tiles_q4_1(arguments: int) -> None:
        if key:
            _linear(arguments, np.uint16(0))

    def linear_tiles_q8_0(arguments: int) -> None:
        if key:
            _linear(arguments, np.uint8(0))

    def linear_tiles_int8(arguments: int) -> None:
        if key:
            _linear(arguments, np.int8(0))

    bodies = {
        "bfloat16": linear_tiles_bfloat16,
        "q4_0": linear_tiles_q4_0,
        "q4_1": linear_tiles_q4_1,
        "q8_0": linear_tiles_q8_0,
        "int8": linear_tiles_int8,
    }
    return Kernel(bodies[kind], NUM_ARGUMENTS)
