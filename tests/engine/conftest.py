"""Every module of the engine's tests runs twice: each step applied before the next is made, and with the next one made ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.factories import overlapping


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["in_turn", "overlapping"])
def overlaps(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Say how cores plan in this run of the module."""
    with overlapping(request.param):
        yield request.param
