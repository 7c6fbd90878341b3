"""Streaming chat over a WebSocket at `/ws`: many turns and several answers at once on one socket, as JSON text frames.

    client → {"type": "chat", "id": "a", "messages": […], …}       fields as in POST /v1/chat/completions, without `stream`
             {"type": "completion", "id": "b", "prompt": "…", …}   fields as in POST /v1/completions, one prompt
             {"type": "cancel", "id": "a"}                         the answer ends at once in failed/aborted
             {"type": "stats"}                                     an `id` is echoed
    server → {"id": "a", "type": "started" | "delta" | "finished" | "failed", …}   the events of `service.messages`; bytes as base64
             {"id": …, "type": "stats", "stats": {…}}

An `id` is chosen by the client, names an answer only while that runs and only on its own socket. A `failed` whose id is null is about a
message, not about an answer: invalid JSON, a binary frame, an unknown type, an id that is in use; the socket stays open after it.

Close codes: 1001 the server shuts down, 1007 text that is not UTF-8, 1008 the client did not read for `server.slow_consumer_s`, 1009 a
message above `server.max_message_bytes`. With an API key the handshake carries `Authorization: Bearer KEY`, or, from a browser, the
subprotocols `looseleaf` and `bearer.KEY`. A browser's Origin must be this server's own or in `server.allowed_origins`.

Invariant: reader and writer are separate tasks, so that a cancel and a pong are seen while answers stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import urlsplit

import structlog
from aiohttp import WSMessage, WSMsgType, web

from service.config import ServerConfig
from service.errors import (
    Draining,
    ForbiddenOrigin,
    InvalidRequest,
    LooseleafError,
    QueueFull,
    RequestAborted,
    SlowConsumer,
    Unauthorized,
)
from service.messages import EngineClient, Failed, GenerateRequest
from service.transports.answers import Answer, RunningAnswers, open_answer
from service.transports.decoding import MessageDecoder
from service.transports.fields import take_model, take_requests, without_nulls
from service.transports.keys import is_key, request_key
from service.transports.openai_types import encode
from service.transports.outbox import Outbox
from service.transports.request_id import REQUEST_ID
from service.transports.strict_json import decode_object, quoted

MAX_ID_CHARACTERS = 128
MAX_RUNNING = 128  # answers at once on one socket
CLOSE_TIMEOUT_S = 1.0
PROTOCOL = "looseleaf"

log = structlog.get_logger(__name__)


class ChatSockets:
    """Every open socket of the server."""

    def __init__(
        self, engine: EngineClient, config: ServerConfig, answers: RunningAnswers, decoder: MessageDecoder
    ) -> None:
        self._engine = engine
        self._config = config
        self._answers = answers
        self._decoder = decoder
        self._open: set[ChatSocket] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one socket until it closes."""
        check_origin(request, self._config.allowed_origins)
        if self._config.api_key is not None and not is_key(request_key(request), self._config.api_key):
            raise Unauthorized("the API key is missing or wrong")
        self._answers.begin().end()  # refuses while draining
        socket = ChatSocket(request, self._engine, self._config, self._answers, self._decoder)
        self._open.add(socket)
        try:
            return await socket.run()
        finally:
            self._open.discard(socket)

    async def drain(self) -> None:
        """Close each socket with 1001 once its answers have ended; their end is the drain limit's business."""
        await asyncio.gather(*(socket.drain() for socket in list(self._open)))

    async def close(self) -> None:
        """Close every socket with 1001 now."""
        closing = [socket.close(Draining.ws_close, b"server shutdown") for socket in list(self._open)]
        await asyncio.gather(*closing)


