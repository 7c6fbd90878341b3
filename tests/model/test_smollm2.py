"""The real model against its golden continuations, teacher-forced: every step is judged by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from service.model.loading import LoadedModel
from tests.conftest import DATA
from tests.model.checkpoints import load
from tests.model.paged import PagedDecoder

pytestmark = pytest.mark.model

PROMPTS = ("story", "json", "emoji", "block_17", "chat_turns")


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, Any]]:
    """The recorded prompts by name."""
    content = json.loads((DATA / "golden" / "smollm2-135m" / "golden.json").read_text(encoding="utf-8"))
    return {prompt["name"]: prompt for prompt in content["prompts"]}


@pytest.fixture(scope="module")
def wide(smollm2: Path) -> LoadedModel:
    """The model in float32."""
    return load(smollm2, max_model_len=512)


@pytest.fixture(scope="module")
def narrow(smollm2: Path) -> LoadedModel:
    """The model as `auto` loads it."""
    return load(smollm2, dtype="auto", max_model_len=512)


def step_logprobs(model: LoadedModel, prompt: dict[str, Any], chunk: int | None = None) -> torch.Tensor:
    """Return [steps, V]: the logprobs at each recorded step, given the recorded tokens before it."""
    ids = prompt["ids"] + [step["id"] for step in prompt["steps"][:-1]]
    return PagedDecoder(model.decoder).whole(ids, chunk=chunk)[prompt["n_prompt"] - 1 :].log_softmax(-1)


@pytest.mark.parametrize("name", PROMPTS)
def test_every_greedy_token_and_logprob_is_the_recorded_one(
    name: str, wide: LoadedModel, golden: dict[str, dict[str, Any]]
) -> None:
    logprobs = step_logprobs(wide, golden[name], chunk=40)
    for row, step in zip(logprobs, golden[name]["steps"], strict=True):
        assert int(row.argmax()) == step["id"]
        for token_id, logprob in step["top"]:
            assert float(row[token_id]) == pytest.approx(logprob, abs=1e-3)


@pytest.mark.parametrize("name", PROMPTS)
def test_bfloat16_keeps_clear_choices(name: str, narrow: LoadedModel, golden: dict[str, dict[str, Any]]) -> None:
    assert narrow.dtype == torch.bfloat16
    logprobs = step_logprobs(narrow, golden[name])
    for row, step in zip(logprobs, golden[name]["steps"], strict=True):
        assert abs(float(row[step["id"]]) - step["top"][0][1]) < 1
        if step["gap"] > 0.3:
            assert int(row.argmax()) == step["id"]


def test_what_the_file_says_of_itself(narrow: LoadedModel) -> None:
    config = narrow.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_position, config.ropes[0].theta) == (49152, 8192, 100_000)
    assert config.tie_embeddings
    assert narrow.eos_ids == {2}
    assert isinstance(narrow.tokenizer_source, dict)
    tokens = narrow.tokenizer_source["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
