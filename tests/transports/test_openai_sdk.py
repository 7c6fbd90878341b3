"""The `openai` package, as its users would call it, against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.transports.conftest import Running, serving
from tests.transports.fake_engine import MODEL, FakeEngine, spoken

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello"}]


def connect(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def sdk(running: Running) -> AsyncIterator[AsyncOpenAI]:
    async with connect(running) as client:
        yield client


async def test_the_sdk_lists_the_served_model(sdk: AsyncOpenAI) -> None:
    models = await sdk.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_the_sdk_gets_a_chat_answer_whole(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 3, 5)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_the_sdk_streams_a_chat_answer(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(model=MODEL, messages=USER, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_sdk_streams_a_completion(sdk: AsyncOpenAI) -> None:
    stream = await sdk.completions.create(model=MODEL, prompt="Say hello", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_sdk_gets_two_different_choices(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model=MODEL, messages=USER, n=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "Hello, world#0"),
        (1, "Hello, world#1"),
    ]


async def test_the_sdk_gets_chat_logprobs_whole_and_streamed(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["Hello", ",", " world"]
    assert bytes(logprobs.content[2].bytes or ()) == b" world"
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["top0", "top1"]
    stream = await sdk.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.token for entry in streamed] == ["Hello", ",", " world"]


async def test_the_sdk_raises_its_own_error_for_a_bad_value(running: Running, sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model=MODEL, messages=USER, temperature=3)
    assert caught.value.param == "temperature"
    assert "2.0" in caught.value.message
    assert running.engine.requests == []


async def test_the_sdk_raises_not_found_for_another_model(sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.chat.completions.create(model="gpt-4o", messages=USER)
    assert caught.value.code == "model_not_found"


async def test_the_sdk_passes_stop_through_and_sees_why_it_stopped() -> None:
    engine = FakeEngine(lambda request: spoken(request, ["One"]))
    async with serving(engine) as running, connect(running) as sdk:
        answer = await sdk.completions.create(model=MODEL, prompt="Count", stop=["Two", "\n"])
    assert engine.requests[0].sampling.stop == ("Two", "\n")
    assert answer.choices[0].finish_reason == "stop"
