"""The load generator against a small server that behaves, or misbehaves, as told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import serve
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from load import (
    Answer,
    SseParser,
    Target,
    closed_loop,
    complete,
    count_cut,
    first_model,
    open_loop,
    open_session,
    timed_loop,
)
from prompts import Prompt
from recipes import free_port
from report import summarise

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Send = Callable[[bytes], Awaitable[None]]


def chunk(text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage(prompt_tokens: int, output_tokens: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": cached}}}


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class FakeServer:
    """Answers completions with `script`, which sends what it likes; remembers the bodies and how many ran at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_running = 0
        self.max_running = 0
        self.script: Callable[[dict[str, Any], Send], Awaitable[None]] = self.obey
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    @property
    def target(self) -> Target:
        return Target(self.url, "tiny")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}, {"id": "other"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            if body["prompt"] == "refuse":
                return web.json_response({"error": {"message": "the queue is full"}}, status=429)
            await response.prepare(request)
            await self.script(body, response.write)
            return response
        finally:
            self.num_running -= 1

    async def obey(self, body: dict[str, Any], send: Send) -> None:
        """Stream one token a chunk, as many as asked for."""
        for index in range(body["max_tokens"]):
            await send(event(chunk(f" {index}", "length" if index == body["max_tokens"] - 1 else None)))
            await asyncio.sleep(0)
        await send(event(usage(len(body["prompt"].split()), body["max_tokens"])) + DONE)


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.server.start_server()
    yield fake
    await fake.server.close()


async def ask(fake: FakeServer, prompt: Prompt) -> Answer:
    async with open_session(60) as session:
        return await complete(session, fake.target, prompt)


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), max_size=6), st.booleans(), st.data())
def test_events_come_out_the_same_wherever_the_stream_is_cut(texts: list[str], crlf: bool, data: st.DataObject) -> None:
    end = "\r\n" if crlf else "\n"
    stream = "".join(f": keep-alive{end}data: {text}{end}id: 7{end}{end}" for text in texts).encode()
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    parser = SseParser()
    found = []
    for begin, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += parser.feed(stream[begin:stop])
    assert found == [text.encode() for text in texts]


def test_several_data_lines_make_one_event() -> None:
    assert SseParser().feed(b"data: one\ndata:two\n\n\ndata: half") == [b"one\ntwo"]


