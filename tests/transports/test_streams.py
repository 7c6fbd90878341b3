"""Server-sent events: their end, their usage, and what happens when the engine fails or the client goes away or stops reading."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any

import pytest
import structlog

from service.errors import EngineDead, StepFailed
from service.messages import Delta, Finished, GenerateRequest, Usage
from tests.transports.conftest import Running, events_of, serving
from tests.transports.fake_engine import FakeEngine, spoken, started

CHAT = {"messages": [{"role": "user", "content": "Say hello"}]}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Say hello"})]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_a_stream_without_include_usage_has_no_usage_anywhere(
    running: Running, path: str, body: dict[str, object], options: object
) -> None:
    """API-01."""
    events = await running.sse(path, {**body, "stream_options": options})
    assert events[-1] == "[DONE]"
    assert all("usage" not in event and event["choices"] for event in events[:-1])


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_include_usage_adds_one_last_chunk_that_equals_the_whole_answers_usage(
    running: Running, path: str, body: dict[str, object]
) -> None:
    """API-01."""
    *chunks, last, done = await running.sse(path, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert all("usage" not in chunk for chunk in chunks)
    _, whole = await running.post(path, body)
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("stream", [False, None])
async def test_stream_options_without_a_stream_are_refused(running: Running, stream: bool | None) -> None:
    """API-01: documented as 400."""
    body = {**CHAT, "stream": stream, "stream_options": {"include_usage": True}}
    status, answer = await running.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "stream_options")


async def test_an_unknown_stream_option_is_refused_by_path(running: Running) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usge": True}}
    status, answer = await running.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "stream_options.include_usge")


async def test_two_hundred_streams_each_end_in_one_finish_and_done(running: Running) -> None:
    """API-02."""

    async def one() -> None:
        events = await running.sse("/v1/chat/completions", {**CHAT, "n": 2})
        assert events[-1] == "[DONE]"
        ends = [event["choices"][0]["index"] for event in events[:-1] if event["choices"][0]["finish_reason"]]
        assert sorted(ends) == [0, 1]

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(20)))
    assert running.engine.num_finished == 200


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (StepFailed("the step raised"), "step_failed"),
        (EngineDead("stopped"), "engine_dead"),
        (RuntimeError("secret"), "internal_error"),
    ],
)
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_fault_in_the_middle_ends_the_stream_with_an_error_event(
    running: Running, path: str, body: dict[str, Any], fault: Exception, code: str
) -> None:
    """API-02: and a whole answer with its status; never silence, never a traceback."""

    def script(request: GenerateRequest) -> Any:
        yield [started(request), Delta(index=0, text="Hel", token_ids=(1,))]
        yield fault

    running.engine.script = script
    events = await running.sse(path, body)
    assert "Hel" in str(events)
    assert events[-1]["error"]["code"] == code
    assert "[DONE]" not in events
    assert "secret" not in str(events)
    status, whole = await running.post(path, body)
    assert status == getattr(fault, "http_status", 500)
    assert whole["error"]["code"] == code
    assert whole["error"]["type"] == "server_error"
    assert "secret" not in str(whole)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_engine_that_ends_without_finishing_is_an_error_not_a_silent_end(
    running: Running, is_stream: bool
) -> None:
    """API-02."""
    running.engine.script = lambda request: [[started(request), Delta(index=0, text="a")]]
    async with running.http.post("/v1/completions", json={"prompt": "x", "stream": is_stream}) as response:
        text = await response.text()
    assert response.status == (200 if is_stream else 500)
    assert "without finishing" in text
    assert "[DONE]" not in text


async def test_a_fault_before_the_first_event_is_a_status_even_for_a_stream(running: Running) -> None:
    running.engine.script = lambda request: [EngineDead("stopped")]
    status, body = await running.post("/v1/completions", {"prompt": "x", "stream": True})
    assert (status, body["error"]["code"]) == (503, "engine_dead")


async def test_events_of_one_wake_up_leave_in_one_write() -> None:
    """Mechanism 26: what the engine hands over together is one chunk on the wire."""
    step = [Delta(index=0, text=f"w{i} ", token_ids=(i,)) for i in range(7)]

    def script(request: GenerateRequest) -> Any:
        yield [started(request)]
        yield step
        yield [
            Delta(index=0, text="", finish_reason="stop"),
            Finished(usage=Usage(prompt_tokens=2, completion_tokens=7)),
        ]

    async with serving(FakeEngine(script)) as running:
        reader, writer = await connect(running)
        writer.write(http_request("/v1/completions", b'{"prompt": "x", "stream": true}'))
        text = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)
        writer.close()
    chunks = text.split(b"\r\n\r\n", 1)[1].split(b"\r\n")
    bodies = [chunk for chunk in chunks if chunk.startswith(b"data")]
    assert [body.count(b'"text":"w') for body in bodies] == [7, 0]
    assert bodies[1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_fifty_clients_that_leave_abort_their_answers(
    caplog: pytest.LogCaptureFixture, is_stream: bool, with_reset: bool, phase: str
) -> None:
    """API-03, API-04: by FIN and by RST, in every phase; nothing is logged as an error."""
    never = asyncio.Event()

    def script(request: GenerateRequest) -> Any:
        if phase == "queued":
            yield never
        yield [started(request)]
        if phase == "prefill":
            yield never
        yield [Delta(index=0, text="a", token_ids=(1,))]
        yield never

    caplog.set_level(logging.INFO)
    with structlog.testing.capture_logs() as lines:
        async with serving(FakeEngine(script)) as running:
            body = b'{"prompt": "x", "stream": %s}' % (b"true" if is_stream else b"false")
            connections = [await connect(running) for _ in range(50)]
            for _, writer in connections:
                writer.write(http_request("/v1/completions", body))
            await running.engine.until(lambda engine: engine.num_running == 50)
            for _, writer in connections:
                if with_reset:
                    reset(writer)
                writer.close()
            await running.engine.until(lambda engine: engine.num_running == 0)
            assert running.engine.num_aborted == 50
            assert (await running.http.get("/healthz")).status == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert [line for line in lines if line["log_level"] != "info"] == []


async def test_a_disconnect_frees_every_prompt_of_a_batch() -> None:
    """API-03, SMP-14."""
    never = asyncio.Event()
    async with serving(FakeEngine(lambda request: [[started(request)], never])) as running:
        _, writer = await connect(running)
        writer.write(http_request("/v1/completions", b'{"prompt": ["a", "b", "c"], "n": 3, "stream": true}'))
        await running.engine.until(lambda engine: engine.num_running == 3)
        writer.close()
        await running.engine.until(lambda engine: engine.num_running == 0)
    assert running.engine.num_aborted == 3


async def test_a_client_that_stops_reading_is_cut_and_others_keep_streaming() -> None:
    """API-05: the engine's stream is closed after the limit; what was taken from it stays small."""
    taken = 0

    def script(request: GenerateRequest) -> Any:
        nonlocal taken
        if request.prompt != "slow":
            yield from spoken(request, ["a", "b"])
            return
        yield [started(request)]
        while True:
            taken += 1
            yield [Delta(index=0, text="x" * 10_000, token_ids=(1,))]

    async with serving(FakeEngine(script), slow_consumer_s=0.3) as running:
        slow = [await connect(running, receive_buffer=4096) for _ in range(5)]
        for _, writer in slow:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(http_request("/v1/completions", b'{"prompt": "slow", "stream": true}'))
        await running.engine.until(lambda engine: engine.num_running == 5)
        for _ in range(20):
            assert (await running.sse("/v1/completions", {"prompt": "x"}))[-1] == "[DONE]"
        await running.engine.until(lambda engine: engine.num_running == 0)
        assert running.engine.num_aborted == 5
        assert taken * 10_000 < 5 * 2**20  # a megabyte a client, with all the buffers between
        for _, writer in slow:
            writer.close()


