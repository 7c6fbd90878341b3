"""Long messages are decoded beside the event loop, one at a time, and everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from service.errors import InvalidRequest
from service.transports import chat_ws, openai, rpc
from service.transports.decoding import INLINE_BYTES, MAX_CONTAINERS, MessageDecoder
from service.transports.strict_json import decode_object
from tests.transports.conftest import rpc_serving, serving, strict
from tests.transports.fake_engine import FakeEngine
from tests.transports.wires import RpcWire

LONG = "x" * (INLINE_BYTES + 1)


class Watch:
    """Stands in front of every decoder: notes the thread of each call, and holds those on a thread while `may_go` is unset."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.entered = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.may_go.set()
        for module, name in ((openai, "decode_object"), (chat_ws, "decode_object"), (rpc, "_decode")):
            patch.setattr(module, name, self.watched(getattr(module, name)))

    def watched(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        def decoded(body: bytes | str, **options: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            if threading.current_thread() is not threading.main_thread():
                self.entered.release()
                assert self.may_go.wait(10)
            return decode(body, **options)

        return decoded

    @property
    def on_a_thread(self) -> list[bool]:
        return [name.startswith("looseleaf-decode") for name in self.threads]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watching = Watch(monkeypatch)
    yield watching
    watching.may_go.set()


async def test_short_bodies_are_decoded_at_once_and_long_ones_on_a_thread_over_http(watch: Watch) -> None:
    """API-09."""
    async with serving() as running:
        for prompt in ("x", LONG):
            assert (await running.post("/v1/completions", {"prompt": prompt}))[0] == 200
        assert (await running.post("/v1/completions", {"prompt": LONG, "n": 0}))[0] == 400
        async with running.http.post(
            "/v1/completions", data=LONG.encode(), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 400
    assert watch.on_a_thread == [False, True, True, True]
    assert running.engine.requests[1].prompt == LONG


async def test_everybody_else_is_served_while_long_messages_are_decoded(watch: Watch) -> None:
    """API-09, OPS-02: four long bodies, a long socket message and a long frame wait for one thread; short ones pass them."""
    watch.may_go.clear()
    engine = FakeEngine()
    async with (
        serving(engine) as running,
        rpc_serving(engine, "tcp:127.0.0.1:0") as server,
        RpcWire(server.address) as wire,
        RpcWire(server.address) as neighbour,
        running.http.ws_connect("/ws") as socket,
    ):
        posts = [asyncio.create_task(running.post("/v1/completions", {"prompt": LONG})) for _ in range(4)]
        await socket.send_json({"type": "completion", "id": "long", "prompt": LONG})
        wire.send({"id": 1, "method": "generate", "params": {"prompt": LONG}})
        for _ in range(2):  # one for HTTP and its sockets, one for RPC
            assert await asyncio.to_thread(watch.entered.acquire, timeout=10)
        for _ in range(3):
            assert (await running.http.get("/healthz")).status == 200
            assert (await running.post("/v1/completions", {"prompt": "short"}))[0] == 200
            assert "error" not in await neighbour.ask(id=1, method="generate", params={"prompt": "short"})
        assert {request.prompt for request in engine.requests} == {"short"}
        watch.may_go.set()
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 4
        assert strict((await socket.receive(timeout=10)).data)["type"] == "started"
        assert (await wire.receive())["events"][0]["type"] == "started"
    assert len(engine.requests) == 6 + 6


async def test_calls_behind_a_long_frame_keep_their_order(address: str, watch: Watch) -> None:
    """A cancel must not pass the call that it is about."""
    never = asyncio.Event()
    engine = FakeEngine(lambda request: [never])
    async with rpc_serving(engine, address) as server, RpcWire(server.address) as wire:
        wire.send({"id": 7, "method": "generate", "params": {"prompt": LONG}})
        wire.send({"id": 8, "method": "cancel", "params": {"id": 7}})
        wire.send({"id": 9, "method": "nonsense", "params": {"x": LONG}})
        wire.send({"id": 10, "method": "stats"})
        replies = {(reply := await wire.receive())["id"]: reply for _ in range(4)}
        assert replies[7]["error"]["code"] == "aborted"
        assert replies[8]["result"] == {"cancelled": True}
        assert replies[9]["error"]["code"] == "not_found"
        assert "result" in replies[10]
        wire.send_body(b"\xc1" + LONG.encode())
        assert (await wire.receive())["error"]["code"] == "invalid_request"
        wire.send({"id": 11, "method": "stats"})
        assert "result" in await wire.receive()
    assert watch.on_a_thread.count(True) >= 3


async def test_a_client_that_leaves_while_its_frame_is_decoded_leaves_nothing_behind(
    address: str, watch: Watch
) -> None:
    engine = FakeEngine()
    async with rpc_serving(engine, address) as server, RpcWire(server.address) as neighbour:
        watch.may_go.clear()
        async with RpcWire(server.address) as wire:
            wire.send({"id": 1, "method": "generate", "params": {"prompt": LONG}})
            assert await asyncio.to_thread(watch.entered.acquire, timeout=10)
        watch.may_go.set()
        assert "error" not in await neighbour.ask(id=1, method="generate", params={"prompt": LONG})
        await engine.until(lambda engine: engine.num_running == 0)


async def test_a_server_that_stops_while_it_decodes_stops(address: str, watch: Watch) -> None:
    """OPS-03."""
    watch.may_go.clear()
    async with rpc_serving(FakeEngine(), address) as server, RpcWire(server.address) as wire:
        wire.send({"id": 1, "method": "generate", "params": {"prompt": LONG}})
        assert await asyncio.to_thread(watch.entered.acquire, timeout=10)
        async with asyncio.timeout(5):
            await server.stop()
        with pytest.raises(asyncio.IncompleteReadError):
            await wire.receive()


async def test_what_a_decoder_raises_is_raised_from_the_thread_too() -> None:
    decoder = MessageDecoder()
    assert await decoder.run(decode_object, json.dumps({"a": LONG}).encode()) == {"a": LONG}
    for body in (b"{", b'{"a": "' + LONG.encode()):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            await decoder.run(decode_object, body)
    decoder.close()


@pytest.mark.parametrize(("count", "is_taken"), [(MAX_CONTAINERS - 1, True), (MAX_CONTAINERS, False), (300_000, False)])
@pytest.mark.parametrize("piece", ["[]", '{"a":1}', "[[]]"])
async def test_a_message_of_very_many_lists_and_objects_is_refused(count: int, is_taken: bool, piece: str) -> None:
    """API-09: what reads them further in would take seconds, on a thread or not."""
    decoder = MessageDecoder()
    count = count // piece.count("[") if piece == "[[]]" else count
    text = '{"a":[%s]}' % ",".join([piece] * count)  # noqa: UP031 - braces
    if is_taken:
        assert len((await decoder.run(decode_object, text))["a"]) == count
    else:
        with pytest.raises(InvalidRequest, match="more than 100000 lists and objects"):
            await decoder.run(decode_object, text)
    decoder.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (
            r'{"\ud83d": "\udc00", "b": ["\uD83D\uDE00", {"c": "\\ud83d"}]}',
            {"\ufffd": "\ufffd", "b": ["😀", {"c": "\\ud83d"}]},
        ),
        (r'{"a": "\ud83d\ud83d\ude00\ude00"}', {"a": "\ufffd😀\ufffd"}),
        ('{"a": 1e308, "b": -0, "c": 18446744073709551616, "d": null}', {"a": 1e308, "b": 0, "c": 2**64, "d": None}),
    ],
)
def test_strict_json_says_what_other_parsers_say_where_they_agree(text: str, value: dict[str, Any]) -> None:
    """API-08, API-10."""
    assert decode_object(text) == decode_object(text.encode()) == value
    if "\\ud" not in text:
        assert msgspec.json.decode(text) == value


@pytest.mark.parametrize(
    "text", [r'{"\ud83d": 1, "\udc00": 2}', r'{"a": {"\ud83d": 1, "�": 2}}', '{"a": 1, "b": 2, "a": 3}']
)
def test_keys_that_are_one_after_mending_are_given_twice(text: str) -> None:
    """API-08."""
    with pytest.raises(InvalidRequest, match="given twice"):
        decode_object(text)
