"""Clients that other people wrote, and ours from another process, against a server with the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.sync.client import connect

from tests.end_to_end.server import Server

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="session")
def golden(data: Path) -> dict[str, Any]:
    prompts = json.loads((data / "golden/smollm2-135m/golden.json").read_text())["prompts"]
    return {prompt["name"]: prompt for prompt in prompts}


def model_id(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_the_openai_package_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.object for model in client.models.list()] == ["model"]


def test_the_openai_package_gets_the_golden_chat_answer(client: openai.OpenAI, golden: dict[str, Any]) -> None:
    prompt = golden["chat_turns"]
    answer = client.chat.completions.create(
        model=model_id(client), messages=prompt["messages"], temperature=0, max_tokens=48
    )
    ids = [step["id"] for step in prompt["steps"]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt["n_prompt"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == prompt["eos_step"] + 1
    assert prompt["continuation"].startswith(answer.choices[0].message.content or "?")
    assert len(ids) == 48


def test_the_openai_package_streams_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=model_id(client), messages=QUESTION, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model=model_id(client),
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reasons = "", None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert usage == whole.usage or (usage is not None and usage.completion_tokens == whole.usage.completion_tokens)
    assert reasons == [whole.choices[0].finish_reason]


def test_two_choices_share_the_prompt_and_differ(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model_id(client), messages=QUESTION, n=2, temperature=1.5, seed=7, max_tokens=24
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_logprobs_are_those_of_the_golden_reference(client: openai.OpenAI, golden: dict[str, Any]) -> None:
    prompt = golden["capital"]
    answer = client.completions.create(
        model=model_id(client), prompt=prompt["text"], temperature=0, max_tokens=8, logprobs=5
    )
    got = answer.choices[0].logprobs
    assert got is not None
    assert got.token_logprobs is not None
    expected = [step["top"][0][1] for step in prompt["steps"][:8]]
    assert got.token_logprobs == pytest.approx(expected, abs=1e-3)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = (
        client.completions.create(model=model_id(client), prompt="One, two, three,", temperature=0, max_tokens=32)
        .choices[0]
        .text
    )
    stop = whole[9:13]
    cut = client.completions.create(
        model=model_id(client), prompt="One, two, three,", temperature=0, max_tokens=32, stop=[stop]
    ).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
    ],
)
def test_wrong_input_is_a_bad_request_that_names_the_field(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model_id(client), messages=QUESTION, **change)
    assert param in str(caught.value)
    assert client.completions.create(model=model_id(client), prompt="Hi", max_tokens=1).choices


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="Hi")


def test_a_websocket_carries_many_turns_and_a_cancel(server: Server) -> None:
    with connect(server.url.replace("http", "ws") + "/ws") as socket:
        for turn in ("a", "b"):
            socket.send(
                json.dumps({"type": "chat", "id": turn, "messages": QUESTION, "temperature": 0, "max_tokens": 8})
            )
            events = [json.loads(socket.recv(timeout=30))]
            while events[-1]["type"] not in {"finished", "failed"}:
                events.append(json.loads(socket.recv(timeout=30)))
            assert [events[0]["type"], events[-1]["type"]] == ["started", "finished"]
            assert {event["id"] for event in events} == {turn}
        socket.send(
            json.dumps({"type": "chat", "id": "c", "messages": QUESTION, "max_tokens": 4000, "ignore_eos": True})
        )
        assert json.loads(socket.recv(timeout=30))["type"] == "started"
        socket.send(json.dumps({"type": "cancel", "id": "c"}))
        last = json.loads(socket.recv(timeout=30))
        while last["type"] == "delta":
            last = json.loads(socket.recv(timeout=30))
        assert (last["type"], last["code"]) == ("failed", "aborted")
    server.wait_until_idle()


def test_the_rpc_client_streams_from_another_process(server: Server, golden: dict[str, Any]) -> None:
    program = f"""
import asyncio
from service.client import RpcClient

async def main():
    async with RpcClient({server.rpc!r}) as client:
        async for event in client.generate(prompt={golden["capital"]["text"]!r}, max_tokens=8, temperature=0):
            print(getattr(event, "text", ""), end="")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert golden["capital"]["continuation"].startswith(done.stdout)
