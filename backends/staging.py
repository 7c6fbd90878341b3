"""Sends a step's small arrays to a device in one copy that the host does not wait for.

An array in ordinary memory is copied by the driver's own detour, and a list becomes a tensor on a GPU only once everything queued before has
run. Here the arrays are laid side by side in page-locked memory that was granted once, and one asynchronous copy takes them over. A copy may
still be on its way when the next step is packed: buffers are used in turn, and one is written again only when its last copy has left it.
Invariant: nothing here waits for the device but for that, which a step or two later never takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes: what the kernels' loads want
SMALLEST = 1 << 16  # bytes of a first buffer


class Staging:
    """Page-locked buffers for one device. Used from one thread."""

    def __init__(self, device: torch.device, *, num_buffers: int = 2, is_staged: bool | None = None) -> None:
        """Grant nothing yet. On a CPU arrays are passed on as they are, unless `is_staged` says otherwise (for tests)."""
        self._device = device
        self.is_staged = device.type == "cuda" if is_staged is None else is_staged
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._events: list[Any] = [None] * num_buffers
        self._turn = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return the arrays on the device, each at a multiple of `ALIGNMENT` bytes of new memory; on a CPU they share the arrays' own."""
        if not self.is_staged:
            return [torch.from_numpy(array) for array in arrays]
        offsets, size = layout(arrays)
        target = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.send_to(target, arrays, offsets)
        return [view(target, offset, array) for offset, array in zip(offsets, arrays, strict=True)]

    def send_to(self, target: Tensor, arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> None:
        """Write the arrays to these offsets of `target` [bytes] uint8 on the device, in one copy; what lies between them becomes undefined."""
        size = max((offset + array.nbytes for offset, array in zip(offsets, arrays, strict=True)), default=0)
        if size == 0:
            return
        index = self._turn = (self._turn + 1) % len(self._buffers)
        if self._events[index] is not None:
            self._events[index].synchronize()
        if len(self._buffers[index]) < size:
            room = max(SMALLEST, 1 << (size - 1).bit_length())
            self._buffers[index] = torch.empty(room, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        staged = self._buffers[index].numpy()
        for offset, array in zip(offsets, arrays, strict=True):
            staged[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[:size].copy_(self._buffers[index][:size], non_blocking=True)
        if self._device.type == "cuda":
            event: Any = torch.cuda.Event  # torch leaves its constructor untyped
            self._events[index] = event()
            self._events[index].record()


def layout(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Return where each array begins when they lie side by side, aligned, and the bytes of all."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def view(memory: Tensor, offset: int, like: NDArray[Any]) -> Tensor:
    """Return the part of `memory` [bytes] uint8 that begins at `offset`, with the shape and type of an array."""
    dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
    return memory[offset : offset + like.nbytes].view(dtype).view(like.shape)
