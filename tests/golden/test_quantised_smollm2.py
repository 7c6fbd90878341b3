"""What int8 and fp8 keys and values, and weights of 8 and 4 bits, cost on a trained model: perplexity of the fixed text, and how long greedy answers stay the same.

Every run reads quantised keys back through chunks and decodes: the text is scored in chunks of 100 tokens, answers are decoded.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from service.messages import SamplingParams
from service.model.loading import LoadedModel, load_model
from service.model.quantisation import Quantisation
from service.text import Tokenizer
from tests.golden.engine import GoldenEngine

pytestmark = [pytest.mark.model, pytest.mark.slow]

BACKEND = "numba-cpu"
KINDS = [torch.int8, torch.float8_e4m3fn]
# Measured on the first 2000 tokens, with keys mixed as `service.model.mixing` does: 0.03 % for int8 and 0.5 % for fp8; without the mixing
# 0.35 % and 1.8 %. The goal is 0.3 %, which the three bits of fp8's mantissa miss on a model as small as this one.
LARGEST_LOSS = {torch.int8: 0.003, torch.float8_e4m3fn: 0.012}
WEIGHTS: list[Quantisation] = ["int8", "int4", "stored"]
# Of weights held as integers, bfloat16 between the kernels included; measured on the first 2000 tokens: 0.34 % and 0.37 %.
LARGEST_WEIGHT_LOSS = 0.01
NUM_TOKENS = 600


@pytest.fixture(scope="module")
def golden(data: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((data / "golden/smollm2-135m/golden.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def model(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, dtype="float32")


def perplexity(model: LoadedModel, quantised: torch.dtype | None, ids: list[int]) -> float:
    engine = GoldenEngine(model, BACKEND, num_blocks=100, token_budget=100, quantised=quantised)
    [answer] = engine.run([ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert len(engine.batches) == len(ids) // 100
    return math.exp(-sum(entry.logprob for entry in answer.prompt_logprobs) / len(answer.prompt_logprobs))


@pytest.fixture(scope="module")
def text_ids(model: LoadedModel, data: Path) -> list[int]:
    assert isinstance(model.tokenizer_source, dict)
    tokenizer = Tokenizer.from_gguf_metadata(model.tokenizer_source)
    return tokenizer.encode((data / "text/alice.txt").read_text(encoding="utf-8")[:20_000])[:NUM_TOKENS]


@pytest.fixture(scope="module")
def unquantised(model: LoadedModel, text_ids: list[int]) -> float:
    return perplexity(model, None, text_ids)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_perplexity_stays_close_to_that_of_the_unquantised_pool(
    model: LoadedModel, kind: torch.dtype, text_ids: list[int], unquantised: float
) -> None:
    quantised = perplexity(model, kind, text_ids)
    assert quantised != unquantised  # the pool really was quantised
    assert abs(quantised / unquantised - 1) < LARGEST_LOSS[kind], (quantised, unquantised)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_greedy_answers_begin_as_the_golden_ones(model: LoadedModel, kind: torch.dtype, golden: dict[str, Any]) -> None:
    """The share of answers' tokens before the first difference; a rounding can tip a near tie, after which texts rightly differ."""
    prompts = [prompt for prompt in golden["prompts"] if len(prompt["ids"]) < 200][:10]
    assert len(prompts) == 10
    engine = GoldenEngine(model, BACKEND, quantised=kind)
    answers = engine.run(
        [prompt["ids"] for prompt in prompts], SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    )
    same = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = [step["id"] for step in prompt["steps"]]
        same += next((i for i, (a, b) in enumerate(zip(answer.ids, wanted, strict=True)) if a != b), len(wanted))
    share = same / sum(len(prompt["steps"]) for prompt in prompts)
    assert share > (0.75 if kind == torch.int8 else 0.4), share


@pytest.fixture(scope="module", params=WEIGHTS)
def quantised_model(request: pytest.FixtureRequest, smollm2: Path) -> LoadedModel:
    return load_model(smollm2, quantise=request.param)


def test_weights_of_few_bits_keep_the_perplexity(
    quantised_model: LoadedModel, text_ids: list[int], unquantised: float
) -> None:
    assert abs(perplexity(quantised_model, None, text_ids) / unquantised - 1) < LARGEST_WEIGHT_LOSS


def test_weights_of_few_bits_know_the_capital_of_france(quantised_model: LoadedModel) -> None:
    assert isinstance(quantised_model.tokenizer_source, dict)
    tokenizer = Tokenizer.from_gguf_metadata(quantised_model.tokenizer_source)
    engine = GoldenEngine(quantised_model, BACKEND)
    [answer] = engine.run(
        [tokenizer.encode("The capital of France is")], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    )
    assert tokenizer.decode(answer.ids).startswith(" Paris")


def test_answers_of_quantised_weights_are_the_same_alone_and_in_a_batch(
    quantised_model: LoadedModel, golden: dict[str, Any]
) -> None:
    """Twelve at once meet matrix tiles where one alone meets vectors: every token and logprob must be equal."""
    prompts = [prompt["ids"] for prompt in golden["prompts"] if len(prompt["ids"]) < 60][:12]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    together = GoldenEngine(quantised_model, BACKEND).run(prompts, greedy)
    for ids, answer in list(zip(prompts, together, strict=True))[::4]:
        [alone] = GoldenEngine(quantised_model, BACKEND).run([ids], greedy)
        assert alone.tokens == answer.tokens
