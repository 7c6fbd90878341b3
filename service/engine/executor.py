"""The step thread: one daemon thread that owns the runner and everything the runner owns.

CUDA streams and Numba contexts belong to the thread that made them, so the runner is also constructed and closed there. Nothing here
knows requests. Steps may be submitted ahead: they are computed in order, and tokens that the one before samples are filled in here.
Invariant: one step at a time, and each submitted step resolves its future exactly once, whatever the runner does, or was recalled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from service.engine.batch import StepBatch, StepOutput, StepRunner, complete
from service.errors import EngineDead

Clock = Callable[[], float]
T = TypeVar("T")

# A result that another step waits behind is told so much later: the loop wakes up, and takes the interpreter's lock for its work, when
# the step thread has no more use for it because it is in compiled code. Told at once it took the lock in about half of the steps.
HANDOVER_S = 0.0003


class StepExecutor:
    """Run steps on a thread of their own and bring the results back to the event loop."""

    def __init__(self, factory: Callable[[], StepRunner], *, clock: Clock = time.monotonic) -> None:
        """`factory` makes the runner; it is called on the step thread."""
        self._factory = factory
        self._clock = clock
        self._queue: SimpleQueue[asyncio.Future[StepOutput] | None] = SimpleQueue()
        self._unstarted: dict[
            asyncio.Future[StepOutput], StepBatch
        ] = {}  # whoever takes a step out has it: one atomic operation
        self._thread: threading.Thread | None = None
        self._runner: StepRunner | None = None
        self._step_started: float | None = None  # written by the step thread, read by health

    @property
    def running_for_s(self) -> float:
        """Seconds that the step under way has been computed for; 0 when there is none."""
        started = self._step_started
        return 0.0 if started is None else self._clock() - started

    async def start(self) -> StepRunner:
        """Start the thread and construct the runner on it, once; raises whatever the factory raises."""
        if self._runner is not None:
            return self._runner
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[StepRunner] = loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(loop, ready), name="looseleaf-step", daemon=True)
        self._thread.start()
        self._runner = await ready
        return self._runner

    def submit(self, batch: StepBatch) -> asyncio.Future[StepOutput]:
        """Hand a step to the thread. The future raises what the runner raised; `EngineDead` where that was no `Exception`."""
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        self._unstarted[future] = batch
        self._queue.put(future)
        return future

    def recall(self, future: asyncio.Future[StepOutput]) -> bool:
        """Take a submitted step back; False if it has begun. Its future is then never resolved."""
        return self._unstarted.pop(future, None) is not None

    async def execute(self, batch: StepBatch) -> StepOutput:
        """Submit a step and wait for its output."""
        return await self.submit(batch)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Let the step under way end, close the runner and join the thread; say whether it ended in time."""
        thread = self._thread
        if thread is None:
            return True
        self._queue.put(None)
        # Joining blocks, and the thread may hang in a step: wait on another thread, and for so long only.
        await asyncio.to_thread(thread.join, timeout_s)
        return not thread.is_alive()

    def _main(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[StepRunner]) -> None:
        try:
            runner = self._factory()
        except BaseException as error:
            _post(loop, ready, None, error)
            return
        _post(loop, ready, runner, None)
        del ready
        messenger = _Messenger()
        previous: StepOutput | None = None
        while (future := self._queue.get()) is not None:
            batch = self._unstarted.pop(future, None)
            if batch is None:
                continue  # recalled
            self._step_started = self._clock()
            try:
                output = runner.execute(complete(batch, previous))
            except BaseException as error:
                self._step_started = previous = None
                _post(loop, future, None, error)
            else:
                self._step_started = None
                tell = messenger.post if self._unstarted else _post
                tell(loop, future, output, None)
                previous = output
            del batch, future  # keep nothing of a step but its samples while waiting for the next
        messenger.close()
        runner.close()


class _Messenger:
    """Tells results a moment later, on a thread of its own, so that the step thread loses no time to it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="looseleaf-results", daemon=True)
        self._thread.start()

    def post(
        self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], result: T | None, error: BaseException | None
    ) -> None:
        """Do what `_post` does, soon."""
        self._queue.put(partial(_post, loop, future, result, error))

    def close(self) -> None:
        """Tell what is left and end."""
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (tell := self._queue.get()) is not None:
            time.sleep(HANDOVER_S)
            tell()
            del tell


def _post(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], result: T | None, error: BaseException | None
) -> None:
    """Resolve `future` on its loop; a loop that has closed meanwhile has nobody waiting."""

    def resolve() -> None:
        if future.done():  # cancelled: whoever waited has given up
            return
        if error is None:
            assert result is not None
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:
            dead = EngineDead(f"the step thread was ended by {type(error).__name__}")
            dead.__cause__ = error
            future.set_exception(dead)

    try:
        loop.call_soon_threadsafe(resolve)
    except RuntimeError:
        if not loop.is_closed():
            raise
