"""What the HTTP API says with a real model behind it: echo and logprobs in every corner, streams that equal whole answers, empty prompts."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.tiny_service import DOORS, TinyService, copy_checkpoint, tiny_service

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The cat sat on the mat, thé"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "ignore_eos": True}
MATRIX = list(itertools.product([False, True], [None, 0, 1], [0, 1, 20]))


@pytest.fixture
async def service() -> AsyncIterator[TinyService]:
    async with tiny_service() as running:
        yield running


@pytest.mark.parametrize(("echo", "logprobs", "max_tokens"), MATRIX)
async def test_every_corner_of_echo_logprobs_and_max_tokens_is_right_streamed_and_whole(
    service: TinyService, echo: bool, logprobs: int | None, max_tokens: int
) -> None:
    """SMP-10, API-01: all 36; max_tokens 0 without echo is refused."""
    body = {"prompt": PROMPT, "echo": echo, "logprobs": logprobs, "max_tokens": max_tokens, **GREEDY}
    status, whole = await service.post(COMPLETIONS, body)
    if max_tokens == 0 and not echo:
        assert (status, whole["error"]["param"]) == (400, "max_tokens")
        assert (await service.post(COMPLETIONS, {**body, "stream": True}))[0] == 400
        return
    assert status == 200
    *chunks, usage, done = await service.sse(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    pieces = [chunk["choices"][0] for chunk in chunks]
    (choice,) = whole["choices"]

    plain = await service.ask("http completion", content=PROMPT, max_tokens=max(1, max_tokens), ignore_eos=True)
    answer = plain.text if max_tokens else ""
    assert choice["text"] == (PROMPT if echo else "") + answer
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert choice["finish_reason"] == "length"
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]
    num_prompt = len(plain.prompt_ids)
    for told in (whole["usage"], usage["usage"]):
        assert (told["prompt_tokens"], told["completion_tokens"]) == (num_prompt, max_tokens)
        assert told["total_tokens"] == num_prompt + max_tokens

    if logprobs is None:
        assert choice["logprobs"] is None
        assert all(piece["logprobs"] is None for piece in pieces)
        return
    told = choice["logprobs"]
    num_tokens = (num_prompt if echo else 0) + max_tokens
    assert {len(told[part]) for part in told} == {num_tokens}
    assert [value is None for value in told["token_logprobs"]] == [echo and index == 0 for index in range(num_tokens)]
    assert all(value <= 0 for value in told["token_logprobs"] if value is not None)
    if max_tokens:  # a greedy token is the likeliest one
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())
    for part in told:
        assert [item for piece in pieces for item in (piece["logprobs"] or {}).get(part, [])] == told[part]


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1}, {"logit_bias": {str(i): -100 for i in range(5, 250)}}, {"top_p": 0.01}, {"temperature": 0}],
)
async def test_impossible_candidates_leave_strict_json(service: TinyService, fields: dict[str, Any]) -> None:
    """SMP-11: the parser behind `post` and `sse` takes no NaN and no infinity."""
    common = {"temperature": 1.5, "max_tokens": 8, "ignore_eos": True, "seed": 3, **fields}
    body = {"prompt": PROMPT, "logprobs": 5, **common}
    status, whole = await service.post(COMPLETIONS, body)
    assert status == 200
    values = [value for tops in whole["choices"][0]["logprobs"]["top_logprobs"] for value in tops.values()]
    assert min(values) >= -9999.0
    *chunks, _ = await service.sse(COMPLETIONS, body)
    streamed = [
        value for chunk in chunks for value in (chunk["choices"][0]["logprobs"] or {}).get("token_logprobs", [])
    ]
    assert streamed == whole["choices"][0]["logprobs"]["token_logprobs"]
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5, **common}
    status, whole = await service.post(CHAT, body)
    assert status == 200
    assert all(len(entry["top_logprobs"]) == 5 for entry in whole["choices"][0]["logprobs"]["content"])
    assert (await service.sse(CHAT, body))[-1] == "[DONE]"


@pytest.mark.parametrize("adds_bos", [False, True])
async def test_a_prompt_without_tokens_is_refused_or_is_bos_and_the_next_request_works(
    adds_bos: bool, tmp_path: Path
) -> None:
    """SMP-12: for a tokenizer without and one with BOS; never 500."""
    model = copy_checkpoint(tmp_path / "model", tokenizer_config={"add_bos_token": adds_bos})
    short = {"max_tokens": 3, "return_token_ids": True, **GREEDY}
    async with tiny_service(model) as service:
        for prompt, is_empty_text in (
            ("", True),
            ([""], True),
            (["a", ""], True),
            ([], False),
            ([[]], False),
            ([[1], []], False),
        ):
            status, body = await service.post(COMPLETIONS, {"prompt": prompt, **short})
            if is_empty_text and adds_bos:
                assert status == 200, prompt
                assert body["choices"][-1]["prompt_token_ids"] == [1]
                assert len(body["choices"][-1]["token_ids"]) == 3
            else:
                assert status == 400, prompt
                assert body["error"]["param"].startswith("prompt")
        status, body = await service.post(CHAT, {"messages": [], **short})
        assert (status, body["error"]["param"]) == (400, "messages")
        status, body = await service.post(CHAT, {"messages": [{"role": "user", "content": ""}], **short})
        assert status == 200  # the template gives the turn its frame
        for door in DOORS:
            refused = await service.doors[door]({("messages" if "chat" in door else "prompt"): [], **GREEDY})
            assert refused.error is not None
            assert len((await service.ask(door, max_tokens=3, ignore_eos=True)).ids) == 3


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": PROMPT})])
async def test_stop_strings_cut_before_the_leftmost_match_streamed_and_whole(
    service: TinyService, path: str, asked: dict[str, Any]
) -> None:
    """SMP-07: across tokens, inside one, one character, one of several bytes, and several that begin alike."""
    body = {**asked, "max_tokens": 60, **GREEDY, "logit_bias": {"172": 4, "107": 4}}  # é is two tokens: sometimes there
    _, whole = await service.post(path, body)
    text = text_of(whole["choices"][0])
    middle = len(text) // 2
    wide = next((c for c in text if ord(c) > 127 and c != "\ufffd"), "\ufffd")
    lists = [[text[i : i + 2]] for i in range(3, middle, 5)]
    lists += [[text[middle]], [text[middle : middle + 9]], [wide], [text[9:12], text[9:11], text[9:15], "not there"]]
    for stops in lists:
        cut = min((text.index(stop) for stop in stops if stop in text), default=None)
        assert cut is not None
        _, answer = await service.post(path, {**body, "stop": stops})
        assert (text_of(answer["choices"][0]), answer["choices"][0]["finish_reason"]) == (text[:cut], "stop")
        chunks = (await service.sse(path, {**body, "stop": stops}))[:-1]
        assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == text[:cut]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    _, answer = await service.post(path, {**body, "stop": ["thr not there"]})
    assert text_of(answer["choices"][0]) == text  # what was held back is given out


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": PROMPT})])
async def test_three_choices_each_have_their_own_text_and_end_streamed_and_whole(
    service: TinyService, path: str, asked: dict[str, Any]
) -> None:
    """SMP-14: the prompt is computed and counted once, every completion is counted."""
    body = {**asked, "n": 3, "temperature": 1, "seed": 8, "max_tokens": 40, "stop": ["e", "y"]}
    before = service.engine.stats()
    _, whole = await service.post(path, body)
    after = service.engine.stats()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = {choice["index"]: text_of(choice) for choice in whole["choices"]}
    assert len(set(texts.values())) == 3
    assert after.prompt_tokens - before.prompt_tokens == whole["usage"]["prompt_tokens"]
    assert after.generated_tokens - before.generated_tokens == whole["usage"]["completion_tokens"]
    *chunks, usage, _ = await service.sse(path, {**body, "stream_options": {"include_usage": True}})
    streamed = dict.fromkeys(range(3), "")
    ends: list[int] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += text_of(choice)
        assert choice["index"] not in ends
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert streamed == texts
    assert sorted(ends) == [0, 1, 2]
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_leaving_in_the_middle_of_three_choices_frees_all_of_them(service: TinyService) -> None:
    """SMP-14, API-03: running and waiting are 0 and every block is free."""
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with service.http.post(COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")
        assert service.engine.stats().running == 3
        response.close()
    async with asyncio.timeout(10):
        while service.engine.stats().running:
            await service.ask("http completion", max_tokens=1)
    stats = service.engine.stats()
    assert (stats.running, stats.waiting, stats.pool.used) == (0, 0, 0)


async def test_half_a_surrogate_pair_is_the_same_prompt_on_every_wire(service: TinyService) -> None:
    """API-08: replaced by U+FFFD; a whole pair is one character."""
    for sent, meant in (("a\\ud83d b", "a\ufffd b"), ("a\\udc00b", "a\ufffdb"), ("\\ud83d\\ude00", "\U0001f600")):
        expected = {door: (await service.ask(door, content=meant)).ids for door in DOORS}
        common = {"temperature": 0, "max_tokens": 12, "return_token_ids": True, "user": "SENT"}
        for door, path, asked in (
            ("http completion", COMPLETIONS, {"prompt": "SENT"}),
            ("http chat", CHAT, {"messages": [{"role": "user", "content": "SENT", "name": "SENT"}]}),
        ):
            status, body = await service.post(path, json.dumps({**asked, **common}).replace("SENT", sent).encode())
            assert status == 200
            assert body["choices"][0]["token_ids"] == expected[door]
        lone = (
            sent.encode().decode("unicode_escape").encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        )
        for door in ("ws completion", "ws chat", "rpc completion", "rpc chat"):
            assert (await service.ask(door, content=lone)).ids == expected[door], door


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of any kind, streamed or whole."""
    message = choice.get("message") or choice.get("delta")
    return str(choice["text"] if message is None else message.get("content") or "")