async def test_a_request_is_greedy_streamed_and_runs_past_the_end_token(fake: FakeServer) -> None:
    answer = await ask(fake, Prompt("one two three", 3, 4))
    assert answer.error is None
    assert (answer.prompt_tokens, answer.output_tokens, answer.num_chunks, len(answer.gaps)) == (3, 4, 4, 3)
    assert fake.bodies == [
        {
            "model": "tiny",
            "prompt": "one two three",
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_events_cut_into_single_bytes_are_read_as_well(fake: FakeServer) -> None:
    async def dribble(body: dict[str, Any], send: Send) -> None:
        for byte in event(chunk("é")) + event(chunk("b", "length")) + event(usage(1, 2, cached=1)) + DONE:
            await send(bytes([byte]))

    fake.script = dribble
    answer = await ask(fake, Prompt("x", 1, 2))
    assert (answer.error, answer.num_chunks, answer.cached_tokens) == (None, 2, 1)


async def test_the_first_token_is_the_first_text_and_the_closing_chunk_is_no_token(fake: FakeServer) -> None:
    async def script(body: dict[str, Any], send: Send) -> None:
        for document in (chunk(""), chunk("a"), chunk(""), chunk("b"), chunk("", "length"), usage(1, 4)):
            await send(event(document))
        await send(DONE)

    fake.script = script
    answer = await ask(fake, Prompt("x", 1, 4))
    assert answer.error is None
    assert answer.num_chunks == 4
    assert len(answer.gaps) == 2  # from "a" to the empty token, and from there to "b"
    assert answer.first is not None
    assert answer.last is not None
    assert answer.due < answer.first <= answer.last


async def failure(fake: FakeServer, *documents: dict[str, Any], end: bytes = DONE) -> str:
    async def script(body: dict[str, Any], send: Send) -> None:
        await send(b"".join(event(document) for document in documents) + end)

    fake.script = script
    answer = await ask(fake, Prompt("x", 1, 2))
    assert answer.error is not None
    assert answer.done is not None
    return answer.error


async def test_every_way_not_to_get_what_was_asked_for_is_an_error(fake: FakeServer) -> None:
    a, b = chunk("a"), chunk("b", "length")
    assert "asked for 2 new tokens, got 1" in await failure(fake, a, usage(1, 1))
    assert "1 tokens, the server counted 5" in await failure(fake, a, b, usage(5, 2))
    assert "no usage" in await failure(fake, a, b)
    assert "without [DONE]" in await failure(fake, a, b, usage(1, 2), end=b"")
    assert "no chunk with a choice" in await failure(fake, usage(1, 2))
    assert "it broke" in await failure(fake, a, {"error": {"message": "it broke"}})
    assert "not a completion chunk" in await failure(fake, a, end=b"data: {oops\n\n")
    assert "not a completion chunk" in await failure(fake, a, {"choices": [7]})
    assert "not a completion chunk" in await failure(fake, a, {"usage": {"tokens": 3}})


async def test_a_refusal_is_an_error_with_status_and_reason(fake: FakeServer) -> None:
    answer = await ask(fake, Prompt("refuse", 1, 2))
    assert answer.error is not None
    assert "HTTP 429" in answer.error
    assert "the queue is full" in answer.error


async def test_a_server_that_is_not_there_is_an_error_not_an_exception() -> None:
    async with open_session(60) as session:
        answer = await complete(session, Target(f"http://127.0.0.1:{free_port()}", "x"), Prompt("x", None, 1))
    assert answer.error is not None
    assert "ClientConnector" in answer.error


async def test_a_connection_that_breaks_in_between_is_an_error(fake: FakeServer) -> None:
    async def hang_up(body: dict[str, Any], send: Send) -> None:
        await send(event(chunk("a")))
        raise ConnectionResetError

    fake.script = hang_up
    answer = await ask(fake, Prompt("x", 1, 2))
    assert answer.error is not None


async def test_closed_loop_keeps_exactly_its_concurrency_under_way(fake: FakeServer) -> None:
    prompts = [Prompt(f"p{index} " + "x " * index, None, 3) for index in range(10)]
    waiting: list[asyncio.Event] = []

    async def hold(body: dict[str, Any], send: Send) -> None:
        """Answer only when three wait at once, or all the rest do."""
        gate = asyncio.Event()
        waiting.append(gate)
        if len(waiting) == 3 or len(fake.bodies) == len(prompts):
            for other in waiting:
                other.set()
            waiting.clear()
        await gate.wait()
        await fake.obey(body, send)

    fake.script = hold
    async with open_session(60) as session:
        answers = await closed_loop(session, fake.target, prompts, 3)
    assert fake.max_running == 3
    assert [answer.error for answer in answers] == [None] * 10
    # In the order of the prompts, whatever order they ended in.
    assert [answer.prompt_tokens for answer in answers] == [len(prompt.text.split()) for prompt in prompts]


async def test_open_loop_sends_at_planned_times_that_the_seed_decides(fake: FakeServer) -> None:
    async def planned(seed: int) -> list[float]:
        prompts = [Prompt("x", None, 1)] * 6
        async with open_session(60) as session:
            answers = await open_loop(session, fake.target, prompts, rate=500.0, seed=seed)
        assert [answer.error for answer in answers] == [None] * 6
        return [answer.due - answers[0].due for answer in answers]

    assert await planned(1) == pytest.approx(await planned(1), abs=1e-6)
    assert await planned(1) != pytest.approx(await planned(2), abs=1e-6)


class WordCount:
    """A tokenizer whose tokens are words."""

    def __init__(self) -> None:
        self.offsets: list[tuple[int, int]] = []
        self.ids: list[int] = []

    def encode(self, sequence: str) -> "WordCount":
        self.ids = list(range(len(sequence.split())))
        return self


async def test_what_is_under_way_when_the_time_is_over_is_cut_and_keeps_its_text(fake: FakeServer) -> None:
    stalled = asyncio.Event()

    async def stall(body: dict[str, Any], send: Send) -> None:
        await send(event(chunk(" one two")) + event(chunk(" three")))
        await stalled.wait()

    fake.script = stall
    prompts = [Prompt("a b", 2, 50), Prompt("c d e", 3, 50), Prompt("never sent", 2, 50)]
    async with open_session(60) as session:
        answers = await closed_loop(session, fake.target, prompts, 2, limit_s=0.3)
    stalled.set()
    assert len(answers) == 2
    for answer, prompt in zip(answers, prompts, strict=False):
        assert answer.is_cut
        assert answer.error is None
        count_cut(answer, prompt, WordCount())
    assert [answer.prompt_tokens for answer in answers] == [2, 3]
    assert [answer.output_tokens for answer in answers] == [3, 3]
    summary = summarise(answers, wall_s=0.5)
    assert summary.errors == {}
    assert (summary.num_cut, summary.num_within_limits) == (2, 0)
    assert summary.output_tokens_per_s == 12.0


async def test_a_request_cut_before_its_first_token_counts_nothing(fake: FakeServer) -> None:
    stalled = asyncio.Event()

    async def stall(body: dict[str, Any], send: Send) -> None:
        await stalled.wait()

    fake.script = stall
    async with open_session(60) as session:
        (answer,) = await timed_loop(session, fake.target, [Prompt("a b", 2, 5)], [0.05], limit_s=0.2)
    stalled.set()
    count_cut(answer, Prompt("a b", 2, 5), WordCount())
    assert answer.is_cut
    assert (answer.first, answer.prompt_tokens, answer.output_tokens) == (None, 0, 0)


async def test_requests_leave_at_their_times_whatever_became_of_the_ones_before(fake: FakeServer) -> None:
    gate = asyncio.Event()

    async def hold_the_first(body: dict[str, Any], send: Send) -> None:
        if len(fake.bodies) == 1:
            await gate.wait()
        await fake.obey(body, send)
        gate.set()

    fake.script = hold_the_first
    async with open_session(60) as session:
        first, second = await timed_loop(session, fake.target, [Prompt("x", 1, 2)] * 2, [0.0, 0.02])
    assert first.error is None
    assert second.error is None
    assert second.due - first.due == pytest.approx(0.02)
    assert first.last is not None
    assert second.last is not None
    assert second.last < first.last


async def test_the_servers_first_model_is_the_default(fake: FakeServer) -> None:
    async with open_session(60) as session:
        assert await first_model(session, fake.url) == "tiny"


async def run_program(fake: FakeServer, *arguments: str) -> int:
    return await asyncio.to_thread(serve.main, ["--url", fake.url + "/v1", "--no-tokenizer", *arguments])


async def test_the_program_prints_a_table_and_writes_json(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    status = await run_program(fake, "-c", "1", "2", "-n", "3", "--max-tokens", "4", "--json", str(out))
    assert status == 0
    assert "| w1 c=2 |" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert [run["load"] for run in document["runs"]] == ["w1 c=1", "w1 c=2"]
    assert [run["output_tokens"] for run in document["runs"]] == [12, 12]
    assert len(fake.bodies) == 2 * (2 + 3)  # two warm-up requests before each run
    assert len({body["prompt"].split()[0] for body in fake.bodies}) == 10


async def test_the_program_fails_loudly_when_one_request_got_fewer_tokens(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stop_early_once(body: dict[str, Any], send: Send) -> None:
        if len(fake.bodies) == 4:
            body = {**body, "max_tokens": 3}
        await fake.obey(body, send)

    fake.script = stop_early_once
    assert await run_program(fake, "-c", "1", "-n", "3", "--max-tokens", "4") == 1
    printed = capsys.readouterr()
    assert "2/3" in printed.out
    assert "FAILED w1 c=1: 1 x asked for 4 new tokens, got 3" in printed.err
