"""Garbage after the model was loaded: looked for only where there is much, and what was loaded is never walked again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from service import app


@pytest.fixture(autouse=True)
def collection() -> Iterator[None]:
    """No collection but the one that is asked for."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_garbage_is_looked_for_only_where_there_is_much(is_worth_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    kept = [[i] for i in range(1000)]
    monkeypatch.setattr(app, "OBJECTS_WORTH_A_COLLECTION", 500 if is_worth_it else 1_000_000)
    collections = gc.get_stats()[2]["collections"]
    app._keep_what_was_loaded()
    assert gc.get_stats()[2]["collections"] - collections == int(is_worth_it)
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(kept)
