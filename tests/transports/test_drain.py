"""Shutting down: what is idle closes at once, what is short ends by itself, what is long is cut with an error event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from service.config import Config
from service.messages import Event, GenerateRequest
from service.transports.http import ANSWERS, create_app
from tests.transports.conftest import serving, strict
from tests.transports.fake_engine import FakeEngine, spoken, started

COMPLETIONS = "/v1/completions"


async def test_a_drain_stops_accepting_and_closes_idle_connections_at_once() -> None:
    """OPS-03: an idle keep-alive connection and an idle WebSocket hold up nothing."""
    async with serving() as running:
        assert (await running.http.get("/healthz")).status == 200  # leaves a kept-alive connection
        async with running.http.ws_connect("/ws") as socket:
            async with asyncio.timeout(5):
                draining = asyncio.create_task(running.server.drain(60))
                message = await socket.receive()
                await draining
            assert message.type is aiohttp.WSMsgType.CLOSE
            assert (message.data, message.extra) == (1001, "server shutdown")
        with pytest.raises(aiohttp.ClientConnectionError):
            await running.http.get("/healthz")


async def test_a_short_stream_ends_whole_during_a_drain() -> None:
    """OPS-03."""
    gate = asyncio.Event()
    async with serving(FakeEngine(lambda request: spoken(request, ["a", "b"], pause=gate))) as running:
        stream = asyncio.create_task(running.sse(COMPLETIONS, {"prompt": "x"}))
        whole = asyncio.create_task(running.post(COMPLETIONS, {"prompt": "x"}))
        await running.engine.until(lambda engine: engine.num_running == 2)
        draining = asyncio.create_task(running.server.drain(60))
        await asyncio.sleep(0)
        gate.set()
        await draining
        assert (await stream)[-1] == "[DONE]"
        assert (await whole)[1]["choices"][0]["text"] == "ab"
    assert running.engine.num_finished == 2


async def test_a_long_stream_is_cut_with_an_error_event_and_a_whole_answer_with_503() -> None:
    """OPS-03, mechanism 30."""
    never = asyncio.Event()
    async with serving(FakeEngine(lambda request: spoken(request, ["a", "b"], pause=never))) as running:
        stream = asyncio.create_task(running.sse(COMPLETIONS, {"prompt": "x"}))
        batch = asyncio.create_task(running.sse(COMPLETIONS, {"prompt": ["x", "y"]}))
        whole = asyncio.create_task(running.post(COMPLETIONS, {"prompt": "x"}))
        await running.engine.until(lambda engine: engine.num_running == 5 - 1)
        await running.server.drain(0.01)
        await running.server.stop()
        for events in (await stream, await batch):
            assert events[-1]["error"]["code"] == "draining"
        status, body = await whole
        assert (status, body["error"]["code"]) == (503, "draining")
    assert running.engine.num_aborted == 4


async def test_while_draining_a_busy_socket_gets_refusals_can_cancel_and_is_closed_after_its_last_answer() -> None:
    """OPS-03: connections that are busy when the drain begins can still ask."""
    gate = asyncio.Event()
    engine = FakeEngine(lambda request: spoken(request, ["a", "b"], pause=gate))
    async with serving(engine) as running, running.http.ws_connect("/ws") as socket:

        async def until(message_id: str, kind: str) -> dict[str, Any]:
            while True:
                message: dict[str, Any] = strict((await socket.receive(timeout=10)).data)
                if (message["id"], message["type"]) == (message_id, kind):
                    return message

        for message_id in ("a", "b"):
            await socket.send_json({"type": "completion", "id": message_id, "prompt": "x"})
        await engine.until(lambda engine: engine.num_running == 2)
        draining = asyncio.create_task(running.server.drain(60))
        await asyncio.sleep(0)
        await socket.send_json({"type": "completion", "id": "c", "prompt": "y"})
        assert (await until("c", "failed"))["code"] == "draining"
        await socket.send_json({"type": "cancel", "id": "b"})
        assert (await until("b", "failed"))["code"] == "aborted"
        gate.set()
        await until("a", "finished")
        assert (await socket.receive(timeout=10)).data == 1001
        await draining


async def test_readiness_is_gone_for_whoever_still_has_a_connection() -> None:
    """Mechanism 30: not ready comes first."""
    app = create_app(FakeEngine(), Config(), metrics_text=bytes, page={})
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/readyz")).status == 200
        app[ANSWERS].is_draining = True
        response = await client.get("/readyz")
        assert (response.status, (await response.json())["reason"]) == (503, "draining")
        assert (await client.get("/healthz")).status == 200


async def test_a_long_websocket_answer_is_cut_with_a_failed_message_before_1001() -> None:
    """OPS-03."""
    never = asyncio.Event()

    def script(request: GenerateRequest) -> Any:
        yield [started(request)]
        yield never

    async with serving(FakeEngine(script)) as running, running.http.ws_connect("/ws") as socket:
        await socket.send_json({"type": "completion", "id": "a", "prompt": "x"})
        assert strict((await socket.receive(timeout=10)).data)["type"] == "started"
        draining = asyncio.create_task(running.server.drain(0.01))
        failed = strict((await socket.receive(timeout=10)).data)
        assert (failed["type"], failed["id"], failed["code"]) == ("failed", "a", "draining")
        assert (await socket.receive(timeout=10)).data == 1001
        await draining


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_without_a_drain_ends_what_runs_with_an_error(is_stream: bool) -> None:
    """OPS-03: what a second signal does."""
    never = asyncio.Event()
    async with serving(FakeEngine(lambda request: spoken(request, ["a", "b"], pause=never))) as running:

        async def ask() -> str:
            async with running.http.post(COMPLETIONS, json={"prompt": "x", "stream": is_stream}) as response:
                return await response.text()

        asked = asyncio.create_task(ask())
        await running.engine.until(lambda engine: engine.num_running == 1)
        async with asyncio.timeout(5):
            await running.server.stop()
        await running.engine.until(lambda engine: engine.num_running == 0)
        assert '"code":"draining"' in await asked


async def test_an_engine_that_does_not_let_go_does_not_hold_up_the_exit() -> None:
    """OPS-03: the drain has an end whatever happens."""
    never = asyncio.Event()

    class Stubborn(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
            try:
                yield [started(request)]
                await never.wait()
            finally:
                with contextlib.suppress(asyncio.CancelledError):
                    await never.wait()

    async with serving(Stubborn()) as running:
        asked = asyncio.create_task(running.post(COMPLETIONS, {"prompt": "x"}))
        await asyncio.sleep(0)
        async with running.http.ws_connect("/ws") as socket:
            await socket.send_json({"type": "completion", "id": "a", "prompt": "x"})
            await socket.receive(timeout=10)
            async with asyncio.timeout(10):
                await running.server.drain(0.01)
                await running.server.stop()
        await asyncio.gather(asked, return_exceptions=True)
