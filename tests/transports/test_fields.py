"""What a parameter means, on every front end: HTTP chat and completions, WebSocket, RPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from service.messages import GenerateRequest
from tests.transports.conftest import Running, rpc_serving, serving, strict
from tests.transports.fake_engine import FakeEngine
from tests.transports.wires import RpcWire

CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}

# Every odd value as JSON text. NaN is no JSON, and 1e400 is beyond a double.
VALUES = {
    "null": "null",
    "text": '"5"',
    "5.0": "5.0",
    "5.5": "5.5",
    "true": "true",
    "[]": "[]",
    "{}": "{}",
    "-1": "-1",
    "0": "0",
    "5": "5",
    "1e400": "1e400",
    "NaN": "NaN",
    "2**63": str(2**63),
}

# The values that each field takes; all others are refused. 5.0 is refused where a whole number is expected.
SHARED = {
    "max_tokens": {"null", "5"},
    "max_completion_tokens": {"null", "5"},
    "min_tokens": {"null", "0", "5"},
    "n": {"null", "5"},
    "temperature": {"null", "0"},
    "top_p": {"null", "0"},
    "min_p": {"null", "0"},
    "top_k": {"null", "-1", "0", "5"},
    "presence_penalty": {"null", "-1", "0"},
    "frequency_penalty": {"null", "-1", "0"},
    "repetition_penalty": {"null", "5", "5.0", "5.5"},
    "seed": {"null", "-1", "0", "5"},
    "stop": {"null", "text", "[]"},
    "stop_token_ids": {"null", "[]"},
    "logit_bias": {"null", "{}"},
    "include_stop_str_in_output": {"null", "true"},
    "ignore_eos": {"null", "true"},
    "skip_special_tokens": {"null", "true"},
    "priority": {"null", "-1", "0", "5"},
    "user": {"null", "text"},
    "tools": {"null", "[]"},
    "response_format": {"null"},
    "model": {"null"},
    "prompt_logprobs": {"null", "0", "5"},
}
CHAT_ONLY = {"logprobs": {"null", "true"}, "top_logprobs": {"null"}, "messages": set[str](), "prompt": {"null"}}
COMPLETION_ONLY = {
    "logprobs": {"null", "0", "5"},
    "echo": {"null", "true"},
    "add_special_tokens": {"null", "true"},
    "parse_special": {"null", "true"},
    "prompt": {"text"},
    "messages": {"null"},
}
HTTP_ONLY = {"stream": {"null", "true"}, "stream_options": {"null"}, "return_token_ids": {"null", "true"}}


def table(*parts: dict[str, set[str]]) -> list[tuple[str, str, bool]]:
    """Every (field, value, whether it is taken)."""
    fields = {name: taken for part in parts for name, taken in part.items()}
    return [(name, value, value in taken) for name, taken in fields.items() for value in VALUES]


def raw(base: dict[str, Any], field: str, value: str) -> str:
    """Write `base` as JSON with one field more, or another value for it."""
    parts = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in base.items() if key != field]
    return "{" + ", ".join([*parts, f'"{field}": {VALUES[value]}']) + "}"


def check(field: str, value: str, is_taken: bool, error: dict[str, Any] | None) -> None:
    """Compare an outcome with the table: a refusal names the field, or says that the text is no JSON."""
    if is_taken:
        assert error is None, (field, value, error)
        return
    assert error is not None, f"{field} took {value}"
    is_syntax = value in ("1e400", "NaN") and "not valid JSON" in error["message"]
    assert is_syntax or (error["param"] or "").startswith(field), (field, value, error)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_every_field_takes_its_values_over_http_and_refuses_all_others_by_name(
    running: Running, is_chat: bool
) -> None:
    """API-10: the whole table, on one kept-alive connection."""
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    shared = {name: taken for name, taken in SHARED.items() if name != "prompt_logprobs"}
    for field, value, is_taken in table(shared, CHAT_ONLY if is_chat else COMPLETION_ONLY, HTTP_ONLY):
        body = raw(CHAT if is_chat else COMPLETION, field, value)
        headers = {"Content-Type": "application/json"}
        async with running.http.post(path, data=body, headers=headers) as response:
            text = await response.text()
            assert response.status in (200, 400, 404), (field, value, text)
            assert (response.status == 404) == (field == "model" and value == "text")
            check(field, value, is_taken, None if response.status == 200 else strict(text)["error"])


@pytest.mark.parametrize("is_chat", [False, True])
async def test_every_field_takes_the_same_values_over_the_websocket(running: Running, is_chat: bool) -> None:
    """API-10, SMP-13."""
    base = {"type": "chat", "id": "a", **CHAT} if is_chat else {"type": "completion", "id": "a", **COMPLETION}
    async with running.http.ws_connect("/ws") as socket:
        for field, value, is_taken in table(SHARED, CHAT_ONLY if is_chat else COMPLETION_ONLY):
            await socket.send_str(raw(base, field, value))
            check(field, value, is_taken, await last_message(socket))


@pytest.mark.parametrize("is_chat", [False, True])
async def test_every_field_takes_the_same_values_over_rpc(address: str, is_chat: bool) -> None:
    """API-10, SMP-13: NaN and infinity are real floats here."""
    values = {name: json.loads(text) for name, text in VALUES.items()}
    base: dict[str, Any] = CHAT if is_chat else COMPLETION
    fields = table(SHARED, CHAT_ONLY if is_chat else COMPLETION_ONLY)
    async with rpc_serving(FakeEngine(), address) as server, RpcWire(server.address) as wire:
        for number, (field, value, is_taken) in enumerate(fields):
            # Both kinds are one method here, and a request without prompt and messages is refused for the first.
            is_about_kind = field in ("messages", "prompt") and value in ("null", "text")
            if is_about_kind or (field in ("messages", "prompt") and field not in base):
                continue
            reply = await wire.ask(id=number, method="generate", params={**base, field: values[value]})
            assert reply["id"] == number
            check(field, value, is_taken, reply.get("error"))


async def last_message(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any] | None:
    """Read until an answer ends; returns its error, if it has one."""
    while True:
        message = strict((await socket.receive(timeout=10)).data)
        if message["type"] == "failed":
            return dict(message)
        if message["type"] == "finished":
            return None


# For each field a value that is not the default, and how it must reach the engine.
EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (7, {"max_tokens": 7}),
    "max_completion_tokens": (7, {"max_tokens": 7}),
    "min_tokens": (3, {"min_tokens": 3}),
    "n": (2, {"n": 2}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (1, {"top_k": 1}),
    "top_p": (0.25, {"top_p": 0.25}),
    "min_p": (0.1, {"min_p": 0.1}),
    "presence_penalty": (1, {"presence_penalty": 1.0}),
    "frequency_penalty": (-1.5, {"frequency_penalty": -1.5}),
    "repetition_penalty": (1.25, {"repetition_penalty": 1.25}),
    "logit_bias": ({"17": -100, "4": 2.5}, {"logit_bias": {17: -100.0, 4: 2.5}}),
    "seed": (-12, {"seed": -12}),
    "stop": (["a", "b"], {"stop": ("a", "b")}),
    "stop_token_ids": ([3, 4], {"stop_token_ids": (3, 4)}),
    "include_stop_str_in_output": (True, {"include_stop_str_in_output": True}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
}


@asynccontextmanager
async def front_ends(engine: FakeEngine) -> AsyncIterator[dict[str, Any]]:
    """All the doors to one engine, as functions that send fields."""
    async with (
        serving(engine) as http,
        rpc_serving(engine, "tcp:127.0.0.1:0") as rpc,
        RpcWire(rpc.address) as wire,
        http.http.ws_connect("/ws") as socket,
    ):
        call_ids = iter(range(1000))

        async def over_chat(fields: dict[str, Any]) -> None:
            assert (await http.post("/v1/chat/completions", {**CHAT, **fields}))[0] == 200

        async def over_completions(fields: dict[str, Any]) -> None:
            assert (await http.post("/v1/completions", {**COMPLETION, **fields}))[0] == 200

        async def over_websocket(fields: dict[str, Any]) -> None:
            await socket.send_json({"type": "chat", "id": "a", **CHAT, **fields})
            assert await last_message(socket) is None

        async def over_rpc(fields: dict[str, Any]) -> None:
            reply = await wire.ask(id=next(call_ids), method="generate", params={**COMPLETION, **fields})
            assert "error" not in reply

        yield {"chat": over_chat, "completions": over_completions, "ws": over_websocket, "rpc": over_rpc}


async def test_every_sampling_field_reaches_the_engine_alike_from_every_front_end() -> None:
    """SMP-13."""
    engine = FakeEngine()
    async with front_ends(engine) as doors:
        for field, (value, effect) in EFFECTS.items():
            for name, send in doors.items():
                await send({field: value})
                sampling = msgspec.structs.asdict(engine.requests[-1].sampling)
                assert {key: sampling[key] for key in effect} == effect, (field, name)
                default = msgspec.structs.asdict(GenerateRequest(request_id="").sampling)
                assert {key for key in sampling if sampling[key] != default[key]} == set(effect), (field, name)


async def test_a_priority_reaches_the_engine_from_every_front_end_and_has_bounds() -> None:
    """SCH-04, SMP-13: what it does there is the scheduler's tests' matter."""
    engine = FakeEngine()
    async with front_ends(engine) as doors:
        for name, send in doors.items():
            for priority in (-1000, 3, None):
                await send({"priority": priority})
                assert engine.requests[-1].priority == (priority or 0), name
            with pytest.raises(AssertionError):
                await send({"priority": 1001})


@pytest.mark.parametrize(
    ("top_k", "is_taken"), [(0, True), (-1, True), (1, True), (9999999, True), (-2, False), (1.5, False)]
)
async def test_top_k_has_the_same_edges_everywhere(running: Running, top_k: float, is_taken: bool) -> None:
    """SMP-02: 0 and -1 are off, far above the vocabulary is off, -2 and 1.5 are refused."""
    status, body = await running.post("/v1/completions", {"prompt": "x", "top_k": top_k})
    assert status == (200 if is_taken else 400)
    if is_taken:
        assert running.engine.requests[-1].sampling.top_k == top_k
    else:
        assert body["error"]["param"] == "top_k"


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"abc": 1, "3": 1}, "abc"),
        ({"1.0": 1}, "1.0"),
        ({"-1": 1}, "-1"),
        ({"01": 1}, "01"),
        ({"": 1}, "''"),
        ({"9" * 400: 1}, "9" * 40),
        ({str(2**31): 1}, str(2**31)),
        ({"3": 101}, "logit_bias.3"),
        ({"3": -101}, "logit_bias.3"),
        ({"3": "x"}, "logit_bias.3"),
        ({"3": None}, "logit_bias.3"),
        ({"3": True}, "logit_bias.3"),
        ([], "logit_bias"),
    ],
)
async def test_a_bad_logit_bias_is_refused_naming_the_key(running: Running, bias: object, named: str) -> None:
    """SMP-03."""
    status, body = await running.post("/v1/completions", {"prompt": "x", "logit_bias": bias})
    assert status == 400
    assert body["error"]["param"].startswith("logit_bias")
    assert named in body["error"]["message"]
    assert running.engine.requests == []


async def test_the_two_names_of_the_token_limit_agree_or_are_refused(running: Running) -> None:
    """API-13: default None lets the engine take the rest of the context."""
    path, chat = "/v1/chat/completions", CHAT
    assert (await running.post(path, {**chat, "max_completion_tokens": 5}))[0] == 200
    assert running.engine.requests[-1].sampling.max_tokens == 5
    assert (await running.post(path, {**chat, "max_completion_tokens": 5, "max_tokens": 5}))[0] == 200
    status, body = await running.post(path, {**chat, "max_completion_tokens": 5, "max_tokens": 6})
    assert (status, body["error"]["param"]) == (400, "max_completion_tokens")
    assert (await running.post(path, {**chat, "max_completion_tokens": None, "max_tokens": None}))[0] == 200
    assert running.engine.requests[-1].sampling.max_tokens is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("best_of", 3),
        ("best_of", True),
        ("suffix", "end"),
        ("modalities", ["text", "audio"]),
    ],
)
async def test_what_is_not_offered_is_refused_rather_than_ignored(running: Running, field: str, value: object) -> None:
    status, body = await running.post("/v1/chat/completions", {**CHAT, field: value})
    assert (status, body["error"]["param"]) == (400, field)
    assert "not offered" in body["error"]["message"]


async def test_neutral_values_of_what_is_not_offered_are_taken(running: Running) -> None:
    neutral = {"response_format": {"type": "text"}, "tools": [], "user": "u", "store": False, "metadata": None}
    assert (await running.post("/v1/chat/completions", {**CHAT, **neutral}))[0] == 200


@pytest.mark.parametrize("field", ["temprature", "max_token", "stream_option", "__class__", "", "a.b"])
async def test_an_unknown_field_is_refused_by_name(running: Running, field: str) -> None:
    status, body = await running.post("/v1/chat/completions", {**CHAT, field: 1})
    assert (status, body["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {}}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "text": "a"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}, "messages[1].content[1].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
        ({"content": "a"}, "messages[1].role"),
        ({"role": "", "content": "a"}, "messages[1].role"),
        ({"role": "user", "content": "a", "colour": 1}, "messages[1].colour"),
        ("hello", "messages[1]"),
        (None, "messages[1]"),
    ],
)
async def test_a_bad_message_is_refused_by_its_path(running: Running, message: object, param: str) -> None:
    """TOK-07."""
    body = {"messages": [{"role": "user", "content": "fine"}, message]}
    status, answer = await running.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert running.engine.requests == []


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
async def test_text_parts_and_null_with_tool_calls_reach_the_engine_for_every_role(running: Running, role: str) -> None:
    """TOK-07: parts arrive as given; null content is kept beside tool calls."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": role, "content": parts},
        {"role": role, "content": ""},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "annotations": None},
    ]
    assert (await running.post("/v1/chat/completions", {"messages": messages}))[0] == 200
    sent = running.engine.requests[-1].messages
    assert sent is not None
    assert [getattr(part, "text", None) for part in sent[0].content or ()] == ["a", "b", "c"]
    assert sent[1].content == ""
    assert sent[2].tool_calls == (calls[0],)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"5",
        b'{"prompt": "x",}',
        b'{"prompt": "x"} {}',
        b'\xef\xbb\xbf{"prompt": "x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": "x", "n": 1, "n": 2}',
        b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "n": ' + b"9" * 10_000 + b"}",
        b"{'prompt': 'x'}",
        '{"prompt": "x"}'.encode("utf-16"),
    ],
)
async def test_a_body_that_is_no_strict_json_object_is_a_400_and_the_connection_stays_usable(
    running: Running, body: bytes
) -> None:
    """API-10."""
    headers = {"Content-Type": "application/json"}
    async with running.http.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 400
        error = strict(await response.text())["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert (await running.post("/v1/completions", {"prompt": "x"}))[0] == 200


async def test_half_a_surrogate_pair_becomes_the_replacement_character_everywhere(running: Running) -> None:
    """API-08: in text, stop, user, a message's name and, over the WebSocket, an id; a whole pair and an escaped backslash stay."""
    headers = {"Content-Type": "application/json"}
    body = rb'{"prompt": "a\udc00b \ud83d\ude00 \\ud83d \ud83d\ud83d\ude00", "stop": "\ud83d", "user": "\ud83d"}'
    async with running.http.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 200
    request = running.engine.requests[-1]
    assert request.prompt == "a\ufffdb \U0001f600 \\ud83d \ufffd\U0001f600"
    assert request.sampling.stop == ("\ufffd",)
    body = rb'{"messages": [{"role": "user", "content": "\ud83d", "name": "\udfff"}]}'
    async with running.http.post("/v1/chat/completions", data=body, headers=headers) as response:
        assert response.status == 200
    async with running.http.post("/v1/completions", data=rb'{"prompt": "x", "model": "\ud83d"}', headers=headers) as r:
        assert r.status == 404
        assert "\ufffd" in (await r.json())["error"]["message"]
    async with running.http.post("/v1/completions", data=rb'{"prompt": "x", "\ud83d": 1}', headers=headers) as r:
        assert (r.status, (await r.json())["error"]["param"]) == (400, "\ufffd")
    async with running.http.ws_connect("/ws") as socket:
        await socket.send_str(r'{"type": "completion", "id": "\ud83d", "prompt": "x"}')
        assert strict((await socket.receive(timeout=10)).data)["id"] == "\ufffd"
