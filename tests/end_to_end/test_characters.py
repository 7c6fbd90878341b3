"""Characters of several tokens arrive whole on every wire, however the engine's steps cut them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from service.client import RpcClient
from service.messages import Delta
from tests.factories import running_engine, tiny_tokenizer
from tests.fakes import Choose
from tests.transports.conftest import rpc_serving, serving, strict

PROMPT = "The cat sat"
TEXTS = [
    "🇨🇳🇫🇷 flags",
    "👩‍👩‍👧‍👦 family",
    "안녕하세요",
    "สวัสดีครับ",
    "नमस्ते दुनिया",
    "e\u0301 Z\u0337\u0322a\u0335",
    "  two spaces, then 你好",
]


def spelled(ids: list[int]) -> Choose:
    """Choose these tokens one after another, then end the text."""
    num_prompt = len(tiny_tokenizer().encode(PROMPT))

    def choose(context: Sequence[int], seed: int) -> int:
        return [*ids, 2][min(len(context) - num_prompt, len(ids))]

    return choose


async def answers(ids: list[int]) -> dict[str, list[str]]:
    """Let an engine answer with `ids`, a token a step; the pieces of text that each wire delivers."""
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    got: dict[str, list[str]] = {}
    async with (
        running_engine(choose=spelled(ids)) as it,
        serving(it.engine) as http,  # type: ignore[arg-type]
        rpc_serving(it.engine, "tcp:127.0.0.1:0") as rpc,  # type: ignore[arg-type]
        RpcClient(rpc.address) as client,
        http.http.ws_connect("/ws") as socket,
    ):
        _, whole = await http.post("/v1/completions", body)
        got["whole"] = [whole["choices"][0]["text"]]
        events = await http.sse("/v1/completions", body)
        got["sse"] = [event["choices"][0]["text"] for event in events[:-1]]
        await socket.send_json({"type": "completion", "id": "a", **body})
        got["ws"] = []
        while (message := strict((await socket.receive(timeout=10)).data))["type"] != "finished":
            got["ws"] += [message["text"]] if message["type"] == "delta" else []
        got["rpc"] = [event.text async for event in client.generate(**body) if isinstance(event, Delta)]  # type: ignore[arg-type]
    return got


@pytest.mark.parametrize("text", TEXTS)
async def test_what_a_stream_says_joins_to_the_whole_text_and_no_piece_is_half_a_character(text: str) -> None:
    """TOK-01, TOK-02."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    for wire, pieces in (await answers(ids)).items():
        assert "".join(pieces) == text == tiny_tokenizer().decode(ids), wire
        assert not any("\ufffd" in piece for piece in pieces), wire
        json.dumps(pieces).encode("utf-8")


async def test_a_text_that_ends_inside_a_character_ends_in_one_replacement_character_on_every_wire() -> None:
    """TOK-01."""
    ids = tiny_tokenizer().encode("fine 🙂", add_special_tokens=False)[:-1]
    for wire, pieces in (await answers(ids)).items():
        assert "".join(pieces) == "fine \ufffd" == tiny_tokenizer().decode(ids), wire
        assert [piece for piece in pieces if "\ufffd" in piece] == pieces[-1:], wire
