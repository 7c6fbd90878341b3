"""The RPC server: many calls at once on one connection, over a Unix socket or TCP. `service.frames` says what travels.

Hostile input: a length above the limit is answered with an error and the connection closed without reading on; a body that is not
msgpack, is nested too deeply, has bytes after it or fields that are wrong is answered with an error and the connection stays usable, since
the frame was consumed whole. A long frame is decoded on a thread; what its connection sends after it waits, so that calls keep their order. A first frame that is no Hello, another version or a wrong key ends the connection.

Writes of one turn of the loop leave together. While a peer does not read, its answers are not taken from the engine, which merges them, and
its calls are not read; after `server.slow_consumer_s` the connection is cut. Invariant: a lost connection aborts its answers.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any, cast

import msgspec
import structlog
from msgspec import Struct

from service.config import ServerConfig
from service.errors import (
    InvalidRequest,
    LooseleafError,
    MessageTooLarge,
    QueueFull,
    RequestAborted,
    Unauthorized,
    UnknownRoute,
)
from service.frames import (
    PROTOCOL_VERSION,
    Call,
    CallId,
    FrameReader,
    Hello,
    Reply,
    UnixAddress,
    Welcome,
    encode_frame,
    parse_address,
)
from service.messages import EngineClient, Failed, GenerateRequest
from service.transports.answers import Answer, RunningAnswers, open_answer
from service.transports.decoding import INLINE_BYTES, MessageDecoder
from service.transports.fields import convert, refuse_rest, take, take_model, take_requests, without_nulls
from service.transports.keys import is_key
from service.transports.request_id import clean_request_id
from service.transports.server import SEND_BUFFER_BYTES, FileId, listen_tcp, listen_unix, unlink_own
from service.transports.strict_json import quoted

MAX_RUNNING = 1024  # answers at once on one connection
HANDSHAKE_TIMEOUT_S = 10.0
WRITE_HIGH_WATER_BYTES = 256 * 1024
CLOSE_TIMEOUT_S = 1.0

log = structlog.get_logger(__name__)


class RpcServer:
    """Listens at `config.rpc`; a `TransportServer`."""

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        assert config.rpc is not None, "no RPC address is configured"
        self._address = parse_address(config.rpc)
        self._engine = engine
        self._config = config
        self._answers = RunningAnswers()
        self._decoder = MessageDecoder()
        self._connections: set[RpcConnection] = set()
        self._listener: socket.socket | None = None
        self._file_id: FileId | None = None  # of the socket file, to remove no other server's
        self._server: asyncio.AbstractServer | None = None

    @property
    def address(self) -> str:
        """Where the server listens, with the port that was really taken."""
        assert self._listener is not None, "call bind first"
        if isinstance(self._address, UnixAddress):
            return f"unix:{self._address.path}"
        host, port = self._listener.getsockname()[:2]
        return f"tcp:{host}:{port}"

    def bind(self) -> None:
        """Take the address; raises `StartupError`."""
        if self._listener is not None:
            return
        if isinstance(self._address, UnixAddress):
            self._listener, self._file_id = listen_unix(self._address.path)
        else:
            self._listener = listen_tcp(self._address.host, self._address.port)

    async def start(self) -> None:
        """Accept connections."""
        self.bind()
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        if isinstance(self._address, UnixAddress):
            self._server = await loop.create_unix_server(self._connect, sock=self._listener)
        else:
            self._server = await loop.create_server(self._connect, sock=self._listener)

    async def drain(self, limit_s: float) -> None:
        """Stop accepting, let answers end until `limit_s`, end the rest with a typed error, then close every connection."""
        self._stop_accepting()
        await self._answers.drain(limit_s)
        await asyncio.gather(*(connection.close() for connection in list(self._connections)))
        self._decoder.close()

    async def stop(self) -> None:
        """Close every connection at once; answers still running end in an error if their client reads."""
        await self.drain(0)

    def _connect(self) -> RpcConnection:
        return RpcConnection(self._engine, self._config, self._answers, self._decoder, self._connections)

    def _stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        elif self._listener is not None:
            self._listener.close()
        if isinstance(self._address, UnixAddress) and self._file_id is not None:
            unlink_own(self._address.path, self._file_id)
            self._file_id = None


class RpcConnection(asyncio.Protocol):
    """One client: its calls, its answers, and the bytes on their way to it."""

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        answers: RunningAnswers,
        decoder: MessageDecoder,
        connections: set[RpcConnection],
    ) -> None:
        self._engine = engine
        self._config = config
        self._answers = answers
        self._decoder = decoder
        self._connections = connections
        self._reader = FrameReader(config.max_message_bytes)
        self._running: dict[int, tuple[Answer, asyncio.Task[None]]] = {}
        self._bodies: deque[bytes] = deque()  # received, and behind a long one that is being decoded
        self._decoding: asyncio.Task[None] | None = None
        self._frames: list[bytes] = []
        self._is_writable = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._has_hello = False
        self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the Hello, but not for ever."""
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if sock is not None and sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # finds a peer that vanished without a word
        self._connections.add(self)
        self._is_writable.set()
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, transport.abort)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Abort whatever still runs for this client."""
        self._connections.discard(self)
        self._is_closing = True
        self._stop_timer()
        for task in self._tasks():
            task.cancel()
        self._is_writable.set()
        self._is_lost.set()

    def data_received(self, data: bytes) -> None:
        """Serve every frame that `data` completes."""
        try:
            for body in self._reader.feed(data):
                if self._is_closing:
                    return
                if self._decoding is None and len(body) <= INLINE_BYTES:
                    self._receive(body)
                    continue
                self._bodies.append(body)
                if self._decoding is None:
                    self._transport.pause_reading()
                    self._decoding = asyncio.create_task(self._receive_bodies())
        except MessageTooLarge as error:
            self._end(error)

    def pause_writing(self) -> None:
        """The peer does not read: take nothing more from it or for it, and give it a limited time."""
        self._is_writable.clear()
        self._transport.pause_reading()
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._config.slow_consumer_s, self._drop_slow)

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._stop_timer()
        self._is_writable.set()
        self._resume_reading()

    async def close(self) -> None:
        """Send what is queued, close, and wait until every answer has ended."""
        self._is_closing = True
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._flush()
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._is_lost.wait()
        except TimeoutError:  # a peer who does not read would hold up the flush for ever
            self._transport.abort()
            await self._is_lost.wait()

    def _tasks(self) -> list[asyncio.Task[None]]:
        tasks = [task for _, task in self._running.values()]
        return tasks if self._decoding is None else [*tasks, self._decoding]

    def _resume_reading(self) -> None:
        """Read on, unless the peer does not read or what it sent is still being decoded."""
        if self._decoding is None and self._is_writable.is_set() and not self._transport.is_closing():
            self._transport.resume_reading()

    async def _receive_bodies(self) -> None:
        try:
            while self._bodies and not self._is_closing:
                body = self._bodies.popleft()
                try:
                    value = await self._decoder.run(_decode, body)
                except LooseleafError as error:
                    self._refuse(None, error)
                else:
                    if not self._is_closing:
                        self._serve_value(value)
        finally:
            self._decoding = None
            self._resume_reading()

    def _receive(self, body: bytes) -> None:
        try:
            value = _decode(body)
        except LooseleafError as error:
            self._refuse(None, error)
        else:
            self._serve_value(value)

    def _serve_value(self, value: dict[Any, Any]) -> None:
        call_id: int | None = None
        try:
            if not self._has_hello:
                self._shake_hands(value)
                return
            named = value.get("id")
            if type(named) is int and 0 <= named < 2**63 and named not in self._running:
                call_id = named
            self._serve(convert(value, Call))
        except LooseleafError as error:
            self._refuse(call_id, error)

    def _refuse(self, call_id: int | None, error: LooseleafError) -> None:
        if not self._has_hello:
            self._end(error)
        else:
            self._send(Reply(id=call_id, error=Failed.from_error(error)))

    def _shake_hands(self, value: dict[Any, Any]) -> None:
        hello: Hello = convert(value, Hello)
        if hello.looseleaf != PROTOCOL_VERSION:
            raise InvalidRequest(
                f"looseleaf: protocol version {hello.looseleaf} is not spoken here, {PROTOCOL_VERSION} is",
                param="looseleaf",
            )
        if self._config.api_key is not None and not is_key(hello.api_key or "", self._config.api_key):
            raise Unauthorized("the API key is missing or wrong", param="api_key")
        self._has_hello = True
        self._stop_timer()
        model = self._engine.stats().model
        self._send(Welcome(looseleaf=PROTOCOL_VERSION, max_frame_bytes=self._config.max_message_bytes, model=model))

    def _serve(self, call: Call) -> None:
        if call.id in self._running:
            raise InvalidRequest(f"id: {call.id} is in use by an answer that still runs", param="id")
        fields = without_nulls(call.params)
        if call.method == "generate":
            self._begin(call.id, fields)
            return
        if call.method == "cancel":
            target: int = take(fields, "id", CallId, call.id)
            refuse_rest(fields)
            is_running = target in self._running  # an answer that has just ended leaves nothing to cancel
            if is_running:
                self._running[target][0].cut(RequestAborted("cancelled by the client"))
            result: Any = {"cancelled": is_running}
        elif call.method in ("stats", "health"):
            refuse_rest(fields)
            result = self._engine.stats() if call.method == "stats" else self._health()
        else:
            known = "'generate', 'cancel', 'stats' and 'health'"
            raise UnknownRoute(f"method: {quoted(call.method)} is not one of {known}", param="method")
        self._send(Reply(id=call.id, result=result))

    def _health(self) -> Struct:
        health = self._engine.health()
        if self._answers.is_draining:
            return msgspec.structs.replace(health, is_ready=False, reason="draining")
        return health

    def _begin(self, call_id: int, fields: dict[str, Any]) -> None:
        if len(self._running) >= MAX_RUNNING:
            raise QueueFull(f"this connection has {MAX_RUNNING} answers running, the most it may have")
        request_id = clean_request_id(take(fields, "request_id", str, None))
        take_model(fields, self._engine.stats().model)
        request = take_requests(fields, request_id)[0]
        answer = self._answers.begin()
        task = asyncio.create_task(self._answer(call_id, request, answer))
        self._running[call_id] = answer, task
        task.add_done_callback(lambda _: self._finish(call_id))

    def _finish(self, call_id: int) -> None:
        answer, _ = self._running.pop(call_id)
        answer.end()

    async def _answer(self, call_id: int, request: GenerateRequest, answer: Answer) -> None:
        try:
            with answer:
                async with open_answer(self._engine, request) as stream:
                    async for events in stream:
                        self._send(Reply(id=call_id, events=events))
                        await self._is_writable.wait()
        except LooseleafError as error:
            self._send(Reply(id=call_id, error=Failed.from_error(error)))
        except Exception:
            log.exception("request.failed", request_id=request.request_id)
            self._send(Reply(id=call_id, error=Failed.from_error(LooseleafError("internal error"))))

    def _send(self, message: Struct) -> None:
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(encode_frame(message))

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def _end(self, error: LooseleafError) -> None:
        """Say why and close, reading nothing more."""
        self._is_closing = True
        self._stop_timer()
        self._transport.pause_reading()
        self._send(Reply(id=None, error=Failed.from_error(error)))
        self._flush()
        self._transport.close()
        # Closing waits for the peer to take what is queued, which a peer who never reads would delay for ever.
        self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def _drop_slow(self) -> None:
        log.info("connection.dropped", reason="slow_consumer", running=len(self._running))
        self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _decode(body: bytes) -> dict[Any, Any]:
    try:
        value = msgspec.msgpack.decode(body)
    except RecursionError as error:
        raise InvalidRequest("the frame is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeError, TypeError) as error:  # TypeError: a map's key that cannot be hashed
        raise InvalidRequest(f"the frame is not valid msgpack: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the frame must hold a map")
    return value
