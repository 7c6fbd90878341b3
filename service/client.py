"""What other programs import to use a running Looseleaf:

    async with RpcClient("unix:/run/looseleaf.sock") as client:
        async for event in client.generate(prompt="Once upon a time", max_tokens=32):
            if isinstance(event, Delta):
                print(event.text, end="")

One client is one connection; any number of calls may run on it at once. Parameters are those of the OpenAI API and of `SamplingParams`.
A refused or failed request raises the `LooseleafError` that the server meant; a lost server raises `EngineDead`.

Invariant: a generation whose iterator is closed early is cancelled on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, cast

import msgspec

from service.errors import EngineDead, InvalidRequest, LooseleafError, MessageTooLarge
from service.frames import (
    PROTOCOL_VERSION,
    Call,
    FrameReader,
    Hello,
    Reply,
    UnixAddress,
    Welcome,
    encode_frame,
    parse_address,
)
from service.messages import ChatMessage, Delta, EngineStats, Event, Finished, Health, merge_deltas

MAX_REPLY_BYTES = 256 * 2**20
MAX_PENDING_EVENTS = 256  # of one call; more are merged when their reader lags

Message = ChatMessage | dict[str, Any]


class RpcClient:
    """A connection to the RPC server at "unix:/path" or "tcp:host:port"."""

    def __init__(self, address: str, *, api_key: str | None = None, connect_timeout_s: float = 10.0) -> None:
        self._address = parse_address(address)
        self._name = address
        self._api_key = api_key
        self._connect_timeout_s = connect_timeout_s
        self._connection: _Connection | None = None
        self._next_id = 0

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect and shake hands; raises `EngineDead` when nobody answers, or the server's error when it refuses."""
        loop = asyncio.get_running_loop()
        connection = _Connection(self._name)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if isinstance(self._address, UnixAddress):
                    await loop.create_unix_connection(lambda: connection, self._address.path)
                else:
                    await loop.create_connection(lambda: connection, self._address.host, self._address.port)
                connection.send(Hello(looseleaf=PROTOCOL_VERSION, api_key=self._api_key))
                await connection.welcome
        except (OSError, TimeoutError) as error:
            await connection.close()
            reason = (
                f"no answer within {self._connect_timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            )
            raise EngineDead(f"cannot connect to {self._name}: {reason}") from error
        except BaseException:
            await connection.close()
            raise
        self._connection = connection

    async def close(self) -> None:
        """Close the connection; calls still running raise `EngineDead`."""
        if self._connection is not None:
            await self._connection.close()

    async def generate(
        self, prompt: str | Sequence[int] | None = None, *, messages: Sequence[Message] | None = None, **params: Any
    ) -> AsyncGenerator[Event, None]:
        """Stream the events of one generation: `Started`, `Delta`s, `Finished`. Give `prompt` or `messages`."""
        if prompt is not None:
            params["prompt"] = prompt
        if messages is not None:
            params["messages"] = messages
        connection, call_id = self._open_call()
        inbox = connection.call(Call(id=call_id, method="generate", params=params))
        has_ended = False
        try:
            while not has_ended:
                for event in await inbox.take():
                    has_ended = has_ended or isinstance(event, Finished)
                    yield event
        except LooseleafError:
            has_ended = True
            raise
        finally:
            connection.forget(call_id)
            if not has_ended:
                connection.send(Call(id=self._take_id(), method="cancel", params={"id": call_id}))

    async def complete(self, prompt: str | Sequence[int], **params: Any) -> str:
        """Return the text that continues `prompt`."""
        return await self._text(params, prompt=prompt)

    async def chat(self, messages: Sequence[Message], **params: Any) -> str:
        """Return the answer to a conversation."""
        return await self._text(params, messages=messages)

    async def stats(self) -> EngineStats:
        """Return a snapshot of the engine."""
        return msgspec.convert(await self._unary("stats"), EngineStats)

    async def health(self) -> Health:
        """Say whether the engine makes progress and takes requests."""
        return msgspec.convert(await self._unary("health"), Health)

    async def _text(
        self,
        params: dict[str, Any],
        prompt: str | Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
    ) -> str:
        if params.get("n") not in (None, 1):
            raise InvalidRequest("n: this call returns one text; use generate for several choices", param="n")
        async with contextlib.aclosing(self.generate(prompt, messages=messages, **params)) as events:
            return "".join([event.text async for event in events if isinstance(event, Delta)])

    async def _unary(self, method: str) -> Any:
        connection, call_id = self._open_call()
        inbox = connection.call(Call(id=call_id, method=method))
        try:
            return await inbox.result()
        finally:
            connection.forget(call_id)

    def _open_call(self) -> tuple[_Connection, int]:
        if self._connection is None:
            raise EngineDead(f"not connected to {self._name}; use 'async with' or call connect")
        return self._connection, self._take_id()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id


class _Inbox:
    """What has arrived for one call and was not yet read; bounded, since deltas merge when the reader lags."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._result: Any = None
        self._error: LooseleafError | None = None
        self._has_news = asyncio.Event()
        self._max_events = MAX_PENDING_EVENTS

    def put(self, reply: Reply) -> None:
        if reply.error is not None:
            self.fail(reply.error.to_error())
            return
        self._result = reply.result
        self._events.extend(reply.events or ())
        if len(self._events) > self._max_events:
            self._events = compacted(self._events)
            self._max_events = max(MAX_PENDING_EVENTS, 2 * len(self._events))  # so that merging stays linear
        self._has_news.set()

    def fail(self, error: LooseleafError) -> None:
        if self._error is None:
            self._error = error
        self._has_news.set()

    async def take(self) -> list[Event]:
        """Return what has arrived, at least one event; an error is raised after the events before it were taken."""
        await self._has_news.wait()
        if not self._events and self._error is not None:
            raise self._error
        events, self._events = self._events, []
        self._max_events = MAX_PENDING_EVENTS
        if self._error is None:
            self._has_news.clear()
        return events

    async def result(self) -> Any:
        await self._has_news.wait()
        if self._error is not None:
            raise self._error
        return self._result


class _Connection(asyncio.Protocol):
    """The socket and the calls that wait on it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reader = FrameReader(MAX_REPLY_BYTES)
        self._inboxes: dict[int, _Inbox] = {}
        self._error: LooseleafError | None = None
        self._transport: asyncio.Transport | None = None
        self._is_lost = asyncio.Event()
        self._max_frame_bytes: int | None = None  # what the server takes, known from its Welcome on
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(EngineDead(f"the connection to {self._name} was lost{f': {exc}' if exc else ''}"))
        self._is_lost.set()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._receive(body)
        except (msgspec.MsgspecError, UnicodeError, MessageTooLarge) as error:
            self._fail(EngineDead(f"{self._name} does not speak this protocol: {error}"))
            if self._transport is not None:
                self._transport.abort()

    def call(self, call: Call) -> _Inbox:
        """Send `call`; its replies come to the inbox until `forget`."""
        inbox = self._inboxes[call.id] = _Inbox()
        if self._error is not None:
            inbox.fail(self._error)
            return inbox
        try:
            self.send(call)
        except LooseleafError as error:
            inbox.fail(error)
        return inbox

    def forget(self, call_id: int) -> None:
        """Drop what may still come for a call."""
        self._inboxes.pop(call_id, None)

    def send(self, message: Hello | Call) -> None:
        """Write one frame, unless the connection is gone. Half surrogate pairs, which no UTF-8 can hold, become U+FFFD."""
        try:
            frame = encode_frame(message)
        except UnicodeEncodeError:
            frame = encode_frame(msgspec.convert(_mended(msgspec.to_builtins(message)), type(message)))
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"a parameter cannot be sent: {error}") from error
        if self._max_frame_bytes is not None and len(frame) - 4 > self._max_frame_bytes:
            raise MessageTooLarge(
                f"the call has {len(frame)} bytes, above the server's limit of {self._max_frame_bytes}"
            )
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def close(self) -> None:
        self._fail(EngineDead(f"the connection to {self._name} was closed"))
        self.welcome.cancel()
        if self._transport is not None:
            self._transport.close()
            try:
                async with asyncio.timeout(1.0):
                    await self._is_lost.wait()
            except TimeoutError:
                self._transport.abort()

    def _receive(self, body: bytes) -> None:
        if not self.welcome.done():
            self._receive_welcome(body)
            return
        reply = _DECODE_REPLY(body)
        if reply.id is None:
            if reply.error is not None:  # about the connection as a whole
                self._fail(reply.error.to_error())
        elif (inbox := self._inboxes.get(reply.id)) is not None:
            inbox.put(reply)

    def _receive_welcome(self, body: bytes) -> None:
        value = msgspec.msgpack.decode(body)
        if isinstance(value, dict) and "error" in value:
            error = msgspec.convert(value, Reply).error
            assert error is not None
            self._fail(error.to_error())
            return
        welcome = msgspec.convert(value, Welcome)
        self._max_frame_bytes = welcome.max_frame_bytes
        self.welcome.set_result(welcome)

    def _fail(self, error: LooseleafError) -> None:
        if self._error is None:
            self._error = error
        for inbox in self._inboxes.values():
            inbox.fail(self._error)
        if not self.welcome.done():
            self.welcome.set_exception(self._error)
            self.welcome.exception()  # nobody may be waiting for it


_DECODE_REPLY = msgspec.msgpack.Decoder(Reply).decode


def compacted(events: list[Event]) -> list[Event]:
    """Merge the deltas of each choice; what begins and ends the answer stays at its place."""
    deltas: dict[int, list[Delta]] = {}
    for event in events:
        if isinstance(event, Delta):
            deltas.setdefault(event.index, []).append(event)
    before = [event for event in events if not isinstance(event, Delta | Finished)]
    after = [event for event in events if isinstance(event, Finished)]
    return [*before, *(merge_deltas(pieces) for pieces in deltas.values()), *after]


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mended(item) for item in value]
    return value
