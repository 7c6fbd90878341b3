"""Bare clients that send whatever they are told to, for inputs that no decent client would send."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any, Self

import msgspec

from service.frames import UnixAddress, parse_address

TIMEOUT_S = 10


class RpcWire:
    """RPC as bytes: frames are sent unchecked and received as plain maps."""

    def __init__(self, address: str, *, hello: bool = True) -> None:
        self._address = parse_address(address)
        self._hello = hello

    async def __aenter__(self) -> Self:
        if isinstance(self._address, UnixAddress):
            self.reader, self.writer = await asyncio.open_unix_connection(self._address.path)
        else:
            self.reader, self.writer = await asyncio.open_connection(self._address.host, self._address.port)
        if self._hello:
            self.send({"looseleaf": 1})
            assert (await self.receive())["looseleaf"] == 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):  # the server was faster
            await self.writer.wait_closed()

    def send(self, value: object) -> None:
        """Send one frame around the encoded `value`."""
        self.send_body(msgspec.msgpack.encode(value))

    def send_body(self, body: bytes) -> None:
        """Send one frame around `body`."""
        self.writer.write(struct.pack(">I", len(body)) + body)

    async def receive(self) -> dict[str, Any]:
        """Return the next frame; raises `IncompleteReadError` when the server closes instead."""
        async with asyncio.timeout(TIMEOUT_S):
            (length,) = struct.unpack(">I", await self.reader.readexactly(4))
            value: dict[str, Any] = msgspec.msgpack.decode(await self.reader.readexactly(length))
            return value

    async def ask(self, **call: object) -> dict[str, Any]:
        """Send a call and return its last reply."""
        self.send(call)
        while True:
            reply = await self.receive()
            if "events" not in reply or reply["events"][-1]["type"] == "finished":
                return reply
