"""The whole service in this process: a tiny checkpoint behind every door, so that what a wire says is what the model's own tokens show.

A door is one way to ask: chat or completion, over HTTP, the WebSocket or RPC. Whatever the door, an `Outcome` says the same things, so that
a test can be written once for all of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from service.app import EngineSeat
from service.assembly import Assembly, assemble
from service.client import RpcClient
from service.config import Config
from service.engine.async_engine import AsyncEngine
from service.engine.executor import StepExecutor
from service.errors import LooseleafError
from service.messages import Delta, Failed, Finished, Started
from service.transports.http import HttpServer, create_app
from service.transports.rpc import RpcServer
from tests.factories import GOLDEN

PROMPT = "The cat sat"
CHAT_DOORS = ("http chat", "ws chat", "rpc chat")
COMPLETION_DOORS = ("http completion", "ws completion", "rpc completion")
DOORS = (*CHAT_DOORS, *COMPLETION_DOORS)


@dataclass
class Outcome:
    """What one request got: lists by choice, or an error."""

    error: Failed | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    num_logprobs: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    num_completion_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the only choice."""
        assert self.error is None, self.error
        (text,) = self.texts
        return text

    @property
    def ids(self) -> list[int]:
        """The tokens of the only choice."""
        assert self.error is None, self.error
        (ids,) = self.token_ids
        return ids


Door = Callable[[dict[str, Any]], Awaitable[Outcome]]


