"""The sampler against a plain one-row-at-a-time definition, and its promise that neighbours cannot show."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.batch import SampledToken, StepEntry
from service.model import drawing, sampler
from service.model.drawing import invert
from service.model.philox import philox, uniforms
from service.model.sampler import Sampler, likeliest, likeliest_on_device
from tests.model.steps import make_entry

VOCAB = 300


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sample(logits: torch.Tensor, *entries: StepEntry, num_valid_ids: int | None = None) -> list[list[int]]:
    results = Sampler(num_valid_ids or logits.shape[1]).sample(logits.clone(), entries)
    assert all(result is not None for result in results)
    return [[token.token_id for token in result or ()] for result in results]


def defined_choice(row: torch.Tensor, entry: StepEntry) -> list[int]:
    """Follow the contract word by word in float64, one id at a time."""
    params = entry.sampling
    logits = [float(value) for value in row]
    prompt, output = set(entry.prompt_token_ids or ()), Counter(entry.output_token_ids or ())
    for token_id in prompt | set(output):
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
    for token_id, count in output.items():
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if entry.num_output_tokens < params.min_tokens:
        for token_id in {*entry.eos_ids, *params.stop_token_ids}:
            logits[token_id] = -math.inf
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if params.is_greedy or params.temperature <= 1e-5:
        return [order[0]] * len(entry.seeds)
    largest = logits[order[0]]
    weights = {token_id: math.exp((logits[token_id] - largest) / params.temperature) for token_id in order}
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    total = sum(weights[token_id] for token_id in order)
    kept, mass = [], 0.0
    for token_id in order:
        if mass >= params.top_p * total and params.top_p < 1.0:
            break
        kept.append(token_id)
        mass += weights[token_id]
    kept = sorted(token_id for token_id in kept if weights[token_id] >= params.min_p)
    running = np.cumsum([weights[token_id] for token_id in kept])
    numbers = uniforms(entry.seeds, [entry.seq_len] * len(entry.seeds))
    return [kept[int(np.searchsorted(running, number * running[-1], side="right"))] for number in numbers]


# Shares are no multiples of 1/n for a small n: a cut exactly at a border would depend on rounding.
SHARES = st.sampled_from([1.0, 0.0, 1e-9, 0.1234, 0.3571, 0.777, 0.9123, 0.98713, 0.99991])
IDS = st.integers(0, VOCAB - 1)


@st.composite
def rows_and_entries(draw: st.DrawFn) -> tuple[torch.Tensor, list[StepEntry]]:
    count = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**31))
    spread = draw(st.sampled_from([0.0, 0.01, 0.5, 2.0, 8.0]))
    rows = random_logits(count, seed=seed, spread=spread)
    if draw(st.booleans()):
        rows = rows.round()  # many ties
    entries = []
    for _ in range(count):
        has_penalties = draw(st.booleans())
        entries.append(
            make_entry(
                start=draw(st.integers(0, 5000)),
                seeds=draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3)),
                temperature=draw(st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 0.3, 0.8, 1.0, 2.0])),
                top_k=draw(st.sampled_from([0, -1, 1, 2, 7, 50, 127, 255, 256, 257, 299, 300, 301, 9_999_999])),
                top_p=draw(SHARES),
                min_p=draw(st.sampled_from([0.0, 0.01234, 0.31, 1.0])),
                repetition_penalty=draw(st.sampled_from([0.5, 1.3, 2.0])) if has_penalties else 1.0,
                presence_penalty=draw(st.sampled_from([-2.0, 0.0, 1.5])) if has_penalties else 0.0,
                frequency_penalty=draw(st.sampled_from([-1.0, 0.0, 2.0])) if has_penalties else 0.0,
                prompt=draw(st.lists(IDS, max_size=8)) if has_penalties else None,
                output=draw(st.lists(IDS, max_size=8)) if has_penalties else None,
                logit_bias=draw(st.dictionaries(IDS, st.sampled_from([-100.0, -1.0, 3.0, 100.0]), max_size=3)),
                min_tokens=draw(st.sampled_from([0, 4])),
                num_output_tokens=draw(st.integers(0, 6)),
                eos_ids=draw(st.lists(IDS, max_size=2)),
                stop_token_ids=tuple(draw(st.lists(IDS, max_size=2))),
            )
        )
    return rows, entries


@settings(max_examples=150, deadline=None)
@given(rows_and_entries())
def test_any_mix_of_parameters_chooses_what_the_definition_chooses(case: tuple[torch.Tensor, list[StepEntry]]) -> None:
    rows, entries = case
    assert sample(rows, *entries) == [defined_choice(row, entry) for row, entry in zip(rows, entries, strict=True)]


@settings(max_examples=60, deadline=None)
@given(rows_and_entries(), st.randoms(use_true_random=False))
def test_a_row_is_the_same_alone_and_among_any_neighbours_in_any_order(
    case: tuple[torch.Tensor, list[StepEntry]], random: object
) -> None:
    """SMP-04, SMP-05: bit for bit, whoever else is in the batch."""
    rows, entries = case
    alone = [sample(rows[i : i + 1], entry)[0] for i, entry in enumerate(entries)]
    order = list(range(len(entries)))
    random.shuffle(order)  # type: ignore[attr-defined]
    together = sample(rows[order], *(entries[i] for i in order))
    assert together == [alone[i] for i in order]


def test_a_large_vocabulary_is_the_same_alone_and_in_a_batch_and_its_logprobs_too() -> None:
    """SMP-04, SMP-05: also where a batch makes the tensor library split its work differently."""
    logits = random_logits(24, vocab=49_152, seed=3)
    variants = [
        {"temperature": 0.8},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 5},
        {"temperature": 0.7, "top_k": 40, "min_p": 0.02},
        {"temperature": 1.3, "repetition_penalty": 2.0, "prompt": (5, 9), "output": (9,)},
        {"temperature": 0.9, "presence_penalty": 2.0, "prompt": (5,), "output": (9, 10)},
    ]
    entries = [make_entry(seeds=(row,), start=row, **variants[row % len(variants)]) for row in range(24)]
    sampler = Sampler(49_000)
    together = sampler.sample(logits.clone(), entries)
    for row, entry in enumerate(entries):
        assert sampler.sample(logits[row : row + 1].clone(), [entry]) == [together[row]]


@pytest.mark.parametrize("spread", [4.0, 1.0, 0.05])
def test_top_p_is_exact_however_many_candidates_it_needs(spread: float) -> None:
    """A peaked row needs a few ids, a flat one more than any shortcut looks at."""
    logits = random_logits(4, vocab=6000, seed=9, spread=spread)
    entries = [make_entry(seeds=range(20), start=row, top_p=0.9123) for row in range(4)]
    assert sample(logits, *entries) == [defined_choice(row, entry) for row, entry in zip(logits, entries, strict=True)]


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9123}, {"top_k": 300}, {"min_p": 0.1}])
def test_a_wide_head_draws_as_one_that_has_only_the_valid_ids(more: dict[str, float]) -> None:
    """MDL-07: also when every row of the step is drawn."""
    logits = random_logits(5, vocab=1000, spread=1.0)
    entries = [make_entry(seeds=range(20), start=row, **more) for row in range(5)]
    assert sample(logits, *entries, num_valid_ids=900) == sample(logits[:, :900], *entries)


def test_ids_tied_across_the_end_of_the_candidates_are_taken_in_id_order() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 900] = 1.0
    for top_k in (2, 127, 255, 256, 257, 500):
        entry = make_entry(seeds=range(300), top_k=top_k, temperature=2.0)
        chosen = sample(logits, entry)
        assert set(chosen[0]) <= {900, *range(top_k - 1)}
        assert chosen == [defined_choice(logits[0], entry)]


def test_samples_follow_the_distribution_of_the_row() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))
    for filters in ({}, {"top_p": 0.99999}, {"top_k": 4}):
        (chosen,) = sample(logits, make_entry(seeds=range(8000), **filters))
        expected = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
        if filters.get("top_k"):
            expected = np.array([*expected[:4] / expected[:4].sum(), 0.0])
        seen = np.bincount(chosen, minlength=5)
        alive = expected > 0
        chi_square = ((seen[alive] - 8000 * expected[alive]) ** 2 / (8000 * expected[alive])).sum()
        assert chi_square < 18.5  # 99.9 % of 4 degrees of freedom
        assert seen[~alive].sum() == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**31), st.sampled_from([0.02, 0.3, 0.9]), st.sampled_from([1.0, 1e-7, 9.0]))
def test_a_number_finds_the_column_of_its_share_and_never_one_without_weight(
    width: int, seed: int, filled: float, spread: float
) -> None:
    """However the partial sums were rounded: the largest number below 1 and 0 itself are the borders that tempt."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(4, width, generator=generator) * spread).exp()
    weights[torch.rand(4, width, generator=generator) > filled] = 0.0
    weights[torch.arange(4), torch.randint(width, (4,), generator=generator)] = 1e-3
    numbers = torch.rand(4, 40, generator=generator, dtype=torch.float64).sort(dim=1).values
    numbers[:, 0], numbers[:, -1] = 0.0, 1.0 - 2.0**-53
    columns = invert(weights, numbers)
    assert bool((weights.gather(1, columns) > 0).all())
    assert bool((columns[:, 1:] >= columns[:, :-1]).all())
    shares = weights.double().cumsum(dim=1) / weights.double().sum(dim=1, keepdim=True)
    assert bool((shares.gather(1, columns) >= numbers - 1e-6).all())
    below = torch.where(columns > 0, shares.gather(1, (columns - 1).clamp(min=0)), 0.0)
    assert bool((below <= numbers + 1e-6).all())


