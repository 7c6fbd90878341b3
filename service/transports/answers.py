"""Answers that a transport is sending: how one is opened, and how all of them end when the server drains.

Invariant: an engine's stream that was opened is closed on every way out, so that an answer nobody waits for gives its blocks back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from service.errors import Draining, LooseleafError
from service.messages import EngineClient, Event, GenerateRequest

CUT_TIMEOUT_S = 1.0


@asynccontextmanager
async def open_answer(engine: EngineClient, request: GenerateRequest) -> AsyncIterator[AsyncIterator[list[Event]]]:
    """Run `request`; leaving the block closes the stream, which aborts what is still running."""
    stream = engine.generate(request)
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


@asynccontextmanager
async def open_answers(
    engine: EngineClient, requests: Sequence[GenerateRequest]
) -> AsyncIterator[AsyncIterator[tuple[int, list[Event]]]]:
    """Run several requests at once; yields an iterator of (index of the request, its events). The first failure ends all."""
    if len(requests) == 1:
        async with open_answer(engine, requests[0]) as stream:
            yield _numbered(stream)
        return
    inbox: asyncio.Queue[tuple[int, list[Event] | Exception | None]] = asyncio.Queue(maxsize=len(requests))
    tasks = [asyncio.create_task(_forward(engine, request, index, inbox)) for index, request in enumerate(requests)]
    try:
        yield _merged(inbox, len(requests))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _numbered(stream: AsyncIterator[list[Event]]) -> AsyncIterator[tuple[int, list[Event]]]:
    async for events in stream:
        yield 0, events


async def _forward(
    engine: EngineClient,
    request: GenerateRequest,
    index: int,
    inbox: asyncio.Queue[tuple[int, list[Event] | Exception | None]],
) -> None:
    try:
        async with open_answer(engine, request) as stream:
            async for events in stream:
                await inbox.put((index, events))
    except Exception as error:
        await inbox.put((index, error))
    else:
        await inbox.put((index, None))


async def _merged(
    inbox: asyncio.Queue[tuple[int, list[Event] | Exception | None]], num_open: int
) -> AsyncIterator[tuple[int, list[Event]]]:
    while num_open:
        index, item = await inbox.get()
        if item is None:
            num_open -= 1
        elif isinstance(item, Exception):
            raise item
        else:
            yield index, item


class Answer:
    """One answer in progress. `with answer:` runs it; when it is cut, that block raises the error given to `cut`."""

    def __init__(self, running: set[Answer], is_idle: asyncio.Event) -> None:
        self._running = running
        self._is_idle = is_idle
        self._task: asyncio.Task[object] | None = None
        self._error: LooseleafError | None = None
        running.add(self)
        is_idle.clear()

    def cut(self, error: LooseleafError) -> None:
        """End the answer with `error`; the first error counts."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    def end(self) -> None:
        """Count the answer no longer; the block does so itself, this is for a block that was never entered."""
        self._running.discard(self)
        if not self._running:
            self._is_idle.set()

    def __enter__(self) -> None:
        if self._error is not None:
            self.end()
            raise self._error
        self._task = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self.end()
        if self._error is None or kind is not asyncio.CancelledError or task is None:
            return
        if task.uncancel() == 0:  # else the client went away as well, and nobody is there to be told
            raise self._error from None


class RunningAnswers:
    """The answers in progress; a drain waits for them and cuts those that outlive its limit."""

    def __init__(self) -> None:
        self.is_draining = False
        self._running: set[Answer] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self) -> Answer:
        """Admit an answer, to be entered with `with`; raises `Draining` once no more are taken."""
        if self.is_draining:
            raise Draining("the server is shutting down; try again later or elsewhere")
        return Answer(self._running, self._is_idle)

    async def drain(self, limit_s: float) -> None:
        """Take no more answers, wait for the running ones, and cut what still runs after `limit_s`."""
        self.is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._is_idle.wait()
        except TimeoutError:
            error = Draining(f"the server is shutting down and ended this answer after {limit_s:g} s")
            for answer in list(self._running):
                answer.cut(error)
            with contextlib.suppress(TimeoutError):  # an engine that does not let go must not hold up the exit
                async with asyncio.timeout(CUT_TIMEOUT_S):
                    await self._is_idle.wait()
