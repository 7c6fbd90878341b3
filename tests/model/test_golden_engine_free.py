"""The model runner alone against transformers: golden tokens and logprobs, whatever steps, blocks and neighbours a sequence has."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest

from backends.registry import BACKENDS
from service.model.loading import LoadedModel
from tests.conftest import DATA
from tests.model.checkpoints import load
from tests.model.generation import Bench, Generation

CHECKPOINTS = sorted(path.name for path in (DATA / "golden").glob("tiny-*"))
TOLERANCE = 1e-3  # of a logprob; the goldens are rounded to 1e-4
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 5}

every_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)
every_backend = pytest.mark.parametrize("backend", list(BACKENDS))


@cache
def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / "golden" / name / "golden.json").read_text(encoding="utf-8"))
    return content


@cache
def loaded(name: str) -> LoadedModel:
    return load(DATA / "golden" / name)


def generations_of(name: str) -> list[Generation]:
    return [Generation(prompt["ids"], GREEDY, len(prompt["greedy"])) for prompt in golden(name)["prompts"]]


def assert_golden(name: str, generations: list[Generation]) -> None:
    for generation, prompt in zip(generations, golden(name)["prompts"], strict=True):
        assert generation.output == [step["id"] for step in prompt["greedy"]], prompt["name"]
        for sample, step in zip(generation.samples, prompt["greedy"], strict=True):
            assert sample.logprob == pytest.approx(step["logprob"], abs=TOLERANCE)
            assert sample.top[0][0] == step["id"]
            assert sample.top[0][1] - sample.top[1][1] == pytest.approx(step["gap"], abs=2 * TOLERANCE)


@every_backend
@every_checkpoint
def test_prompts_in_chunks_beside_decodes_generate_the_golden_tokens(name: str, backend: str) -> None:
    """A budget of 24 tokens cuts the longer prompts into chunks that share their steps with the decodes of the shorter ones."""
    bench = Bench(loaded(name), backend, block_size=8)
    generations = generations_of(name)
    bench.finish(*generations, budget=24)
    assert bench.num_mixed_steps > 3
    assert max(generation.num_chunks for generation in generations) > 5
    assert_golden(name, generations)


@every_backend
@every_checkpoint
def test_sequences_computed_again_after_a_preemption_generate_the_golden_tokens(name: str, backend: str) -> None:
    bench = Bench(loaded(name), backend)
    generations = generations_of(name)
    for _ in range(9):
        bench.step(generations)
    for victim in generations[1::2]:
        assert 0 < len(victim.samples) < victim.num_wanted
        bench.preempt(victim)
    bench.finish(*generations, budget=64)
    assert_golden(name, generations)


@every_backend
@every_checkpoint
def test_a_sequence_on_blocks_that_another_computed_generates_the_golden_tokens(name: str, backend: str) -> None:
    bench = Bench(loaded(name), backend)
    first, second = generations_of(name), generations_of(name)
    bench.finish(*first)
    num_shared = 0
    for source, target in zip(first, second, strict=True):
        # The last prompt token is computed in any case: its logits are needed.
        num_blocks = (len(source.prompt) - 1) // bench.block_size
        bench.share(source, target, num_blocks)
        num_shared += num_blocks
    assert num_shared > 10
    bench.finish(*second)
    assert_golden(name, second)


@every_backend
def test_a_seeded_sequence_is_the_same_alone_beside_others_that_join_late_and_after_a_preemption(backend: str) -> None:
    """SMP-04, SMP-06: seeds and penalties."""
    name = "tiny-llama"
    prompts = golden(name)["prompts"]
    sampling = {"temperature": 0.8, "top_p": 0.9123, "repetition_penalty": 1.2, "presence_penalty": 0.5}

    def wanted() -> Generation:
        return Generation(prompts[3]["ids"], sampling, 24, seed=42)

    alone = wanted()
    Bench(loaded(name), backend).finish(alone)
    other_seed = Generation(prompts[3]["ids"], sampling, 24, seed=43)
    crowded, greedy = wanted(), Generation(prompts[4]["ids"], GREEDY, 30)
    late = Generation(prompts[5]["ids"], {"temperature": 1.0}, 12, seed=7)
    bench = Bench(loaded(name), backend)
    for _ in range(5):
        bench.step([greedy, crowded])
    for _ in range(5):
        bench.step([late, crowded, greedy, other_seed])
    bench.preempt(crowded)
    bench.finish(late, greedy, other_seed, crowded, budget=20)
    assert crowded.output == alone.output
    assert other_seed.output != alone.output
    assert greedy.output == [step["id"] for step in prompts[4]["greedy"]][:30]


@every_backend
@every_checkpoint
def test_prompt_logprobs_agree_with_the_golden_logits(name: str, backend: str) -> None:
    bench = Bench(loaded(name), backend)
    (prompt,) = (prompt for prompt in golden(name)["prompts"] if "all_logits" in prompt)
    generation = Generation(prompt["ids"], {"prompt_logprobs": 3}, 1)
    bench.finish(generation, budget=3)
    assert generation.num_chunks >= 2
    assert [score.token_id for score in generation.prompt_logprobs] == prompt["ids"][1:]
    for score, logits in zip(generation.prompt_logprobs, prompt["all_logits"], strict=False):
        normaliser = math.log(sum(map(math.exp, logits)))
        assert score.logprob == pytest.approx(logits[score.token_id] - normaliser, abs=TOLERANCE)
        assert score.top[0][0] == max(range(len(logits)), key=logits.__getitem__)