def test_a_sample_depends_on_its_seed_and_its_position() -> None:
    logits = torch.zeros(1, 50_000)
    (by_seed,) = sample(logits, make_entry(seeds=range(16), start=3))
    by_position = [sample(logits, make_entry(seeds=(0,), start=start))[0][0] for start in range(3, 19)]
    assert len(set(by_seed)) > 12
    assert len(set(by_position)) > 12
    assert by_seed[0] == by_position[0]


def test_how_a_token_was_reached_does_not_change_its_sample() -> None:
    """SMP-04: a sequence computed again after a preemption, in one chunk instead of step by step, draws the same number."""
    logits = random_logits(1)
    decode = make_entry((5,), start=9)
    recomputed = make_entry((5,) * 10, start=0)
    assert sample(logits, decode) == sample(logits, recomputed)


def test_several_seeds_draw_from_one_row_what_each_would_draw_alone() -> None:
    logits = random_logits(2)
    forked = make_entry(seeds=(4, 5, 6))
    neighbour = make_entry(seeds=(8,))
    first, second = sample(logits, forked, neighbour)
    assert first == [sample(logits[:1], make_entry(seeds=(seed,)))[0][0] for seed in (4, 5, 6)]
    assert len(second) == 1
    assert sample(logits[:1], make_entry(seeds=(4, 5, 6), temperature=0.0)) == [[int(logits[0].argmax())] * 3]


