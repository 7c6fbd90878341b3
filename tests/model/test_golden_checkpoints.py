"""Every family against transformers: last logits and greedy tokens of the tiny checkpoints, on each backend, in both config spellings."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.ops import TorchOps
from backends.registry import BACKENDS
from service.model.loading import LoadedModel
from tests.conftest import DATA
from tests.model.checkpoints import load
from tests.model.paged import PagedDecoder

CHECKPOINTS = sorted(path.name for path in (DATA / "golden").glob("tiny-*"))
LOGIT_TOLERANCE = 1e-3  # the goldens are rounded to 1e-4


@cache
def golden(name: str) -> dict[str, Any]:
    """The reference of a checkpoint."""
    content: dict[str, Any] = json.loads((DATA / "golden" / name / "golden.json").read_text(encoding="utf-8"))
    return content


@cache
def loaded(name: str) -> LoadedModel:
    """The checkpoint in float32; each test binds its own cache."""
    return load(DATA / "golden" / name)


def test_there_are_checkpoints_of_all_six_families() -> None:
    assert {loaded(name).config.family.name for name in CHECKPOINTS} == {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma3",
    }


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_batch_of_all_prompts_follows_the_reference_token_by_token(name: str, backend: str) -> None:
    """Prefill of six prompts in one step, then 32 decode steps of all six: logits within 1e-3, every greedy token equal."""
    prompts = golden(name)["prompts"]
    paged = PagedDecoder(loaded(name).decoder, backend)
    logits = paged.step({i: prompt["ids"] for i, prompt in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        assert logits[i].argmax(-1).tolist() == prompt["argmax_each_position"], prompt["name"]
        assert torch.allclose(logits[i][-1], torch.tensor(prompt["last_logits"]), rtol=0, atol=LOGIT_TOLERANCE)
        if "all_logits" in prompt:
            assert torch.allclose(logits[i], torch.tensor(prompt["all_logits"]), rtol=0, atol=LOGIT_TOLERANCE)
    for step in range(len(prompts[0]["greedy"])):
        last = {i: rows[-1] for i, rows in logits.items()}
        for i, prompt in enumerate(prompts):
            wanted = prompt["greedy"][step]
            assert int(last[i].argmax()) == wanted["id"], (prompt["name"], step)
            assert float(last[i].log_softmax(-1)[wanted["id"]]) == pytest.approx(wanted["logprob"], abs=LOGIT_TOLERANCE)
        logits = paged.step({i: [int(row.argmax())] for i, row in last.items()})


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_prompt_in_chunks_and_beside_others_gives_the_logits_of_the_whole_alone(name: str, backend: str) -> None:
    ids = golden(name)["prompts"][-1]["ids"]
    whole = PagedDecoder(loaded(name).decoder, backend).whole(ids)
    for chunk in (1, 7, 16, 64):
        paged = PagedDecoder(loaded(name).decoder, backend, block_size=8)
        if chunk == 7:  # a neighbour of another length in every step
            pieces = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
            got = torch.cat([paged.step({1: [5, 6, 7], 0: piece})[0] for piece in pieces])
        else:
            got = paged.whole(ids, chunk=chunk)
        assert torch.allclose(got, whole, rtol=0, atol=1e-4), chunk


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_older_spelling_of_the_configuration_means_the_same(name: str, tmp_path: Path) -> None:
    """NUM-01, NUM-02: `rope_theta`/`rope_scaling`/`torch_dtype` instead of `rope_parameters`/`dtype`."""
    folder = shutil.copytree(DATA / "golden" / name, tmp_path / name)
    shutil.copy(folder / "config.legacy.json", folder / "config.json")
    legacy = load(folder, ops=TorchOps())
    assert legacy.config == loaded(name).config
    prompt = golden(name)["prompts"][-1]
    logits = PagedDecoder(legacy.decoder).whole(prompt["ids"])
    assert torch.allclose(logits[-1], torch.tensor(prompt["last_logits"]), rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bfloat16_keeps_the_likeliest_tokens_where_the_gap_is_clear(name: str) -> None:
    """A random two-layer model is harsher than a trained one: only steps whose reference gap is above 1 nat count."""
    model = load(DATA / "golden" / name, dtype="bfloat16")
    assert model.decoder.dtype == torch.bfloat16
    for prompt in golden(name)["prompts"]:
        steps = prompt["greedy"]
        ids = prompt["ids"] + [step["id"] for step in steps[:-1]]
        logits = PagedDecoder(model.decoder).whole(ids)[len(prompt["ids"]) - 1 :]
        clear = [i for i, step in enumerate(steps) if step["gap"] > 1.0]
        assert clear
        assert [int(logits[i].argmax()) for i in clear] == [steps[i]["id"] for i in clear]


def test_auto_keeps_the_dtype_that_the_checkpoint_declares() -> None:
    assert load(DATA / "golden" / "tiny-llama", dtype="auto").dtype == torch.float32
    assert load(DATA / "golden" / "tiny-llama-tied-bf16", dtype="auto").dtype == torch.bfloat16


def test_end_of_text_ids_are_the_union_of_both_configuration_files() -> None:
    assert loaded("tiny-llama").eos_ids == {2, 4}
