"""`/v1/completions`: echo, logprobs, several prompts and choices, streamed and whole."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from service.errors import ContextTooLong, QueueFull
from service.messages import Delta, Finished, GenerateRequest, Started, TokenLogprob, TopToken, Usage
from tests.transports.conftest import Running, serving
from tests.transports.fake_engine import MODEL, FakeEngine, spoken

COMPLETIONS = "/v1/completions"
MATRIX = list(itertools.product([False, True], [None, 0, 1], [0, 1, 20]))


@pytest.mark.parametrize(("echo", "logprobs", "max_tokens"), MATRIX)
async def test_every_corner_of_echo_logprobs_and_max_tokens_says_the_same_streamed_and_whole(
    running: Running, echo: bool, logprobs: int | None, max_tokens: int
) -> None:
    """SMP-10: all 36; max_tokens 0 without echo is refused."""
    body = {"prompt": "Say hello", "echo": echo, "logprobs": logprobs, "max_tokens": max_tokens}
    status, whole = await running.post(COMPLETIONS, body)
    if max_tokens == 0 and not echo:
        assert status == 400
        assert whole["error"]["param"] == "max_tokens"
        assert (await running.post(COMPLETIONS, {**body, "stream": True}))[0] == 400
        return
    assert status == 200
    events = await running.sse(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events
    assert done == "[DONE]"
    pieces = [chunk["choices"][0] for chunk in chunks]
    choice = whole["choices"][0]
    expected = ("Say hello" if echo else "") + {0: "", 1: "Hello", 20: "Hello, world"}[max_tokens]
    assert choice["text"] == expected
    assert "".join(piece["text"] for piece in pieces) == expected
    reason = "stop" if max_tokens == 20 else "length"
    assert choice["finish_reason"] == reason
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [reason]
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == {0: 0, 1: 1, 20: 3}[max_tokens]
    if logprobs is None:
        assert choice["logprobs"] is None
        assert all(piece["logprobs"] is None for piece in pieces)
        return
    tokens = (["Say", " hello"] if echo else []) + ["Hello", ",", " world"][:max_tokens]
    assert choice["logprobs"]["tokens"] == tokens
    assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == len(tokens)
    if echo:
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][0] is None
    for token, tops in zip(tokens[echo:], choice["logprobs"]["top_logprobs"][echo:], strict=True):
        assert token in tops  # the one taken is always told
        assert len(tops) == logprobs + 1
    for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for piece in pieces for item in (piece["logprobs"] or {}).get(part, [])]
        assert streamed == choice["logprobs"][part]


async def test_echo_of_token_ids_returns_their_text(running: Running) -> None:
    _, body = await running.post(COMPLETIONS, {"prompt": [5, 6], "echo": True, "max_tokens": 1})
    assert body["choices"][0]["text"] == "t5 t6Hello"


async def test_several_prompts_number_their_choices_through(running: Running) -> None:
    running.engine.script = lambda request: spoken(request, [str(request.prompt), "!"])
    _, body = await running.post(COMPLETIONS, {"prompt": ["a", "b c"], "n": 2})
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "a!#0"),
        (1, "a!#1"),
        (2, "b c!#0"),
        (3, "b c!#1"),
    ]
    assert body["usage"]["prompt_tokens"] == 3  # each prompt once
    assert body["usage"]["completion_tokens"] == 8
    events = await running.sse(COMPLETIONS, {"prompt": [[1], [2, 3]], "n": 2})
    texts: dict[int, str] = {}
    for event in events[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "(1,)!#0", 1: "(1,)!#1", 2: "(2, 3)!#0", 3: "(2, 3)!#1"}


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ({}, "prompt"),
        (5, "prompt"),
        ([[]], "prompt[0]"),
        (["a", 5], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([[1], [2, 1.5]], "prompt[1][1]"),
        ([True], "prompt[0]"),
        ([2**31], "prompt[0]"),
        (["x"] * 65, "prompt"),
    ],
)
async def test_a_bad_prompt_is_refused_by_its_path(running: Running, prompt: object, param: str) -> None:
    status, body = await running.post(COMPLETIONS, {"prompt": prompt})
    assert status == 400
    assert body["error"]["param"] == param
    assert running.engine.requests == []


async def test_prompts_times_n_is_bounded(running: Running) -> None:
    """SCH-06."""
    status, body = await running.post(COMPLETIONS, {"prompt": ["x"] * 3, "n": 64})
    assert (status, body["error"]["param"]) == (400, "n")
    assert "128" in body["error"]["message"]


@pytest.mark.parametrize("n", [129, 512, 10**6])
async def test_n_above_the_limit_is_refused_at_once(running: Running, n: int) -> None:
    """SCH-06."""
    status, body = await running.post(COMPLETIONS, {"prompt": "x", "n": n})
    assert (status, body["error"]["param"]) == (400, "n")
    assert running.engine.requests == []


async def test_when_one_prompt_is_refused_the_others_are_aborted() -> None:
    never = asyncio.Event()

    def script(request: GenerateRequest) -> Any:
        return [ContextTooLong("too long", param="prompt")] if request.prompt == "bad" else [never]

    async with serving(FakeEngine(script)) as running:
        status, body = await running.post(COMPLETIONS, {"prompt": ["good", "bad", "good"]})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        await running.engine.until(lambda engine: engine.num_running == 0)
        assert running.engine.num_aborted == 2


async def test_choices_that_end_at_different_times_each_end_once(running: Running) -> None:
    """SMP-14: indices 0..2 present, one finish reason each, also streamed."""

    def script(request: GenerateRequest) -> Any:
        yield [Started(request_id="r", prompt_token_ids=(1, 2))]
        yield [Delta(index=1, text="b", token_ids=(1,), finish_reason="stop", stop_reason="\n")]
        yield [Delta(index=0, text="a", token_ids=(2,)), Delta(index=2, text="c", token_ids=(3,))]
        yield [Delta(index=2, text="c", token_ids=(4,), finish_reason="length")]
        yield [Delta(index=0, text="a", token_ids=(5,), finish_reason="stop", stop_reason=7)]
        yield [Finished(usage=Usage(prompt_tokens=2, completion_tokens=5))]

    running.engine.script = script
    _, whole = await running.post(COMPLETIONS, {"prompt": "x", "n": 3})
    told = [(c["index"], c["text"], c["finish_reason"], c.get("stop_reason")) for c in whole["choices"]]
    assert told == [(0, "aa", "stop", 7), (1, "b", "stop", "\n"), (2, "cc", "length", None)]
    assert whole["usage"]["completion_tokens"] == 5
    events = await running.sse(COMPLETIONS, {"prompt": "x", "n": 3})
    ends = [e["choices"][0]["index"] for e in events[:-1] if e["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


async def test_token_ids_are_returned_on_request_under_the_names_vllm_uses(running: Running) -> None:
    _, completion = await running.post(COMPLETIONS, {"prompt": [7, 8], "return_token_ids": True})
    assert completion["choices"][0]["prompt_token_ids"] == [7, 8]
    assert completion["choices"][0]["token_ids"] == [0, 1, 2]
    chat = {"messages": [{"role": "user", "content": "a b"}], "return_token_ids": True}
    _, answer = await running.post("/v1/chat/completions", chat)
    assert answer["prompt_token_ids"] == [100, 101]
    assert answer["choices"][0]["token_ids"] == [0, 1, 2]
    chunks = (await running.sse("/v1/chat/completions", chat))[:-1]
    assert chunks[0]["prompt_token_ids"] == [100, 101]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [0, 1, 2]
    chunks = (await running.sse(COMPLETIONS, {"prompt": [7, 8], "return_token_ids": True}))[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [7, 8]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [0, 1, 2]
    _, plain = await running.post(COMPLETIONS, {"prompt": [7, 8]})
    assert "token_ids" not in plain["choices"][0]


async def test_logprobs_inside_a_character_are_named_apart_and_offsets_count_characters(running: Running) -> None:
    """SMP-11 and the older format: two halves of é, and the floor for an impossible value."""
    first = TokenLogprob(
        token_id=1,
        text="\ufffd",
        raw=b"\xc3",
        logprob=-0.5,
        top=(
            TopToken(token_id=1, text="\ufffd", raw=b"\xc3", logprob=-0.5),
            TopToken(token_id=2, text="\ufffd", raw=b"\xa9", logprob=-9999.0),
        ),
    )
    second = TokenLogprob(token_id=2, text="\ufffd", raw=b"\xa9", logprob=-0.5)
    third = TokenLogprob(token_id=3, text="x", raw=b"x", logprob=-0.5)

    def script(request: GenerateRequest) -> Any:
        yield [Started(request_id="r", prompt_token_ids=(1,))]
        yield [Delta(index=0, text="", token_ids=(1,), logprobs=(first,))]
        text = Delta(index=0, text="éx", token_ids=(2, 3), logprobs=(second, third), finish_reason="stop")
        yield [text]
        yield [Finished(usage=Usage(prompt_tokens=1, completion_tokens=3))]

    running.engine.script = script
    _, body = await running.post(COMPLETIONS, {"prompt": "x", "logprobs": 2})
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert logprobs["text_offset"] == [0, 0, 1]
    assert logprobs["top_logprobs"][0] == {"bytes:\\xc3": -0.5, "bytes:\\xa9": -9999.0}
    chunks = (await running.sse(COMPLETIONS, {"prompt": "x", "logprobs": 2}))[:-1]
    assert [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]] == [0, 0, 1]


async def test_a_full_queue_is_a_429_that_says_to_try_again(running: Running) -> None:
    running.engine.script = lambda request: [QueueFull("1024 requests wait")]
    async with running.http.post(COMPLETIONS, json={"prompt": "x", "stream": True}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["code"] == "queue_full"


async def test_the_model_may_be_left_out_and_another_is_not_found(running: Running) -> None:
    assert (await running.post(COMPLETIONS, {"prompt": "x", "model": MODEL}))[0] == 200
    assert (await running.post(COMPLETIONS, {"prompt": "x", "model": None}))[0] == 200
    status, body = await running.post(COMPLETIONS, {"prompt": "x", "model": "other"})
    assert (status, body["error"]["param"]) == (404, "model")
