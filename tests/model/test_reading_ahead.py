"""Layers are read on threads ahead of their packing: all of them, in order, no further ahead than told, and a fault is the caller's."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from service.errors import ModelLoadError
from service.model.weights import MAX_READERS, LayerWeights, _read_ahead


def layer(index: int) -> LayerWeights:
    return cast("LayerWeights", f"layer {index}")


def test_layers_come_in_order() -> None:
    assert list(_read_ahead(layer, 23)) == [layer(index) for index in range(23)]
    assert list(_read_ahead(layer, 1)) == [layer(0)]


def test_no_more_layers_are_held_than_there_are_threads() -> None:
    begun: list[int] = []

    def read(index: int) -> LayerWeights:
        begun.append(index)
        return layer(index)

    layers = _read_ahead(read, 40)
    for taken in range(40):
        next(layers)
        assert len(begun) <= taken + 1 + MAX_READERS


def test_a_layer_that_cannot_be_read_raises_where_it_is_taken_and_leaves_no_thread() -> None:
    def read(index: int) -> LayerWeights:
        if index == 5:
            raise ModelLoadError("tensor blk.5.attn_q.weight is cut off")
        return layer(index)

    taken: list[Any] = []
    with pytest.raises(ModelLoadError, match=r"blk\.5"):
        taken.extend(_read_ahead(read, 40))
    assert taken == [layer(index) for index in range(5)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("looseleaf-weights")]
