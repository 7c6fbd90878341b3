"""Speculation over real networks: every token and logprob as without it, bit for bit where the backend's rows know no neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.registry import probe
from service.messages import SamplingParams
from service.model.loading import LoadedModel, load_model
from tests.conftest import DATA
from tests.golden.engine import BLOCK_SIZE, CPU, Answer, GoldenEngine

CHECKPOINTS = sorted(path.name for path in (DATA / "golden").glob("tiny-*"))

PARAMETERS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
    "drawn": SamplingParams(temperature=0.4, max_tokens=24, ignore_eos=True, logprobs=3, seed=5),
    "penalised": SamplingParams(
        temperature=0.0, max_tokens=24, frequency_penalty=0.05, repetition_penalty=1.02, min_tokens=20
    ),
}


def generate(
    model: LoadedModel, backend: str, prompts: list[list[int]], sampling: SamplingParams, speculation: str
) -> tuple[list[Answer], GoldenEngine]:
    # A pool that is too small for all at once: some wait, or are preempted while they speculate.
    needed = [-(-(len(ids) + 24) // BLOCK_SIZE) for ids in prompts]
    num_blocks = 1 + max(*needed, sum(needed) - 2)
    engine = GoldenEngine(model, backend, num_blocks=num_blocks, token_budget=96, speculation=speculation)
    return engine.run(prompts, sampling), engine


def repetitive(model: LoadedModel) -> list[list[int]]:
    """Prompts that say something twice and begin it a third time, of several lengths."""
    size = model.config.vocab_size
    stems = [[(start * 37 + i * i * 11 + 7) % size for i in range(length)] for start, length in ((1, 9), (2, 20))]
    return [[*stem, *stem, *stem[: len(stem) // 2]] for stem in stems]


def cases() -> list[tuple[str, str, str, str]]:
    """Every checkpoint greedily, and one of them in every way."""
    return [
        *((name, "numba-cpu", "bfloat16", "greedy") for name in CHECKPOINTS),
        *((CHECKPOINTS[0], "numba-cpu", "bfloat16", parameters) for parameters in PARAMETERS if parameters != "greedy"),
        *(("tiny-llama", "numba-cpu", "float32", parameters) for parameters in PARAMETERS),
        ("tiny-llama", "reference", "float32", "greedy"),
        ("tiny-llama", "reference", "float32", "drawn"),
    ]


@pytest.mark.parametrize(("name", "backend", "dtype", "parameters"), cases())
def test_tiny_models_say_the_same_with_and_without(name: str, backend: str, dtype: str, parameters: str) -> None:
    model = load_model(DATA / "golden" / name, dtype=dtype, max_model_len=256)
    if reasons := probe(model.decoder.kv_cache_spec(BLOCK_SIZE), CPU)[backend]:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")
    sampling = PARAMETERS[parameters]
    expected, slow = generate(model, backend, repetitive(model), sampling, "off")
    answers, fast = generate(model, backend, repetitive(model), sampling, "ngram")
    assert fast.core.stats().draft_tokens > 0
    assert slow.core.stats().draft_tokens == 0
    for answer, right in zip(answers, expected, strict=True):
        assert answer.ids == right.ids
        if dtype == "bfloat16":  # products in float32 are torch's, and round as the number of rows says
            assert answer.tokens == right.tokens
    assert fast.core.stats().pool.used == 0


@pytest.mark.model
@pytest.mark.parametrize(
    ("dtype", "parameters"), [("bfloat16", "greedy"), ("bfloat16", "drawn"), ("float32", "greedy")]
)
def test_the_real_model_says_the_same(smollm2: Path, dtype: str, parameters: str) -> None:
    model = load_model(smollm2, dtype=dtype, max_model_len=2048)
    # The second one passes 1024 tokens, where a decode's keys begin to be split.
    stem = [(i * i * 13 + 40) % 97 + 300 for i in range(97)]
    prompts = [[504, 2644, 30, 198] * 6, (stem * 11)[: 1010 if dtype == "bfloat16" else 120]]
    expected, slow = generate(model, "numba-cpu", prompts, PARAMETERS[parameters], "off")
    answers, fast = generate(model, "numba-cpu", prompts, PARAMETERS[parameters], "ngram")
    stats = fast.core.stats()
    assert stats.accepted_draft_tokens > 20
    assert stats.steps < slow.core.stats().steps
    for answer, right in zip(answers, expected, strict=True):
        assert answer.ids == right.ids
        assert dtype != "bfloat16" or answer.tokens == right.tokens
