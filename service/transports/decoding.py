"""Decodes what clients send: short messages at once, long ones on a thread of their own.

A few megabytes may hold millions of values, which take a second to build, and a tenth of that to look at. On the event loop that second
would be everybody's. One thread is enough: more would only compete with the loop for the interpreter.

Nor are millions of lists and objects what anybody means: whatever reads them further in takes seconds more, so a message with more than
`MAX_CONTAINERS` is refused here. (Long lists of token ids are one each.)

Invariant: at most one long message is being decoded at a time, however many clients send one.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.errors import InvalidRequest

INLINE_BYTES = (
    64 * 1024
)  # up to here the worst message takes some milliseconds, the usual one far less than a thread costs
MAX_CONTAINERS = 100_000  # a message of `INLINE_BYTES` cannot have as many

T = TypeVar("T")
Body = TypeVar("Body", bytes, str)


class MessageDecoder:
    """Runs decoders of one transport."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="looseleaf-decode")

    async def run(self, decode: Callable[[Body], T], body: Body) -> T:
        """Return `decode(body)`; raises what it raises, and `InvalidRequest` for a structure that is too large."""
        if len(body) <= INLINE_BYTES:
            return decode(body)
        return await asyncio.get_running_loop().run_in_executor(self._pool, _decode_long, decode, body)

    def close(self) -> None:
        """Let the thread go; what still waits for it is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _decode_long(decode: Callable[[Body], T], body: Body) -> T:
    # The collector would walk all that has been built so far again and again, without letting another thread in between.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        value = decode(body)
        if _has_many_containers(value):
            raise InvalidRequest(f"the message has more than {MAX_CONTAINERS} lists and objects")
        return value
    finally:
        if was_enabled:
            gc.enable()


def _has_many_containers(value: object) -> bool:
    """Count lists and objects, level by level, no further than to the limit."""
    level, count = [value], 0
    while level and count <= MAX_CONTAINERS:
        found: list[object] = []
        for item in level:
            inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            found.extend(entry for entry in inner if isinstance(entry, dict | list))
            if count + len(found) > MAX_CONTAINERS:
                return True
        count += len(found)
        level = found
    return False
