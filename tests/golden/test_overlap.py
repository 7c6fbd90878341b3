"""Steps made ahead over real networks: every token and logprob as with steps made in turn."""

from __future__ import annotations

import pytest

from service.messages import SamplingParams
from service.model.loading import load_model
from tests.conftest import DATA
from tests.golden.engine import GoldenEngine

PARAMETERS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
    "drawn": SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=3, seed=5),
    "penalised": SamplingParams(
        temperature=0.0, max_tokens=24, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=20, logprobs=1
    ),
    "with prompt logprobs": SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2),
}


@pytest.mark.parametrize("num_blocks", [200, 7], ids=["all at once", "one after another"])
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("backend", ["reference", "numba-cpu"])
def test_tiny_models_say_the_same_made_ahead_and_in_turn(backend: str, parameters: str, num_blocks: int) -> None:
    model = load_model(DATA / "golden" / "tiny-llama", dtype="float32", max_model_len=256)
    prompts = [
        [(start * 37 + i * i * 11 + 7) % 300 for i in range(length)] for start, length in ((1, 9), (2, 40), (3, 23))
    ]
    engines = [
        GoldenEngine(model, backend, num_blocks=num_blocks, token_budget=32, overlap=overlap)
        for overlap in (False, True)
    ]
    in_turn, ahead = (engine.run(prompts, PARAMETERS[parameters]) for engine in engines)
    assert ahead == in_turn
    assert len({answer.tokens[0].token_id for answer in ahead}) > 1
