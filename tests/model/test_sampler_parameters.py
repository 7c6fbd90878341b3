"""What each sampling parameter does, at its edges."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from service.engine.batch import SampledToken, StepEntry
from service.model.logprobs import LOGPROB_FLOOR
from service.model.sampler import Sampler
from tests.model.steps import make_entry

VOCAB = 200


def random_row(seed: int = 1, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def tokens_of(logits: torch.Tensor, entry: StepEntry) -> tuple[SampledToken, ...]:
    (result,) = Sampler(logits.shape[1]).sample(logits.clone(), [entry])
    assert result is not None
    return result


def ids_of(logits: torch.Tensor, **arguments: Any) -> list[int]:
    return [token.token_id for token in tokens_of(logits, make_entry(**{"seeds": range(200), **arguments}))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6, 1e-12])
def test_a_tiny_temperature_is_greedy_alone_and_beside_a_warm_row(temperature: float, dtype: torch.dtype) -> None:
    """SMP-01: also with the logits of a model that computes in half precision."""
    logits = torch.cat([random_row(), random_row(2)]) * 10
    logits[0, 42] = logits[0].max() + 1.0  # a lead that survives the rounding; a tie would be a draw at any temperature
    logits = logits.to(dtype).float()
    tiny, warm = make_entry(temperature=temperature, seeds=range(50)), make_entry(temperature=1.0)
    expected = (SampledToken(token_id=42),) * 50
    assert Sampler(VOCAB).sample(logits[:1].clone(), [tiny]) == [expected]
    assert Sampler(VOCAB).sample(logits.clone(), [tiny, warm])[0] == expected
    assert Sampler(VOCAB).sample(logits.flip(0), [warm, tiny])[1] == expected


def test_a_tiny_temperature_survives_logits_that_would_overflow() -> None:
    """SMP-01: 1e4 / 1e-4 in float16 would be infinite; the largest is taken off first and all is float32."""
    logits = torch.tensor([[60000.0, 59000.0, -60000.0]])
    assert set(ids_of(logits, temperature=1.1e-5)) == {0}


def test_top_k_of_0_and_minus_1_and_above_the_vocabulary_are_off_and_1_is_greedy() -> None:
    """SMP-02."""
    logits = random_row(spread=0.5)
    off = ids_of(logits, temperature=2.0)
    assert len(set(off)) > 50
    for top_k in (0, -1, VOCAB, VOCAB + 1, 9_999_999):
        assert ids_of(logits, temperature=2.0, top_k=top_k) == off
    assert set(ids_of(logits, temperature=2.0, top_k=1)) == {int(logits.argmax())}


def test_top_k_chooses_only_among_the_k_likeliest_and_reaches_all_of_them() -> None:
    logits = random_row(spread=0.3)
    assert set(ids_of(logits, top_k=5, temperature=2.0)) == set(logits[0].topk(5).indices.tolist())


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1e-4])
@pytest.mark.parametrize("more", [{}, {"top_k": 1}, {"temperature": 2.0}, {"min_p": 1.0}, {"top_k": 50}])
def test_a_tiny_top_p_keeps_the_likeliest_id(top_p: float, more: dict[str, Any]) -> None:
    """SMP-15: the set of candidates is never empty."""
    logits = random_row()
    assert set(ids_of(logits, top_p=top_p, **more)) == {int(logits.argmax())}


def test_top_p_of_1_and_min_p_of_0_are_off_and_min_p_of_1_leaves_the_likeliest() -> None:
    """SMP-15."""
    logits = random_row()
    off = ids_of(logits)
    assert ids_of(logits, top_p=1.0, min_p=0.0) == off
    assert len(set(off)) > 10
    assert set(ids_of(logits, min_p=1.0, temperature=2.0)) == {int(logits.argmax())}


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]))
    assert set(ids_of(logits, top_p=0.55)) == {0, 1}
    assert set(ids_of(logits, top_p=0.55, top_k=2)) == {0}  # 0.4 of 0.6 is enough


def test_min_p_is_relative_to_the_likeliest_id() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.26, 0.24]]))
    assert set(ids_of(logits, min_p=0.5)) == {0, 1}
    assert set(ids_of(logits, min_p=0.5, top_k=3)) == {0, 1}


def test_a_bias_of_100_forces_and_of_minus_100_forbids_an_id() -> None:
    """SMP-03: and an id that does not exist harms neither the row nor the step (the edge refuses it)."""
    logits = random_row()
    likeliest = int(logits.argmax())
    assert set(ids_of(logits, logit_bias={17: 100.0})) == {17}
    assert likeliest not in ids_of(logits, logit_bias={likeliest: -100.0})
    plain = ids_of(logits)
    assert ids_of(logits, logit_bias={VOCAB: 100.0, 10**9: 100.0, -1: 100.0}) == plain


def test_presence_and_frequency_look_at_generated_tokens_only() -> None:
    """SMP-06: a prompt that repeats one id eight times changes nothing for its first token."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 5.0, 4.0
    prompt = (3,) * 8
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert ids_of(logits, prompt=prompt, output=(), **penalty) == ids_of(logits)
        assert ids_of(logits, temperature=0.0, prompt=prompt, output=(), seeds=(1,), **penalty) == [3]
        assert ids_of(logits, temperature=0.0, prompt=prompt, output=(3,), seeds=(1,), **penalty) == [4]