async def test_the_same_request_id_twice_at_once_mixes_nothing(running: Running) -> None:
    """API-11: the caller's id is only echoed."""
    gate = asyncio.Event()
    running.engine.script = lambda request: spoken(request, [str(request.prompt), "!"], pause=gate)
    headers = {"X-Request-Id": "same"}

    async def ask(prompt: str) -> dict[str, Any]:
        async with running.http.post("/v1/completions", json={"prompt": prompt}, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "same"
            body: dict[str, Any] = await response.json()
            return body

    asked = [asyncio.create_task(ask(prompt)) for prompt in ("a", "b")]
    await running.engine.until(lambda engine: engine.num_running == 2)
    gate.set()
    first, second = await asyncio.gather(*asked)
    assert (first["choices"][0]["text"], second["choices"][0]["text"]) == ("a!", "b!")
    assert first["id"] != second["id"]
    assert [request.request_id for request in running.engine.requests] == ["same", "same"]


def test_a_stream_of_events_holds_strict_json_only() -> None:
    """SMP-11: the check that the other tests rely on does refuse."""
    with pytest.raises(AssertionError):
        events_of('data: {"a": NaN}\n\n')


async def connect(
    running: Running, receive_buffer: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a bare connection, so that a test decides how it ends."""
    host, port = running.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return await asyncio.open_connection(sock=sock)


def reset(writer: asyncio.StreamWriter) -> None:
    """Make closing send RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def http_request(path: str, body: bytes) -> bytes:
    """A POST as bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
