"""What one connection has yet to send, bounded: whoever produces waits while the peer does not read.

Invariant: the bytes held never exceed the limit by more than one payload for each producer that waited.
"""

from __future__ import annotations

import asyncio

MAX_PENDING_BYTES = 256 * 1024


class Outbox:
    """A queue of encoded messages with one consumer."""

    def __init__(self, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._payloads: list[bytes] = []
        self._has_payloads = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_sent = asyncio.Event()
        self._is_sent.set()

    async def put(self, *payloads: bytes) -> None:
        """Wait for room, then queue `payloads` side by side."""
        await self._has_room.wait()
        self._payloads.extend(payloads)
        self._num_bytes += sum(map(len, payloads))
        self._has_payloads.set()
        self._is_sent.clear()
        if self._num_bytes >= self._max_bytes:
            self._has_room.clear()

    async def take(self) -> list[bytes]:
        """Wait for payloads and take all; asking again says that they were sent."""
        if not self._payloads:
            self._is_sent.set()
        await self._has_payloads.wait()
        taken, self._payloads = self._payloads, []
        self._num_bytes = 0
        self._has_payloads.clear()
        self._has_room.set()
        return taken

    async def wait_sent(self) -> None:
        """Wait until the consumer came back for more and found nothing."""
        await self._is_sent.wait()
