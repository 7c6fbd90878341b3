"""Fixtures that more than one folder needs. Small data lies in `tests/data`; the real model is fetched once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of golden checkpoints, references and texts."""
    return DATA


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips with the reason where it can neither be found nor fetched."""
    from service.errors import ModelLoadError
    from service.model.fetch import resolve_model

    try:
        return resolve_model("smollm2-135m", report=lambda text: None)
    except ModelLoadError as error:
        pytest.skip(f"no SmolLM2-135M here: {error}")
