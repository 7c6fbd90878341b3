"""The server in front of engines without one speaks what the load generator expects."""

from collections.abc import AsyncIterator, Callable

import pytest
import serve
from aiohttp.test_utils import TestServer
from front import MODEL_NAME, Deliver, EngineFailed, Front, Text
from hypothesis import given, settings
from hypothesis import strategies as st
from load import Answer, Target, complete, first_model, open_session
from prompts import Prompt
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(serve.DEFAULT_TOKENIZER))
STORY = TOKENIZER.encode("Once there was a café — 東京 🙂 and a cat.").ids


class FakeEngine:
    """Hands out the story, `step` ids at a time, or fails after the first step."""

    def __init__(self) -> None:
        self.step = 1
        self.fails = False
        self.cancelled = 0
        self.prompts: list[list[int]] = []

    def submit(self, prompt_ids: list[int], max_tokens: int, deliver: Deliver) -> Callable[[], None]:
        self.prompts.append(prompt_ids)
        ids = (STORY * max_tokens)[:max_tokens]
        for begin in range(0, max_tokens, self.step):
            deliver(ids[begin : begin + self.step])
            if self.fails:
                deliver(EngineFailed("out of memory"))
        return self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def url(engine: FakeEngine) -> AsyncIterator[str]:
    server = TestServer(Front(engine, TOKENIZER).app())
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


async def ask(url: str, prompt: str, max_tokens: int, num_tokens: int | None = None) -> Answer:
    async with open_session(60) as session:
        return await complete(session, Target(url, MODEL_NAME), Prompt(prompt, num_tokens, max_tokens))


async def test_a_completion_has_its_tokens_a_chunk_for_each_step_and_the_whole_text(
    url: str, engine: FakeEngine
) -> None:
    answer = await ask(url, "Tell me", len(STORY), num_tokens=len(TOKENIZER.encode("Tell me").ids))
    assert answer.error is None
    assert answer.output_tokens == answer.num_chunks == len(STORY)
    assert "".join(answer.text) == TOKENIZER.decode(STORY)
    assert engine.prompts == [TOKENIZER.encode("Tell me").ids]
    assert engine.cancelled == 1


async def test_a_step_of_several_tokens_is_one_chunk(url: str, engine: FakeEngine) -> None:
    engine.step = 4
    answer = await ask(url, "Tell me", 6)
    assert answer.error is None
    assert (answer.output_tokens, answer.num_chunks) == (6, 2)


async def test_a_failure_of_the_engine_reaches_the_client(url: str, engine: FakeEngine) -> None:
    engine.fails = True
    answer = await ask(url, "Tell me", 5)
    assert answer.error is not None
    assert "out of memory" in answer.error
    assert engine.cancelled == 1


async def test_the_model_is_listed_and_other_requests_are_refused(url: str) -> None:
    async with open_session(60) as session:
        assert await first_model(session, url) == MODEL_NAME
        async with session.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}) as response:
            assert response.status == 400


@settings(deadline=None)
@given(st.data())
def test_text_is_the_same_however_the_tokens_come(data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(STORY)), max_size=8).map(sorted))
    text = Text(TOKENIZER)
    shown = [text.add(STORY[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(STORY)], strict=True)]
    assert "".join(shown) == TOKENIZER.decode(STORY)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in shown)
