"""SmolLM2-135M in float32 through the whole engine gives the tokens of Hugging Face transformers, however it was scheduled.

Each way of scheduling is checked to have really happened: a batch, a chunk, a preemption, a cache hit. The reference backend, which loops over
sequences in Python, gets shorter prompts after the first test; the tiny checkpoints take it through the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from backends.registry import BACKENDS, probe
from service.messages import SamplingParams
from service.model.loading import LoadedModel, load_model
from service.text import Tokenizer
from tests.golden.engine import BLOCK_SIZE, CPU, Answer, GoldenEngine

pytestmark = [pytest.mark.model, pytest.mark.slow]

STEPS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=5)
LOGPROB_NOISE = 1e-3
SINK_NOISE = (
    5e-3  # the first token of "<|endoftext|>" alone is an attention sink: the reference's own noise is 5e-4 there
)
MIXED = ["one_token", "capital", "emoji", "block_16", "block_17", "chat_turns", "digits", "story"]


@pytest.fixture(scope="module")
def golden(data: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((data / "golden/smollm2-135m/golden.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def prompts(golden: dict[str, Any]) -> dict[str, Any]:
    return {prompt["name"]: prompt for prompt in golden["prompts"]}


@pytest.fixture(scope="module", params=list(BACKENDS))
def backend(request: pytest.FixtureRequest, model: LoadedModel) -> str:
    name = str(request.param)
    reasons = probe(model.decoder.kv_cache_spec(BLOCK_SIZE), CPU)[name]
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return name


@pytest.fixture(scope="module")
def max_prompt(backend: str) -> int:
    """The longest prompt that this backend is given, in tokens."""
    return 64 if backend == "reference" else 4096


@pytest.fixture(scope="module")
def model(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, dtype="float32")


def assert_golden(prompt: dict[str, Any], answer: Answer) -> None:
    """Every token equal, every logprob of the reference's five likeliest within its noise."""
    assert answer.ids == [step["id"] for step in prompt["steps"]], prompt["name"]
    noise = SINK_NOISE if prompt["name"] == "endoftext_only" else LOGPROB_NOISE
    for token, step in zip(answer.tokens, prompt["steps"], strict=True):
        assert token.logprob == pytest.approx(step["top"][0][1], abs=noise), prompt["name"]
        got = dict(token.top)
        for token_id, logprob in step["top"][:4]:  # the fifth may be tied with the sixth
            assert got[token_id] == pytest.approx(logprob, abs=noise), prompt["name"]


def test_a_batch_of_all_prompts_equals_the_golden_tokens(
    model: LoadedModel, backend: str, prompts: dict[str, Any]
) -> None:
    engine = GoldenEngine(model, backend, num_blocks=1200)
    answers = engine.run([prompt["ids"] for prompt in prompts.values()], GREEDY)
    assert max(len(batch.entries) for batch in engine.batches) == len(prompts)
    for prompt, answer in zip(prompts.values(), answers, strict=True):
        assert_golden(prompt, answer)


@pytest.mark.parametrize("name", ["one_token", "capital", "block_16", "chat_turns"])
def test_a_prompt_alone_equals_the_golden_tokens(
    model: LoadedModel, backend: str, prompts: dict[str, Any], name: str
) -> None:
    engine = GoldenEngine(model, backend, num_blocks=20, has_prefix_cache=False)
    [answer] = engine.run([prompts[name]["ids"]], GREEDY)
    assert all(len(batch.entries) == 1 for batch in engine.batches)
    assert_golden(prompts[name], answer)


def test_a_prompt_in_chunks_equals_the_golden_tokens(
    model: LoadedModel, backend: str, prompts: dict[str, Any], max_prompt: int
) -> None:
    prompt, budget = (prompts["long_1000"], 100) if max_prompt >= 1000 else (prompts["block_256"], 26)
    engine = GoldenEngine(model, backend, num_blocks=100, token_budget=budget, max_num_seqs=16)
    [answer] = engine.run([prompt["ids"]], GREEDY)
    chunks = [batch for batch in engine.batches if batch.num_tokens > 1]
    assert len(chunks) == 10
    assert_golden(prompt, answer)


def test_preempted_requests_equal_the_golden_tokens(model: LoadedModel, backend: str, prompts: dict[str, Any]) -> None:
    engine = GoldenEngine(model, backend, num_blocks=26, has_prefix_cache=False)
    answers = engine.run([prompts[name]["ids"] for name in MIXED], GREEDY)
    assert engine.core.stats().preemptions > 0
    for name, answer in zip(MIXED, answers, strict=True):
        assert_golden(prompts[name], answer)


def test_a_cached_prefix_gives_the_golden_tokens(
    model: LoadedModel, backend: str, prompts: dict[str, Any], max_prompt: int
) -> None:
    names = ["chat_doc_a", "chat_doc_b"] if max_prompt >= 2000 else ["block_256"]
    engine = GoldenEngine(model, backend, num_blocks=400)
    [cold] = engine.run([prompts[names[0]]["ids"]], GREEDY)
    *others, again = engine.run([prompts[name]["ids"] for name in names[::-1]], GREEDY)
    assert cold.cached_tokens == 0
    assert again.cached_tokens == (len(prompts[names[0]]["ids"]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_golden(prompts[names[0]], cold)
    assert_golden(prompts[names[0]], again)
    for other in others:
        shared = 1815  # ids that the two documents have in common
        assert other.cached_tokens == shared // BLOCK_SIZE * BLOCK_SIZE
        assert_golden(prompts[names[1]], other)


def test_perplexity_equals_the_reference(
    model: LoadedModel, backend: str, golden: dict[str, Any], data: Path, max_prompt: int
) -> None:
    reference = golden["perplexity"]
    num_tokens = reference["tokens"] if max_prompt >= reference["tokens"] else 250
    assert isinstance(model.tokenizer_source, dict)
    tokenizer = Tokenizer.from_gguf_metadata(model.tokenizer_source)
    text = (data / "text/alice.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text[:20_000])[: reference["tokens"]]
    assert ids[:16] == reference["first_ids"]
    assert hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest() == reference["ids_sha256"]
    engine = GoldenEngine(model, backend, num_blocks=200)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [answer] = engine.run([ids[:num_tokens]], sampling)
    assert len(answer.prompt_logprobs) == num_tokens - 1
    nll = -sum(entry.logprob for entry in answer.prompt_logprobs)
    assert nll == pytest.approx(reference["cumulative_nll_after"][str(num_tokens)], rel=1e-4)
    if num_tokens == reference["tokens"]:
        assert math.exp(nll / reference["scored"]) == pytest.approx(reference["perplexity"], rel=1e-3)


def test_prompt_logprobs_equal_the_reference(
    model: LoadedModel, backend: str, prompts: dict[str, Any], max_prompt: int
) -> None:
    scored = {
        name: prompt
        for name, prompt in prompts.items()
        if prompt.get("prompt_logprobs") and name != "endoftext_only" and prompt["n_prompt"] <= max_prompt
    }
    assert len(scored) > 10
    engine = GoldenEngine(model, backend)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    answers = engine.run([prompt["ids"] for prompt in scored.values()], sampling)
    for (name, prompt), answer in zip(scored.items(), answers, strict=True):
        got = [entry.logprob for entry in answer.prompt_logprobs]
        assert got == pytest.approx(prompt["prompt_logprobs"], abs=LOGPROB_NOISE), name