def test_philox_gives_the_published_known_answers() -> None:
    """Random123's known answers of philox4x32-10."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        words = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
        assert tuple(words[:, 0].tolist()) == expected


def test_uniform_numbers_lie_below_one_and_take_seeds_of_either_sign() -> None:
    numbers = uniforms(range(-5000, 5000), [17] * 10_000)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.01
    assert len(np.unique(numbers)) == 10_000
    assert uniforms([-1], [0])[0] == uniforms([2**64 - 1], [0])[0]


def test_a_row_that_is_not_finite_is_reported_and_its_neighbours_are_not_touched() -> None:
    """NUM-06: no token is made up from NaN or infinity."""
    logits = random_logits(5)
    entries = [make_entry(seeds=(row,), temperature=0.0 if row % 2 else 1.0) for row in range(5)]
    expected = sample(logits, *entries)
    logits[1, 7], logits[2, 0], logits[3, 299] = torch.nan, torch.inf, -torch.inf
    results = Sampler(VOCAB).sample(logits, entries)
    assert results[1] is None
    assert results[2] is None
    assert results[3] is None
    assert results[0] == (SampledToken(token_id=expected[0][0]),)
    assert results[4] == (SampledToken(token_id=expected[4][0]),)


def test_huge_finite_logits_are_not_taken_for_infinite_ones() -> None:
    logits = torch.full((1, VOCAB), 3e38)
    logits[0, 9] = 3.2e38
    assert sample(logits, make_entry(temperature=0.0), num_valid_ids=VOCAB) == [[9]]
    assert sample(logits, make_entry(temperature=1.0)) == [[9]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_padding_ids_of_a_wide_head_are_never_chosen_nor_counted(temperature: float) -> None:
    """MDL-07: 40 padding rows that would win are cut off before anything, the normalisation of logprobs included."""
    logits = random_logits(1, vocab=340)
    logits[:, 300:] += 50.0
    logits[0, 310] = torch.nan  # an untrained row may hold anything
    entry = make_entry(
        seeds=range(200),
        temperature=temperature,
        logprobs=20,
        logit_bias={305: 100.0},
        repetition_penalty=1.5,
        prompt=(333, 5),
        output=(),
    )
    (tokens,) = Sampler(300).sample(logits.clone(), [entry])
    assert tokens is not None
    assert all(token.token_id < 300 for token in tokens)
    assert all(token_id < 300 for token_id, _ in tokens[0].top)
    expected = torch.log_softmax(logits[0, :300], dim=0)
    assert tokens[0].logprob == pytest.approx(float(expected[tokens[0].token_id]), abs=1e-6)


def test_kernels_and_torch_draw_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Numba and a GPU follow the same definition; a number that falls between two shares' roundings would need luck."""
    logits = torch.randn(24, 3000, generator=torch.Generator().manual_seed(2)) * 3
    logits[5, 7] = torch.nan
    parameters: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"temperature": 0.3}, {"min_p": 0.1}, {"top_p": 0.8}, {"top_k": 9},
        {"logit_bias": {3: 5.0}}, {"temperature": 0, "logprobs": 2}, {"top_p": 0.95, "top_k": 50, "min_p": 0.02},
        {"top_p": 0.97, "temperature": 2.0},
    ]  # fmt: skip
    entries = [make_entry(seeds=(row, row + 100), **parameters[row % 10]) for row in range(24)]
    with_kernels = Sampler(2990).sample(logits.clone(), entries)
    monkeypatch.setattr(sampler, "row_kernels", lambda _: None)
    monkeypatch.setattr(drawing, "row_kernels", lambda _: None)
    assert Sampler(2990).sample(logits.clone(), entries) == with_kernels
    assert with_kernels[5] is None


def test_bfloat16_logits_are_sampled_as_their_float32_copies() -> None:
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(3)).bfloat16()
    parameters: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"top_p": 0.5}, {"presence_penalty": 1.0, "output": (1, 2)},
        {"logprobs": 3}, {"min_p": 0.2}, {"logit_bias": {1: 2.0}, "temperature": 0}, {"top_k": 2},
    ]  # fmt: skip
    entries = [make_entry(**each) for each in parameters]
    assert Sampler(500).sample(logits.clone(), entries) == Sampler(500).sample(logits.float(), entries)


def test_on_a_device_the_likeliest_ids_and_what_is_not_finite_come_over_together() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits[1, 7] = logits[1, 3] = 9.0
    logits[2, 5], logits[4, 0], logits[5, 1] = torch.nan, torch.inf, -torch.inf
    assert likeliest_on_device(logits) == likeliest(logits)
    assert likeliest_on_device(logits)[1:3] == [3, None]