@dataclass
class TinyService:
    """A running service. `ask` sends fields through a door; `http` and `rpc_address` are for tests that look closer."""

    assembly: Assembly
    engine: AsyncEngine
    http: aiohttp.ClientSession
    url: str
    rpc_address: str
    doors: Mapping[str, Door]

    async def ask(self, door: str, **fields: Any) -> Outcome:
        """Send the standard prompt, or the one in `fields`; greedy and of twelve tokens unless told otherwise."""
        content = fields.pop("content", PROMPT)
        asked = {"messages": [{"role": "user", "content": content}]} if "chat" in door else {"prompt": content}
        return await self.doors[door]({**asked, "temperature": 0, "max_tokens": 12, **fields})

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Send JSON, or bytes as they are; returns the status and the decoded answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            return response.status, strict(await response.read())

    async def sse(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Stream an answer; returns its events, with "[DONE]" as it is."""
        async with self.http.post(path, json={**body, "stream": True}) as response:
            text = await response.text()
            assert response.status == 200, text
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
        return [line if line == "[DONE]" else strict(line) for line in lines]


@asynccontextmanager
async def tiny_service(
    model: Path | str = "tiny-llama", /, *, rpc: str = "tcp:127.0.0.1:0", **sections: dict[str, Any]
) -> AsyncIterator[TinyService]:
    """Serve a checkpoint in float32 with these options (`cache={"num_blocks": 9}`); checks on leaving that no block is held."""
    path = GOLDEN / model if isinstance(model, str) else model
    options = {
        **sections,
        "model": {"path": str(path), "dtype": "float32", **sections.get("model", {})},
        "cache": {"num_blocks": 129, **sections.get("cache", {})},
        "server": {"port": 0, "rpc": rpc, **sections.get("server", {})},
    }
    config = msgspec.convert(options, Config)
    parts: list[Assembly] = []

    def build() -> Any:
        parts.append(assemble(config, lambda phase: None))
        return parts[0].runner

    executor = StepExecutor(build)
    await executor.start()
    (assembly,) = parts
    engine = AsyncEngine(
        assembly.core,
        executor,
        assembly.tokenizer,
        assembly.template,
        info=assembly.info,
        eos_ids=assembly.eos_ids,
    )
    await engine.start()
    seat = EngineSeat(config)
    seat.fill(engine)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        http = HttpServer(create_app(seat, config, metrics_text=bytes), config.server)
        rpc_server = RpcServer(seat, config.server)
        for server in (http, rpc_server):
            await server.start()
            stack.push_async_callback(server.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession(http.url))
        client = await stack.enter_async_context(RpcClient(rpc_server.address))
        socket = await stack.enter_async_context(session.ws_connect("/ws"))
        doors = {
            "http chat": lambda fields: _over_http(session, "/v1/chat/completions", fields),
            "http completion": lambda fields: _over_http(session, "/v1/completions", fields),
            "ws chat": lambda fields: _over_websocket(socket, "chat", fields),
            "ws completion": lambda fields: _over_websocket(socket, "completion", fields),
            "rpc chat": lambda fields: _over_rpc(client, fields),
            "rpc completion": lambda fields: _over_rpc(client, fields),
        }
        yield TinyService(assembly, engine, session, http.url, rpc_server.address, doors)
    assembly.core.check()
    assert assembly.core.is_idle
    assert assembly.core.stats().pool.used == 0


def copy_checkpoint(folder: Path, name: str = "tiny-llama", **files: dict[str, Any] | None) -> Path:
    """Copy a checkpoint and change keys of its JSON files (`config={"eos_token_id": 4}`); None removes a file, a key of None removes the key."""
    shutil.copytree(GOLDEN / name, folder)
    for file, changes in files.items():
        path = folder / f"{file}.json"
        if changes is None:
            path.unlink()
            continue
        content = {**json.loads(path.read_text(encoding="utf-8")), **changes}
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), encoding="utf-8")
    return folder


def strict(text: str | bytes) -> Any:
    """Decode JSON; NaN and Infinity fail."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def _over_http(session: aiohttp.ClientSession, path: str, fields: dict[str, Any]) -> Outcome:
    async with session.post(path, json={**fields, "return_token_ids": True}) as response:
        body = strict(await response.read())
    if response.status != 200:
        error = body["error"]
        return Outcome(error=Failed(code=error["code"], message=error["message"], param=error["param"]))
    outcome = Outcome(num_completion_tokens=body["usage"]["completion_tokens"])
    outcome.prompt_ids = body.get("prompt_token_ids") or body["choices"][0].get("prompt_token_ids")
    for choice in body["choices"]:
        outcome.texts.append(choice["message"]["content"] if "message" in choice else choice["text"])
        outcome.token_ids.append(choice["token_ids"])
        outcome.reasons.append(choice["finish_reason"])
        logprobs = choice["logprobs"] or {}
        outcome.num_logprobs.append(len(logprobs.get("content") or logprobs.get("tokens") or ()))
    return outcome


async def _over_websocket(socket: aiohttp.ClientWebSocketResponse, kind: str, fields: dict[str, Any]) -> Outcome:
    await socket.send_json({"type": kind, "id": "a", **fields})
    events: list[Any] = []
    while not events or isinstance(events[-1], Started | Delta):
        message = strict((await socket.receive(timeout=30)).data)
        assert message.pop("id") == "a"
        events.append(msgspec.convert(message, Started | Delta | Finished | Failed))
    return _outcome(events)


async def _over_rpc(client: RpcClient, fields: dict[str, Any]) -> Outcome:
    try:
        return _outcome([event async for event in client.generate(**fields)])
    except LooseleafError as error:
        return Outcome(error=Failed.from_error(error))


def _outcome(events: list[Any]) -> Outcome:
    outcome = Outcome()
    for event in events:
        if isinstance(event, Failed):
            outcome.error = event
        elif isinstance(event, Started):
            outcome.prompt_ids = list(event.prompt_token_ids)
        elif isinstance(event, Finished):
            outcome.num_completion_tokens = event.usage.completion_tokens
        else:
            while len(outcome.texts) <= event.index:
                outcome.texts.append("")
                outcome.token_ids.append([])
                outcome.reasons.append(None)
                outcome.num_logprobs.append(0)
            outcome.texts[event.index] += event.text
            outcome.token_ids[event.index] += event.token_ids
            outcome.num_logprobs[event.index] += len(event.logprobs or ())
            outcome.reasons[event.index] = event.finish_reason or outcome.reasons[event.index]
    return outcome