class ChatSocket:
    """One socket: a reader, a writer and a task for each answer."""

    def __init__(
        self,
        request: web.Request,
        engine: EngineClient,
        config: ServerConfig,
        answers: RunningAnswers,
        decoder: MessageDecoder,
    ) -> None:
        self._request = request
        self._engine = engine
        self._config = config
        self._answers = answers
        self._decoder = decoder
        self._outbox = Outbox()
        self._running: dict[str, tuple[Answer, asyncio.Task[None]]] = {}
        self._socket = web.WebSocketResponse(
            heartbeat=config.heartbeat_s,
            max_msg_size=config.max_message_bytes + 1,  # aiohttp refuses a message that reaches it
            compress=False,  # costs two to three times the CPU and state for each connection
            timeout=CLOSE_TIMEOUT_S,
            protocols=(PROTOCOL,),
        )

    async def run(self) -> web.WebSocketResponse:
        """Serve the socket; returns when either side closed it, after every answer has ended."""
        await self._socket.prepare(self._request)
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(group))
            writer = group.create_task(self._write())
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer, *(task for _, task in self._running.values())):
                task.cancel()
        log.info("socket.closed", request_id=self._request[REQUEST_ID], close_code=self._socket.close_code)
        return self._socket

    async def drain(self) -> None:
        """Let the answers end and be sent, then close with 1001."""
        tasks = [task for _, task in self._running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.slow_consumer_s):
                await self._outbox.wait_sent()
        await self.close(Draining.ws_close, b"server shutdown")

    async def close(self, code: int, message: bytes) -> None:
        """Send a close frame; a peer who does not take it is cut off a moment later."""
        transport = self._request.transport
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.close(code=code, message=message)
        if transport is not None:
            # The transport flushes before it closes, which a peer who never reads would delay for ever.
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, transport.abort)

    async def _read(self, group: asyncio.TaskGroup) -> None:
        async for message in self._socket:
            message_id: str | None = None
            try:
                fields = without_nulls(await self._decoder.run(_fields, _text(message)))
                kind = fields.pop("type", None)
                message_id = _take_id(fields, is_needed=kind != "stats")
                await self._receive(kind, message_id, fields, group)
            except LooseleafError as error:
                names_answer = message_id is not None and message_id not in self._running
                await self._outbox.put(_failed(message_id if names_answer else None, error))

    async def _receive(
        self, kind: object, message_id: str | None, fields: dict[str, Any], group: asyncio.TaskGroup
    ) -> None:
        if kind == "stats":
            stats = b'"type":"stats","stats":' + encode(self._engine.stats()) + b"}"
            await self._outbox.put(b'{"id":' + encode(message_id) + b"," + stats)
        elif kind == "cancel":
            if message_id in self._running:  # an answer that has just ended leaves nothing to cancel
                self._running[message_id][0].cut(RequestAborted("cancelled by the client"))
        elif kind in ("chat", "completion"):
            assert message_id is not None
            self._begin(message_id, fields, group, is_chat=kind == "chat")
        else:
            known = "'chat', 'completion', 'cancel' and 'stats'"
            raise InvalidRequest(f"type: {quoted(kind)} is not one of {known}", param="type")

    def _begin(self, message_id: str, fields: dict[str, Any], group: asyncio.TaskGroup, *, is_chat: bool) -> None:
        if message_id in self._running:
            raise InvalidRequest(f"id: {quoted(message_id)} is in use by an answer that still runs", param="id")
        if len(self._running) >= MAX_RUNNING:
            raise QueueFull(f"this socket has {MAX_RUNNING} answers running, the most it may have")
        take_model(fields, self._engine.stats().model)
        request = take_requests(fields, message_id, is_chat=is_chat)[0]
        answer = self._answers.begin()
        task = group.create_task(self._answer(message_id, request, answer))
        self._running[message_id] = answer, task
        task.add_done_callback(lambda _: self._end(message_id))

    def _end(self, message_id: str) -> None:
        answer, _ = self._running.pop(message_id)
        answer.end()

    async def _answer(self, message_id: str, request: GenerateRequest, answer: Answer) -> None:
        prefix = b'{"id":' + encode(message_id) + b","
        try:
            with answer:
                async with open_answer(self._engine, request) as stream:
                    async for events in stream:
                        # The id is spliced in front of the event's own fields, which begin with its type.
                        await self._outbox.put(*(prefix + encode(event)[1:] for event in events))
        except LooseleafError as error:
            await self._outbox.put(_failed(message_id, error))
        except Exception:
            log.exception("request.failed", request_id=self._request[REQUEST_ID])
            await self._outbox.put(_failed(message_id, LooseleafError("internal error")))

    async def _write(self) -> None:
        limit_s = self._config.slow_consumer_s
        try:
            while True:
                for payload in await self._outbox.take():
                    async with asyncio.timeout(limit_s):
                        await self._socket.send_frame(payload, WSMsgType.TEXT)
        except ConnectionError:
            pass  # the reader sees the end, too
        except TimeoutError:
            log.info("socket.dropped", request_id=self._request[REQUEST_ID], reason="slow_consumer")
            await self.close(SlowConsumer.ws_close, SlowConsumer.code.encode())


def check_origin(request: web.Request, allowed: tuple[str, ...]) -> None:
    """Refuse a browser's page of another origin, which could otherwise talk to a server on its user's own machine."""
    origin = request.headers.get("Origin")
    if origin is None or origin in allowed or (origin != "null" and urlsplit(origin).netloc == request.host):
        return
    raise ForbiddenOrigin(f"origin {quoted(origin)} may not open a WebSocket here (see server.allowed_origins)")


def _text(message: WSMessage) -> str:
    if message.type is not WSMsgType.TEXT:
        raise InvalidRequest("messages are JSON in text frames, this one is binary")
    return str(message.data)


def _fields(text: str) -> dict[str, Any]:
    return decode_object(text, what="the message")


def _take_id(fields: dict[str, Any], *, is_needed: bool) -> str | None:
    value = fields.pop("id", None)
    if value is None and not is_needed:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise InvalidRequest(f"id: expected text of 1 to {MAX_ID_CHARACTERS} characters", param="id")
    return value


def _failed(message_id: str | None, error: LooseleafError) -> bytes:
    return b'{"id":' + encode(message_id) + b"," + encode(Failed.from_error(error))[1:]
