"""Hundreds of malformed requests over every wire, beside neighbours whose answers must not change.

`LOOSELEAF_HOSTILE_COUNT=10000` runs the long form.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import structlog

from service.client import RpcClient
from tests.transports.conftest import rpc_serving, serving
from tests.transports.fake_engine import FakeEngine
from tests.transports.hostile import HostileReport, attack_http, attack_rpc, attack_websocket

COUNT = int(os.environ.get("LOOSELEAF_HOSTILE_COUNT", "400"))
LIMIT = 100_000


@pytest.fixture
async def logs(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Fail when anything was logged above info: a malformed request is no event for the server's owner."""
    caplog.set_level(logging.INFO)
    with structlog.testing.capture_logs() as lines:
        yield
    assert [line for line in lines if line["log_level"] not in ("debug", "info")] == []
    records = caplog.get_records("call")
    assert [record.getMessage() for record in records if record.levelno >= logging.WARNING] == []


async def beside_neighbours(
    attack: Coroutine[Any, Any, HostileReport], engine: FakeEngine, neighbour_address: str
) -> HostileReport:
    """Run `attack` while a neighbour asks and asks; every one of its answers must be right."""
    task = asyncio.create_task(attack)
    num_answers = 0
    async with RpcClient(neighbour_address) as neighbour:
        while not task.done():
            assert await neighbour.complete("x") == "Hello, world"
            num_answers += 1
            await asyncio.sleep(0)
    report = await task
    assert num_answers > 0
    assert report.total == COUNT
    # The neighbour's requests are the only ones that ever reached the engine.
    assert len(engine.requests) == engine.num_finished == num_answers
    assert engine.num_running == engine.num_aborted == engine.num_failed == 0
    return report


@pytest.mark.usefixtures("logs")
async def test_malformed_http_requests_harm_nobody() -> None:
    engine = FakeEngine()
    async with serving(engine) as running, rpc_serving(engine, "tcp:127.0.0.1:0") as rpc:
        report = await beside_neighbours(attack_http(running.url, count=COUNT), engine, rpc.address)
    assert report.kinds >= {"fields", "json", "type", "method", "path", "line", "length", "chunk", "cut"}


@pytest.mark.usefixtures("logs")
async def test_malformed_websocket_messages_harm_nobody() -> None:
    engine = FakeEngine()
    async with serving(engine, max_message_bytes=LIMIT) as running, rpc_serving(engine, "tcp:127.0.0.1:0") as rpc:
        attack = attack_websocket(running.url, count=COUNT, max_message_bytes=LIMIT)
        report = await beside_neighbours(attack, engine, rpc.address)
    assert report.kinds >= {"fields", "json", "envelope", "binary", "large", "utf8"}


@pytest.mark.usefixtures("logs")
async def test_malformed_rpc_frames_harm_nobody(address: str) -> None:
    engine = FakeEngine()
    async with rpc_serving(engine, address, max_message_bytes=LIMIT) as server:
        attack = attack_rpc(server.address, count=COUNT, max_message_bytes=LIMIT)
        report = await beside_neighbours(attack, engine, server.address)
    assert report.kinds >= {"fields", "body", "call", "length", "hello", "cut"}
