"""Tokenizers shared by the text tests; loading one takes a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.text import Tokenizer
from tests.text.builders import sentencepiece_directory


@pytest.fixture(scope="session")
def smollm(data: Path) -> Tokenizer:
    """SmolLM2's tokenizer: byte-level, no bos."""
    return Tokenizer.from_directory(data / "golden" / "smollm2-135m")


@pytest.fixture(scope="session")
def tiny(data: Path) -> Tokenizer:
    """The 320-token byte-level tokenizer of the tiny checkpoints."""
    return Tokenizer.from_directory(data / "golden" / "tiny-llama")


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small Llama-2-style tokenizer: leading space, byte fallback, bos."""
    return Tokenizer.from_directory(sentencepiece_directory(tmp_path_factory.mktemp("llama2")))


@pytest.fixture(scope="session")
def golden(data: Path) -> dict[str, Any]:
    """SmolLM2's golden tokenizer cases, prompts and continuations."""
    loaded: dict[str, Any] = json.loads((data / "golden" / "smollm2-135m" / "golden.json").read_text(encoding="utf-8"))
    return loaded
