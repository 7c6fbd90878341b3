"""What travels over RPC: length-prefixed msgpack maps, the same for the server and for the client that other programs import.

    frame   = length (4 bytes, big-endian, of the body alone) + body (one msgpack map, nothing after it)
    client  → Hello, then any number of Calls; a Call's id is chosen by the client and free again after its last Reply
    server  → Welcome, then Replies in any order, each with the id of its Call: `events` any number of times for "generate", ended by
              `events` that close with a Finished or by `error`; for other methods one `result` or one `error`
    methods = "generate" (params: the fields of a chat or completion, see `service.transports.fields`, and `request_id`),
              "cancel" (params: {"id": …}), "stats", "health"

A Reply whose id is None is about a frame that named no call. Invariant: a length is checked before a byte of its body is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from service.errors import ConfigError, MessageTooLarge
from service.messages import Event, Failed

PROTOCOL_VERSION = 1
CallId = Annotated[int, Meta(ge=0, le=2**63 - 1)]

_HEADER = struct.Struct(">I")
_MAX_LENGTH = 2**32 - 1


class Hello(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The client's first frame; `looseleaf` is the protocol version."""

    looseleaf: int
    api_key: str | None = None


class Welcome(Struct, frozen=True, kw_only=True):
    """The server's answer: the largest body that it takes and the model that it serves."""

    looseleaf: int
    max_frame_bytes: int
    model: str


class Call(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request from the client."""

    id: CallId
    method: str
    params: dict[str, Any] = {}


class Reply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from the server; exactly one of the last three is set."""

    id: CallId | None
    events: list[Event] | None = None
    result: Any = None
    error: Failed | None = None


class UnixAddress(Struct, frozen=True):
    """A socket file."""

    path: str


class TcpAddress(Struct, frozen=True):
    """A host and a port."""

    host: str
    port: int


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Read "unix:/run/looseleaf.sock", "tcp:127.0.0.1:9000" or "tcp:[::1]:9000"; raises `ConfigError`."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return UnixAddress(rest)
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        if host and port.isascii() and port.isdecimal() and int(port) <= 65535:
            return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise ConfigError(f"{text!r} is not an address; write unix:/path/to.sock or tcp:host:port", param="server.rpc")


def encode_frame(message: Struct) -> bytes:
    """Encode one frame."""
    body = msgspec.msgpack.encode(message)
    if len(body) > _MAX_LENGTH:
        raise MessageTooLarge(f"a frame holds at most {_MAX_LENGTH} bytes, this one has {len(body)}")
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames, whatever pieces it comes in."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take `data` and yield each body it completes; raises `MessageTooLarge` at a length above the limit, and then is of no more use."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                (length,) = _HEADER.unpack_from(self._buffer, start)
                if length > self._max_bytes:
                    raise MessageTooLarge(f"a frame announces {length} bytes, above the limit of {self._max_bytes}")
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]