def test_frequency_counts_and_presence_does_not() -> None:
    """SMP-06."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 5.0, 2.5
    for output, expected in (((3,), 3), ((3, 3), 3), ((3, 3, 3), 4)):
        assert ids_of(logits, temperature=0.0, seeds=(1,), prompt=(), output=output, frequency_penalty=1.0) == [
            expected
        ]
    assert ids_of(logits, temperature=0.0, seeds=(1,), prompt=(), output=(3,) * 50, presence_penalty=2.0) == [3]


def test_repetition_acts_on_prompt_and_output_and_on_either_sign() -> None:
    """SMP-06: positive logits are divided, negative ones multiplied, once however often the id occurs."""
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, 3], logits[0, 4], logits[0, 5] = 3.0, 2.0, 1.6
    greedy = {"temperature": 0.0, "seeds": (1,), "repetition_penalty": 2.0}
    assert ids_of(logits, prompt=(3,) * 8, output=(), **greedy) == [4]
    assert ids_of(logits, prompt=(3,), output=(4,), **greedy) == [5]
    negative = torch.full((1, VOCAB), -50.0)
    negative[0, 3], negative[0, 4] = -1.0, -1.5
    assert ids_of(negative, prompt=(3,), output=(), **greedy) == [4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_id_is_chosen_before_min_tokens_whatever_its_bias(temperature: float) -> None:
    """SMP-08: every end id is suppressed, the request's stop ids too, and from min_tokens on none is."""
    logits = random_row()
    for forced in (11, 12, 13):
        arguments: dict[str, Any] = {
            "temperature": temperature,
            "eos_ids": (11, 12),
            "stop_token_ids": [13],
            "min_tokens": 20,
            "logit_bias": {forced: 100.0},
        }
        for num_output_tokens in (0, 19):
            assert not {11, 12, 13} & set(ids_of(logits, num_output_tokens=num_output_tokens, **arguments))
        assert set(ids_of(logits, num_output_tokens=20, **arguments)) == {forced}


def test_min_tokens_never_forbids_every_id() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert ids_of(logits, min_tokens=5, eos_ids=(0,), stop_token_ids=[1], temperature=0.0, seeds=(1,)) == [1]
    assert ids_of(logits, min_tokens=5, eos_ids=(1,), temperature=0.0, seeds=(1,)) == [0]


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 1},
        {"temperature": 0.0},
        {"top_p": 0.01},
        {"logit_bias": dict.fromkeys(range(150), -100.0)},
        {"temperature": 0.1, "repetition_penalty": 5.0, "presence_penalty": 2.0, "prompt": (1, 2), "output": (3,)},
    ],
)
def test_logprobs_are_those_of_the_raw_logits_and_strict_json(more: dict[str, Any]) -> None:
    """SMP-11: filters, bias, penalties and temperature change what is chosen, not what is reported."""
    logits = random_row()
    expected = torch.log_softmax(logits[0].double(), dim=0)
    likeliest = expected.topk(5)
    for token in tokens_of(logits, make_entry(seeds=range(5), logprobs=5, **more)):
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
        assert [token_id for token_id, _ in token.top] == likeliest.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(likeliest.values.tolist(), abs=1e-5)
        json.dumps([token.logprob, token.top], allow_nan=False)


def test_an_impossible_logprob_is_the_floor() -> None:
    """SMP-11."""
    logits = torch.tensor([[3e38, 0.0, -3e38]])
    (token,) = tokens_of(logits, make_entry(logprobs=3, logit_bias={1: 1.0}, temperature=0.0))
    assert token.top == ((0, 0.0), (1, LOGPROB_FLOOR), (2, LOGPROB_FLOOR))


def test_logprobs_of_0_reports_the_chosen_token_alone_and_none_reports_nothing() -> None:
    logits = random_row()
    (bare,) = tokens_of(logits, make_entry(logprobs=0))
    assert bare.logprob is not None
    assert bare.top == ()
    (without,) = tokens_of(logits, make_entry())
    assert (without.logprob, without.top) == (None, ())
    assert without.token_id == bare.token_id


def test_alternatives_with_equal_logits_come_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    (token,) = tokens_of(logits, make_entry(logprobs=20, temperature=0.0))
    assert token.token_id == 0
    assert [token_id for token_id, _ in token.top] == list(range(20))


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 0.2},
        {"min_p": 0.9},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 4.0},
        {"logit_bias": {9: 100.0}},
        {"min_tokens": 5},
        {"seeds": range(500, 700)},
    ],
)
def test_every_parameter_has_an_effect(changed: dict[str, Any]) -> None:
    """SMP-13: a parameter that is accepted is applied."""
    logits = random_row()
    likely: list[int] = logits[0].topk(4).indices.tolist()
    history: dict[str, Any] = {"prompt": (), "output": tuple(likely), "eos_ids": tuple(likely)}
    assert ids_of(logits, **history, **changed) != ids_of(logits, **history)
