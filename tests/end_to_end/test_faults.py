"""Faults from outside against a real process: clients that vanish, malformed requests, a full pool, a signal under load.

After each the pool is whole, nothing runs or waits, and the log has no traceback. The model is a tiny random one, so that the engine is
never the bottleneck; `LOOSELEAF_HOSTILE_COUNT=10000` runs the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.client import RpcClient
from tests.end_to_end.server import Server, running, start
from tests.transports.hostile import attack_http, attack_rpc, attack_websocket

COUNT = int(os.environ.get("LOOSELEAF_HOSTILE_COUNT", "300"))
MAX_MESSAGE = 100_000
PROMPT = "The cat sat on the mat. "


@pytest.fixture(scope="module")
def tiny(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = str(data / "golden" / "tiny-llama")
    options = ["--num-blocks", "65", "--block-size", "8", "--server.max-message-bytes", str(MAX_MESSAGE)]
    with running(tmp_path_factory.mktemp("faults"), "--model", model, *options) as server:
        yield server


def body(**fields: Any) -> dict[str, Any]:
    """A long greedy stream unless told otherwise."""
    return {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True, **fields}


async def hang_up(server: Server, reset: bool) -> None:
    """Open a stream, read its first bytes and go: with a FIN, or with a RST."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    content = json.dumps(body()).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await reader.read(20)
    if reset:
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def collect(server: Server, outcomes: list[str], **fields: Any) -> None:
    """Run one stream to its end and note how it ended: a finish reason, an error's code, or "refused" if it was never accepted."""
    async with aiohttp.ClientSession() as session:
        try:
            answer = await session.post(server.url + "/v1/completions", json=body(**fields))
        except aiohttp.ClientConnectionError:
            outcomes.append("refused")
            return
        async with answer:
            outcomes.append(await read_end(answer))


async def read_end(answer: aiohttp.ClientResponse) -> str:
    if answer.status != 200:
        return str((await answer.json())["error"]["code"])
    ends = []
    async for line in answer.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            ends.append(event["error"]["code"])
        else:
            ends += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
    return str(ends[0]) if len(ends) == 1 else f"{len(ends)} ends"


async def test_clients_that_vanish_give_their_blocks_back(tiny: Server) -> None:
    """API-03, API-04: fifty at once, half of them by reset."""
    await asyncio.gather(*(hang_up(tiny, reset=i % 2 == 0) for i in range(50)))
    stats = await asyncio.to_thread(tiny.wait_until_idle)
    assert stats["pool"]["used"] == 0


async def test_a_killed_rpc_client_gives_its_blocks_back(tiny: Server) -> None:
    client = RpcClient(tiny.rpc)
    await client.connect()
    streams = [client.generate(prompt=PROMPT, max_tokens=400, ignore_eos=True) for _ in range(8)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    await client.close()
    await asyncio.to_thread(tiny.wait_until_idle)


async def test_a_full_pool_ends_every_request_once_and_becomes_whole(tiny: Server) -> None:
    """The pool holds 512 tokens; sixteen streams of 120 tokens fight for it."""
    before = tiny.stats()
    outcomes: list[str] = []
    await asyncio.gather(*(collect(tiny, outcomes, prompt=f"{i}. {PROMPT}", max_tokens=120) for i in range(16)))
    after = await asyncio.to_thread(tiny.wait_until_idle)
    assert outcomes == ["length"] * 16
    assert after["preemptions"] > before["preemptions"]
    assert after["pool"]["cached"] + after["pool"]["free"] == after["pool"]["total"]


async def test_malformed_requests_on_every_wire_harm_nobody(tiny: Server) -> None:
    """API-01 to API-12: hostile input on three wires beside a neighbour whose text must not change."""
    expected: list[str] = []
    async with RpcClient(tiny.rpc) as neighbour:
        expected.append(await neighbour.complete(PROMPT, max_tokens=16, temperature=0))
        attacks = asyncio.gather(
            attack_http(tiny.url, count=COUNT),
            attack_websocket(tiny.url, count=COUNT, max_message_bytes=MAX_MESSAGE),
            attack_rpc(tiny.rpc, count=COUNT, max_message_bytes=MAX_MESSAGE),
        )
        num_answers = 0
        while not attacks.done():
            assert await neighbour.complete(PROMPT, max_tokens=16, temperature=0) == expected[0]
            num_answers += 1
        reports = await attacks
    assert num_answers > 0
    assert [report.total for report in reports] == [COUNT] * 3
    await asyncio.to_thread(tiny.wait_until_idle)


async def test_a_signal_under_load_ends_every_stream_with_one_finish_or_one_error(data: Path, tmp_path: Path) -> None:
    """OPS-03: short answers finish, long ones are cut at the limit with an error event; exit code 0."""
    model = str(data / "golden" / "tiny-llama")
    server = start(tmp_path, "--model", model, "--server.drain-s", "1.0", "--max-num-seqs", "4")
    await asyncio.to_thread(server.wait_until_ready)
    outcomes: list[str] = []
    first = asyncio.Event()
    streams = [
        asyncio.create_task(collect(server, outcomes, prompt=f"{i}. {PROMPT}", max_tokens=8 if i % 2 else 480))
        for i in range(60)
    ]
    for stream in streams:
        stream.add_done_callback(lambda _: first.set())
    await first.wait()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*streams)
    code = await asyncio.to_thread(server.process.wait, 20)
    assert code == 0
    assert set(outcomes) <= {"length", "draining", "refused"}
    assert {"length", "draining"} <= set(outcomes)
    assert len(outcomes) == 60
    await asyncio.to_thread(server.assert_nothing_left)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_the_process_at_once(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """OPS-04."""
    server = start(tmp_path, "--model", str(data / "golden" / "tiny-llama"))
    while "service.listening" not in server.log.read_text():
        assert server.process.poll() is None, server.log.read_text()
    assert server.stop(number, limit_s=5.0) == 0
    server.assert_nothing_left()


def test_a_second_server_on_the_same_port_refuses_in_one_line(tiny: Server, data: Path, tmp_path: Path) -> None:
    """OPS-06: and leaves the first one alone."""
    port = tiny.url.rsplit(":", 1)[1]
    second = start(tmp_path, "--model", str(data / "golden" / "tiny-llama"), "--port", port)
    assert second.process.wait(timeout=20) == 2
    last = second.log.read_text().strip().splitlines()[-1]
    assert last.startswith("looseleaf: ")
    assert port in last
    assert tiny.get("/readyz")[0] == 200
