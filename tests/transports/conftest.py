"""A real server on loopback over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop

from service.config import Config, ServerConfig
from service.transports.http import HttpServer, create_app
from service.transports.rpc import RpcServer
from tests.transports.fake_engine import FakeEngine

PAGE = {"index.html": b"<!doctype html><title>t</title>", "chat.js": b"//", "chat.css": b"body{}"}


@dataclass(frozen=True)
class Running:
    """A server, its engine and a client of it."""

    server: HttpServer
    engine: FakeEngine
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self.server.url

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Send a JSON body; returns the status and the decoded answer."""
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def sse(self, path: str, body: dict[str, object]) -> list[Any]:
        """Stream an answer; returns the decoded events, with "[DONE]" as it is."""
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return events_of(await response.text())


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, **options: object) -> AsyncIterator[Running]:
    """Serve `engine` with these server options."""
    config = Config(server=msgspec.convert({"port": 0, **options}, ServerConfig))
    engine = engine or FakeEngine()
    app = create_app(engine, config, metrics_text=lambda: b"looseleaf_up 1\n", page=PAGE)
    server = HttpServer(app, config.server)
    await server.start()
    try:
        async with aiohttp.ClientSession(server.url) as http:
            yield Running(server=server, engine=engine, http=http)
    finally:
        await server.stop()


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Test on the loop that the service runs on, and what other programs import on asyncio's own as well."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.path.stem in ("test_rpc_client", "test_drain"):
        loops["asyncio"] = asyncio.new_event_loop
    return loops


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with serving() as server:
        yield server


@asynccontextmanager
async def rpc_serving(engine: FakeEngine, address: str, **options: object) -> AsyncIterator[RpcServer]:
    """Serve `engine` over RPC with these server options."""
    server = RpcServer(engine, msgspec.convert({"rpc": address, **options}, ServerConfig))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'l.sock'}" if request.param == "unix" else "tcp:127.0.0.1:0"


def events_of(text: str) -> list[Any]:
    """Decode a stream of server-sent events with a parser that takes strict JSON only."""
    datas = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [data if data == "[DONE]" else strict(data) for data in datas]


def strict(text: str | bytes) -> Any:
    """Decode JSON; NaN and Infinity fail."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
