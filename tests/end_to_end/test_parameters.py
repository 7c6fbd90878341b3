"""Every sampling parameter shows its effect with a real model through every door: chat and completion, over HTTP, WebSocket and RPC.

What a parameter does in detail is the sampler's and the core's tests' matter; here a door that drops one, or an engine that ignores one, fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.end_to_end.tiny_service import CHAT_DOORS, COMPLETION_DOORS, DOORS, Outcome, TinyService, tiny_service

EOS, SECOND_EOS, TURN_START = 2, 4, 3  # ids of the tiny tokenizer; the first two end a text
WARM = {"temperature": 2.0, "seed": 11}

every_door = pytest.mark.parametrize("door", DOORS)


@pytest.fixture
async def service() -> AsyncIterator[TinyService]:
    async with tiny_service() as running:
        yield running


def force(token_id: int) -> dict[str, Any]:
    return {"logit_bias": {str(token_id): 100}}


@every_door
async def test_what_narrows_the_choice_to_one_is_greedy_at_any_temperature(service: TinyService, door: str) -> None:
    """SMP-13, SMP-01, SMP-15: top_k, top_p, min_p and a tiny temperature, each alone; without them the text is another."""
    greedy = await service.ask(door, ignore_eos=True)
    warm = await service.ask(door, ignore_eos=True, **WARM)
    assert warm.ids != greedy.ids
    for narrow in (
        {"top_k": 1},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"temperature": 1e-3},
        {"temperature": 1e-6},
        {"temperature": 1e-12},
    ):
        assert (await service.ask(door, ignore_eos=True, **{**WARM, **narrow})).ids == greedy.ids, narrow
    for wide in ({"top_k": 0}, {"top_k": -1}, {"top_k": 320}, {"top_k": 9_999_999}, {"top_p": 1}, {"min_p": 0}):
        assert (await service.ask(door, ignore_eos=True, **{**WARM, **wide})).ids == warm.ids, wide


@every_door
async def test_a_seed_decides_the_text_and_without_one_texts_vary(service: TinyService, door: str) -> None:
    """SMP-13."""

    async def ids(**fields: Any) -> list[int]:
        return (await service.ask(door, temperature=1, ignore_eos=True, **fields)).ids

    assert await ids(seed=5) == await ids(seed=5) != await ids(seed=6)
    assert await ids() != await ids()


@every_door
async def test_stop_strings_and_stop_ids_end_the_text(service: TinyService, door: str) -> None:
    """SMP-13: stop, include_stop_str_in_output, stop_token_ids."""
    whole = await service.ask(door, ignore_eos=True, max_tokens=24)
    text = whole.text.strip("\ufffd")
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = await service.ask(door, ignore_eos=True, max_tokens=24, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.reasons == ["stop"]
    assert len(cut.ids) < 24
    shown = await service.ask(door, ignore_eos=True, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert shown.text == cut.text + stop
    ended = await service.ask(door, ignore_eos=True, max_tokens=24, stop_token_ids=[whole.ids[7]])
    assert ended.ids == whole.ids[: whole.ids.index(whole.ids[7]) + 1]
    assert ended.reasons == ["stop"]


@every_door
async def test_a_bias_forces_and_forbids(service: TinyService, door: str) -> None:
    """SMP-13, SMP-03."""
    plain = await service.ask(door, ignore_eos=True)
    assert (await service.ask(door, **force(77))).ids == [77] * 12
    without = await service.ask(door, ignore_eos=True, logit_bias={str(plain.ids[0]): -100})
    assert plain.ids[0] not in without.ids
    refused = await service.ask(door, logit_bias={"320": 1, "5": 1})
    assert refused.error is not None
    assert (refused.error.code, refused.error.param) == ("invalid_request", "logit_bias")
    assert "320" in refused.error.message


@every_door
@pytest.mark.parametrize("eos", [EOS, SECOND_EOS])
async def test_no_end_of_text_comes_before_min_tokens_or_where_it_is_ignored(
    service: TinyService, door: str, eos: int
) -> None:
    """SMP-13, SMP-08, SMP-09: for each of the two ids that end a text."""
    at_once = await service.ask(door, max_tokens=30, **force(eos))
    assert (at_once.ids, at_once.text, at_once.reasons) == ([eos], "", ["stop"])
    later = await service.ask(door, max_tokens=30, min_tokens=20, **force(eos))
    assert (len(later.ids), later.ids[-1], later.reasons) == (21, eos, ["stop"])
    assert not {EOS, SECOND_EOS} & set(later.ids[:-1])
    ignored = await service.ask(door, max_tokens=30, ignore_eos=True, **force(eos))
    assert (ignored.ids, ignored.reasons) == ([eos] * 30, ["length"])
    own = await service.ask(door, max_tokens=30, ignore_eos=True, stop_token_ids=[eos], **force(eos))
    assert (own.ids, own.reasons) == ([eos], ["stop"])
    refused = await service.ask(door, max_tokens=5, min_tokens=6)
    assert refused.error is not None
    assert refused.error.param == "min_tokens"


@every_door
async def test_penalties_change_what_is_repeated(service: TinyService, door: str) -> None:
    """SMP-13: each of the three, against a bias that makes one token come again and again."""
    for bias, penalty in (
        (12, {"frequency_penalty": 2}),
        (5, {"presence_penalty": 2}),
        (5, {"repetition_penalty": 10}),
    ):
        fields = {"logit_bias": {"77": bias}, "ignore_eos": True, "max_tokens": 20}
        plain = await service.ask(door, **fields)
        damped = await service.ask(door, **fields, **penalty)
        assert 0 < damped.ids.count(77) < plain.ids.count(77), penalty


@every_door
async def test_the_number_of_tokens_and_of_choices(service: TinyService, door: str) -> None:
    """SMP-13, SMP-14: max_tokens by both names, n with one text, one end and one seed for each choice."""
    for name in ("max_tokens", "max_completion_tokens"):
        asked = await service.ask(door, ignore_eos=True, **{"max_tokens": None, name: 5})
        assert (len(asked.ids), asked.num_completion_tokens, asked.reasons) == (5, 5, ["length"])
    alone = await service.ask(door, ignore_eos=True, **WARM)
    several = await service.ask(door, ignore_eos=True, n=3, **WARM)
    assert len({tuple(ids) for ids in several.token_ids}) == 3
    assert several.token_ids[0] == alone.ids
    assert several.reasons == ["length"] * 3
    assert several.num_completion_tokens == 36
    assert len(several.prompt_ids) == len(alone.prompt_ids)


@every_door
async def test_control_tokens_are_shown_on_request(service: TinyService, door: str) -> None:
    """SMP-13: skip_special_tokens."""
    hidden = await service.ask(door, max_tokens=2, **force(TURN_START))
    shown = await service.ask(door, max_tokens=2, skip_special_tokens=False, **force(TURN_START))
    assert (hidden.text, shown.text) == ("", "<|im_start|>" * 2)


@every_door
async def test_logprobs_come_for_every_token_on_request(service: TinyService, door: str) -> None:
    """SMP-13."""
    wanted = {"logprobs": True, "top_logprobs": 2} if door in CHAT_DOORS else {"logprobs": 2}
    assert (await service.ask(door)).num_logprobs == [0]
    assert (await service.ask(door, ignore_eos=True, **wanted)).num_logprobs == [12]


@pytest.mark.parametrize("doors", [CHAT_DOORS, COMPLETION_DOORS])
async def test_the_same_fields_give_the_same_answer_on_every_wire(service: TinyService, doors: tuple[str, ...]) -> None:
    """SMP-13: all at once, drawn, with choices that end at different times."""
    fields = {
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.97,
        "min_p": 0.001,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {"90": 2.5, "4": 1},
        "seed": -3,
        "n": 3,
        "stop": ["e"],
        "min_tokens": 2,
        "max_tokens": 30,
    }
    outcomes: list[Outcome] = [await service.ask(door, **fields) for door in doors]
    assert outcomes[0].error is None
    for other in outcomes[1:]:
        assert other == outcomes[0]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"chat_template": "{{ 'x' }}"}, "chat_template"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 65}, "n"),
    ({"n": 10**6}, "n"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
]


@every_door
async def test_what_is_not_offered_or_out_of_bounds_is_refused_on_every_wire(service: TinyService, door: str) -> None:
    """SMP-01, SMP-02, SMP-13, SMP-15, SCH-06, TOK-09: the field is named, and the next request works."""
    for fields, param in REFUSED:
        refused = await service.ask(door, **fields)
        assert refused.error is not None, fields
        assert (refused.error.code, refused.error.param) == ("invalid_request", param)
        assert len((await service.ask(door, max_tokens=1)).ids) == 1
