"""One server with the real model for the tests of real clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server, running


@pytest.fixture(scope="package")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`looseleaf serve` with SmolLM2-135M in float32, so that greedy texts are exact."""
    with running(tmp_path_factory.mktemp("server"), "--model", str(smollm2), "--dtype", "float32") as server:
        yield server
