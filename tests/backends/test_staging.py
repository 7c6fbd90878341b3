"""Arrays laid side by side and copied at once; on a CPU the buffers are ordinary memory, and the rest is the same."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from backends.staging import ALIGNMENT, Staging, layout, view

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.zeros((0, 8), np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
    np.array([7], np.int32),
]


def test_what_arrives_is_what_was_sent_aligned_and_in_memory_of_its_own() -> None:
    staging = Staging(CPU, is_staged=True)
    for _ in range(3):  # more often than there are buffers
        sent = staging.send(ARRAYS)
        for tensor, array in zip(sent, ARRAYS, strict=True):
            assert tensor.dtype == torch.from_numpy(array.copy()).dtype
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.data_ptr() % ALIGNMENT == sent[0].data_ptr() % ALIGNMENT
            assert tensor.is_contiguous()


def test_a_later_step_leaves_an_earlier_ones_tensors_alone() -> None:
    staging = Staging(CPU, is_staged=True)
    first = staging.send(ARRAYS)[0]
    for _ in range(3):
        staging.send([np.full(5, -1)])
    assert first.tolist() == [0, 1, 2, 3, 4]


def test_one_copy_fills_places_of_a_memory_that_stays() -> None:
    offsets, size = layout(ARRAYS)
    memory = torch.full((size,), 0x5A, dtype=torch.uint8)
    places = [view(memory, offset, array) for offset, array in zip(offsets, ARRAYS, strict=True)]
    Staging(CPU, is_staged=True).send_to(memory, ARRAYS, offsets)
    for place, array in zip(places, ARRAYS, strict=True):
        assert np.array_equal(place.numpy(), array)


def test_buffers_grow_and_are_granted_once() -> None:
    staging = Staging(CPU, is_staged=True, num_buffers=1)
    staging.send([np.zeros(100_000, np.int64)])
    granted = staging._buffers[0].data_ptr()
    [sent] = staging.send([np.arange(1000)])
    assert staging._buffers[0].data_ptr() == granted
    assert sent.tolist() == list(range(1000))
    [large] = staging.send([np.arange(300_000)])
    assert large[-1] == 299_999


def test_a_cpu_gets_the_arrays_themselves() -> None:
    array = np.arange(3)
    [sent] = Staging(CPU).send([array])
    array[1] = 9
    assert sent.tolist() == [0, 9, 2]


def test_a_buffer_is_written_again_only_when_its_copy_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    staging = Staging(CPU, is_staged=True, num_buffers=2)
    for number in range(4):
        index = (staging._turn + 1) % 2
        staging._events[index] = SimpleNamespace(synchronize=lambda number=number: waited.append(number))
        staging.send([np.arange(3)])
    assert waited == [0, 1, 2, 3]
