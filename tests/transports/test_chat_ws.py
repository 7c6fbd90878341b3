"""The WebSocket, with the `websockets` package and with bare frames."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
import structlog
import websockets
from websockets.asyncio.client import ClientConnection

from service.errors import ContextTooLong
from service.messages import Delta, GenerateRequest
from tests.transports.conftest import Running, serving, strict
from tests.transports.fake_engine import MODEL, FakeEngine, spoken, started

USER = [{"role": "user", "content": "Say hello"}]


def dial(running: Running, **options: Any) -> Any:
    return websockets.connect(running.url.replace("http", "ws") + "/ws", **options)


async def ask(client: ClientConnection, **message: Any) -> list[dict[str, Any]]:
    """Send a request and read until its answer ends."""
    await client.send(json.dumps(message))
    return await read_until(client, lambda got: got["id"] == message["id"] and got["type"] in ("finished", "failed"))


async def read_until(client: ClientConnection, condition: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while not seen or not condition(seen[-1]):
            text = await client.recv()
            assert isinstance(text, str)
            seen.append(strict(text))
    return seen


async def test_many_turns_run_on_one_socket(running: Running) -> None:
    async with dial(running) as client:
        for turn in range(3):
            messages = await ask(client, type="chat", id=f"turn-{turn}", messages=USER, max_tokens=2)
            assert [message["type"] for message in messages] == ["started", "delta", "delta", "finished"]
            assert "".join(message.get("text", "") for message in messages) == "Hello,"
            assert messages[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 2}
            assert {message["id"] for message in messages} == {f"turn-{turn}"}
        messages = await ask(client, type="completion", id="c", prompt="Say hello", model=MODEL)
        assert "".join(message.get("text", "") for message in messages) == "Hello, world"


async def test_answers_run_side_by_side_on_one_socket(running: Running) -> None:
    gate = asyncio.Event()
    running.engine.script = lambda request: spoken(request, [str(request.prompt), "!"], pause=gate)
    async with dial(running) as client:
        for name in "abc":
            await client.send(json.dumps({"type": "completion", "id": name, "prompt": name}))
        await running.engine.until(lambda engine: engine.num_running == 3)
        gate.set()
        seen: list[dict[str, Any]] = []
        while sum(message["type"] == "finished" for message in seen) < 3:
            seen += await read_until(client, lambda message: message["type"] == "finished")
    for name in "abc":
        assert "".join(m.get("text", "") for m in seen if m["id"] == name) == f"{name}!"


async def test_a_cancel_acts_at_once_during_an_answer(running: Running) -> None:
    """API-06 (d): the neighbour goes on."""
    gate = asyncio.Event()
    running.engine.script = lambda request: spoken(request, ["a", "b"], pause=gate)
    async with dial(running) as client:
        for name in ("doomed", "neighbour"):
            await client.send(json.dumps({"type": "chat", "id": name, "messages": USER}))
            await read_until(client, lambda message: message["type"] == "delta")
        await client.send(json.dumps({"type": "cancel", "id": "doomed"}))
        (failed,) = await read_until(client, lambda message: message["type"] == "failed")
        assert (failed["id"], failed["code"]) == ("doomed", "aborted")
        assert running.engine.num_aborted == 1
        gate.set()
        assert (await read_until(client, lambda message: message["type"] == "finished"))[-1]["id"] == "neighbour"


async def test_a_cancel_right_behind_its_request_still_acts(running: Running) -> None:
    never = asyncio.Event()
    running.engine.script = lambda request: [never]
    async with dial(running) as client:
        await client.send(json.dumps({"type": "completion", "id": "a", "prompt": "x"}))
        await client.send(json.dumps({"type": "cancel", "id": "a"}))
        (failed,) = await read_until(client, lambda message: True)
        assert (failed["id"], failed["code"]) == ("a", "aborted")
        await client.send(json.dumps({"type": "cancel", "id": "unknown"}))  # is not an error: it may just have ended
        await client.send(json.dumps({"type": "stats"}))
        assert (await read_until(client, lambda message: True))[0]["type"] == "stats"
    await running.engine.until(lambda engine: engine.num_running == 0)


async def test_stats_come_over_the_socket(running: Running) -> None:
    async with dial(running) as client:
        await client.send('{"type": "stats", "id": "s"}')
        (message,) = await read_until(client, lambda message: True)
    assert (message["id"], message["type"], message["stats"]["pool"]["total"]) == ("s", "stats", 63)


async def test_a_running_id_is_refused_and_free_again_after_its_end(running: Running) -> None:
    """API-11: the refusal has no id, so that it cannot be taken for the end of the running answer."""
    gate = asyncio.Event()
    running.engine.script = lambda request: spoken(request, [str(request.prompt), "!"], pause=gate)
    async with dial(running) as client, dial(running) as other:
        await client.send(json.dumps({"type": "completion", "id": "a", "prompt": "first"}))
        await client.send(json.dumps({"type": "completion", "id": "a", "prompt": "second"}))
        await other.send(json.dumps({"type": "completion", "id": "a", "prompt": "third"}))
        seen = await read_until(client, lambda message: message["type"] == "failed")
        assert (seen[-1]["id"], seen[-1]["param"]) == (None, "id")
        await running.engine.until(lambda engine: engine.num_running == 2)
        gate.set()
        seen += await read_until(client, lambda message: message["type"] == "finished")
        assert "".join(message.get("text", "") for message in seen) == "first!"
        others = await read_until(other, lambda message: message["type"] == "finished")
        assert "".join(message.get("text", "") for message in others) == "third!"
        again = await ask(client, type="completion", id="a", prompt="again")
        assert "".join(message.get("text", "") for message in again) == "again!"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("", None),
        ("nonsense", None),
        ("[]", None),
        ('"chat"', None),
        ("{}", "id"),
        ('{"id": "a"}', "type"),
        ('{"type": "dance", "id": "a"}', "type"),
        ('{"type": 5, "id": "a"}', "type"),
        ('{"type": ["chat"], "id": "a"}', "type"),
        ('{"type": "completion", "prompt": "x"}', "id"),
        ('{"type": "completion", "id": 5, "prompt": "x"}', "id"),
        ('{"type": "completion", "id": "", "prompt": "x"}', "id"),
        ('{"type": "completion", "id": "%s", "prompt": "x"}' % ("i" * 129), "id"),
        ('{"type": "completion", "id": "a"}', "prompt"),
        ('{"type": "completion", "id": "a", "messages": []}', "prompt"),
        ('{"type": "completion", "id": "a", "prompt": ["x", "y"]}', "prompt"),
        ('{"type": "chat", "id": "a", "prompt": "x"}', "messages"),
        ('{"type": "chat", "id": "a", "messages": [], "stream": true}', "messages"),
        ('{"type": "completion", "id": "a", "prompt": "x", "stream": true}', "stream"),
        ('{"type": "completion", "id": "a", "prompt": "x", "model": "other"}', "model"),
        ("[" * 100_000, None),
        (b'{"type": "stats"}', None),
        (b"\xff\x00", None),
    ],
)
async def test_a_bad_message_gets_a_failed_message_and_the_socket_stays(
    running: Running, message: str | bytes, param: str | None
) -> None:
    """API-07, API-10."""
    async with dial(running) as client:
        await client.send(message)
        (failed,) = await read_until(client, lambda message: True)
        assert (failed["type"], failed["param"]) == ("failed", param)
        assert (await ask(client, type="completion", id="ok", prompt="x"))[-1]["type"] == "finished"
    assert len(running.engine.requests) == 1


@pytest.mark.parametrize(("extra", "is_taken"), [(-1, True), (0, True), (1, False), (9000, False)])
@pytest.mark.parametrize("is_fragmented", [False, True])
async def test_a_message_above_the_limit_closes_with_1009(extra: int, is_taken: bool, is_fragmented: bool) -> None:
    """API-07: also when only the sum of its fragments is above it; other sockets go on."""
    head, tail = '{"type":"completion","id":"a","prompt":"', '"}'
    text = head + "x" * (1000 + extra - len(head) - len(tail)) + tail
    async with serving(max_message_bytes=1000) as running, dial(running) as other, dial(running) as client:
        await client.send([text[:300], text[300:600], text[600:]] if is_fragmented else text)
        if is_taken:
            await read_until(client, lambda message: message["type"] == "finished")
        else:
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await asyncio.wait_for(client.recv(), 10)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        assert (await ask(other, type="completion", id="ok", prompt="x"))[-1]["type"] == "finished"


async def test_text_that_is_not_utf8_closes_with_1007(running: Running) -> None:
    async with dial(running) as client:
        await client.send(b"\xff\xfe", text=True)
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await asyncio.wait_for(client.recv(), 10)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007


async def test_compression_is_not_negotiated(running: Running) -> None:
    async with dial(running, compression="deflate") as client:
        assert client.protocol.extensions == []


async def test_an_engine_error_ends_one_answer_and_not_the_socket(running: Running) -> None:
    faults: dict[object, Exception] = {
        "long": ContextTooLong("too long", param="prompt"),
        "bug": RuntimeError("secret"),
    }

    def script(request: GenerateRequest) -> Any:
        yield from [faults[request.prompt]] if request.prompt in faults else spoken(request, ["fine"])

    running.engine.script = script
    async with dial(running) as client:
        (failed,) = await ask(client, type="completion", id="a", prompt="long")
        assert (failed["code"], failed["param"]) == ("context_length_exceeded", "prompt")
        (failed,) = await ask(client, type="completion", id="b", prompt="bug")
        assert (failed["code"], failed["message"]) == ("internal_error", "internal error")
        assert (await ask(client, type="completion", id="c", prompt="x"))[-1]["type"] == "finished"


@pytest.mark.parametrize("with_reset", [False, True])
async def test_a_socket_that_closes_aborts_its_answers(with_reset: bool) -> None:
    """API-03, API-04: fifty at once; no warning, no traceback."""
    never = asyncio.Event()
    with structlog.testing.capture_logs() as lines:
        async with serving(FakeEngine(lambda request: [[started(request)], never])) as running:
            clients = [await dial(running) for _ in range(50)]
            for client in clients:
                await client.send(json.dumps({"type": "completion", "id": "a", "prompt": "x"}))
            await running.engine.until(lambda engine: engine.num_running == 50)
            for client in clients:
                if with_reset:
                    client.transport.abort()
                else:
                    await client.close()
            await running.engine.until(lambda engine: engine.num_running == 0)
            assert running.engine.num_aborted == 50
    assert [line for line in lines if line["log_level"] != "info"] == []


async def test_a_client_that_ignores_pings_is_closed_and_its_answer_aborted() -> None:
    """API-06 (b), (c): a peer that says nothing for two heartbeats is dead."""
    never = asyncio.Event()
    engine = FakeEngine(lambda request: [[started(request)], never])
    async with serving(engine, heartbeat_s=0.1) as running, running.http.ws_connect("/ws", autoping=False) as client:
        await client.send_json({"type": "completion", "id": "a", "prompt": "x"})
        await engine.until(lambda engine: engine.num_running == 1)
        await engine.until(lambda engine: engine.num_running == 0)
    assert engine.num_aborted == 1


async def test_a_good_client_outlives_many_heartbeats() -> None:
    """API-06 (a): while an answer runs that sends nothing."""
    gate = asyncio.Event()
    engine = FakeEngine(lambda request: [gate, *spoken(request, ["late"])])
    async with serving(engine, heartbeat_s=0.05) as running, running.http.ws_connect("/ws", autoping=False) as client:
        await client.send_json({"type": "completion", "id": "a", "prompt": "x"})
        for _ in range(10):
            ping = await client.receive(timeout=10)
            assert ping.type is aiohttp.WSMsgType.PING
            await client.pong(ping.data)
        gate.set()
        kinds = []
        while "finished" not in kinds:
            message = await client.receive(timeout=10)
            if message.type is aiohttp.WSMsgType.TEXT:
                kinds.append(strict(message.data)["type"])
            else:
                await client.pong(message.data)
    assert kinds == ["started", "delta", "finished"]


async def test_a_client_that_never_reads_is_cut_with_1008_and_others_keep_streaming() -> None:
    """API-05: what the server holds for it is bounded."""
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
        host, port = running.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        async with dial(running, sock=sock, max_queue=1, ping_interval=None) as slow, dial(running) as other:
            slow.transport.pause_reading()
            await slow.send(json.dumps({"type": "completion", "id": "a", "prompt": "slow"}))
            await running.engine.until(lambda engine: engine.num_running == 1)
            for turn in range(20):
                assert (await ask(other, type="completion", id=str(turn), prompt="x"))[-1]["type"] == "finished"
            await running.engine.until(lambda engine: engine.num_aborted == 1)
            assert taken * 10_000 < 2 * 2**20
            slow.transport.resume_reading()
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await read_until(slow, lambda message: False)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "slow_consumer")


async def test_a_page_of_another_origin_may_not_open_a_socket() -> None:
    async with serving(allowed_origins=["https://chat.example"]) as running:
        for origin in (None, running.url, "https://chat.example"):
            async with dial(running, origin=origin) as client:
                assert (await ask(client, type="completion", id="a", prompt="x"))[-1]["type"] == "finished"
        for origin in ("https://evil.example", "null", running.url + "1", "http://evil.example:80"):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await dial(running, origin=origin)
            assert refused.value.response.status_code == 403
            assert strict(bytes(refused.value.response.body or b""))["error"]["code"] == "forbidden_origin"


async def test_a_key_is_taken_as_header_or_subprotocol() -> None:
    async with serving(api_key="sesame") as running:
        ways: list[dict[str, Any]] = [
            {"additional_headers": {"Authorization": "Bearer sesame"}},
            {"subprotocols": ["looseleaf", "bearer.sesame"]},
        ]
        for way in ways:
            async with dial(running, **way) as client:
                assert (await ask(client, type="completion", id="a", prompt="x"))[-1]["type"] == "finished"
        for way in ({}, {"subprotocols": ["looseleaf", "bearer.guess"]}):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await dial(running, **way)
            assert refused.value.response.status_code == 401


async def test_a_plain_get_of_the_socket_path_is_a_400_in_the_common_shape(running: Running) -> None:
    async with running.http.get("/ws") as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_request"
