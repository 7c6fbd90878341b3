"""The engine as the rest of the service sees it: an `EngineClient` over the core, the step thread and the text layer.

One task drives the steps: schedule, submit, wait, apply, hand the news to the streams. While a step computes, the next one is made
(where the core lets it, see `flight.py`), and the consumers that were woken turn tokens into text on the loop, so that work is hidden
behind the step. Idle, nothing runs.

Invariants: every object here belongs to the event loop's thread; a request accepted by `generate` ends in one `Finished` or one raised
`LooseleafError`, whatever fails; closing the iterator gives its blocks back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from typing import NamedTuple

import structlog
from msgspec import Struct

from service.engine.batch import StepBatch, StepOutput
from service.engine.core import BadStepOutput, EngineCore
from service.engine.executor import StepExecutor
from service.engine.prompt import PromptEncoder
from service.engine.request import (
    ChoiceAdvanced,
    CoreEvent,
    RequestFailed,
    RequestFinished,
    RequestKey,
    RequestStarted,
)
from service.engine.request_log import EngineMetrics, NoMetrics, RequestLog
from service.engine.stream import RequestStream
from service.errors import Draining, EngineDead, LooseleafError, SlowConsumer, StepFailed
from service.messages import EngineStats, Event, GenerateRequest, Health
from service.text import ChatTemplate, Tokenizer

MAX_FAILED_STEPS = 3  # in a row; then the fault is not the requests'
AUDIT_PERIOD_S = 60.0  # at most this often, and only while idle, the block pool verifies its books


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What is served, for `stats`."""

    model: str
    backend: str
    dtype: str
    device: str


class EngineLimits(Struct, frozen=True, kw_only=True):
    """How long things may take, in seconds.

    `hung_step_s`: a step that runs longer makes `health` say not alive, until it ends. `dead_step_s`: then every request fails and the
    engine is dead. `slow_consumer_s`: a stream with news that nobody takes for so long is ended.
    """

    hung_step_s: float = 10.0
    dead_step_s: float = 60.0
    slow_consumer_s: float = 30.0


class _Step(NamedTuple):
    batch: StepBatch
    output: asyncio.Future[StepOutput]


class AsyncEngine:
    """Streams generations. `start` it first; `drain` and `stop` end it; one use."""

    def __init__(
        self,
        core: EngineCore,
        executor: StepExecutor,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        info: EngineInfo,
        eos_ids: Collection[int],
        limits: EngineLimits = EngineLimits(),  # noqa: B008 - frozen
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        """`eos_ids` end a choice unless it ignores them. `draw_seed` seeds requests that bring no seed of their own."""
        self._core = core
        self._executor = executor
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer, template, capacity=core.capacity)
        self._info = info
        self._eos_ids = tuple(sorted(eos_ids))
        self._limits = limits
        self._metrics = metrics or NoMetrics()
        self._clock = clock
        self._draw_seed = draw_seed
        self._request_log = RequestLog(self._metrics, clock)
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
        self._streams: dict[RequestKey, RequestStream] = {}  # of the requests that the core works on
        self._steps: deque[_Step] = deque()  # that the step thread has, oldest first
        self._has_news = False  # a request has come since the last step was made
        self._wake = asyncio.Event()  # a request has come, or a step has ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._death = asyncio.Event()
        self._death_reason = ""
        self._is_draining = False
        self._is_stopping = False
        self._num_failed_steps = 0  # in a row
        self._next_audit_s = 0.0
        self._task: asyncio.Task[None] | None = None

    # ── Life ─────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Construct the runner on its thread, unless that has been done, and begin to take requests."""
        await self._executor.start()
        self._task = asyncio.create_task(self._run(), name="looseleaf-engine")

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests and let the others end; after `deadline_s` those left fail with `Draining`.

        Says whether all ended by themselves. What they produced can still be read.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            self._fail_all(Draining("the service is shutting down; the answer was cut short"))
            return False
        return True

    async def stop(self) -> None:
        """End everything: requests that still run fail with `Draining`, the step thread is joined. Safe to call twice."""
        self._is_draining = True
        self._is_stopping = True
        self._fail_all(Draining("the service is shutting down; the answer was cut short"))
        self._wake.set()
        if self._task is not None:
            task, self._task = self._task, None
            # A step under way ends first: its blocks are only then nobody's.
            await asyncio.wait([task], timeout=self._limits.hung_step_s)
            task.cancel()
            await asyncio.wait([task])
        is_joined = await self._executor.close(self._limits.hung_step_s if not self._death_reason else 1.0)
        self._prompts.close()
        if not is_joined:
            self._log.error("engine.thread_left_behind", reason="a step did not end")

    async def wait_until_dead(self) -> str:
        """Return the reason once the engine has stopped after a fault; the process should then end."""
        await self._death.wait()
        return self._death_reason

    # ── EngineClient ─────────────────────────────────────────────────────────────────────────────

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        """Run `request`; each list holds all that happened since the last one. Closing the iterator aborts it.

        Raises `InvalidRequest`, `ContextTooLong`, `QueueFull`, `Draining` or `EngineDead` at the first step of the iteration;
        `StepFailed`, `NonFiniteLogits`, `SlowConsumer`, `Draining` or `EngineDead` later.
        """
        created = self._clock()
        try:
            stream = await self._open(request, created)
        except LooseleafError as error:
            self._request_log.refused(request, error, created)
            raise
        try:
            while not stream.is_over:
                yield await self._take(stream)
        finally:
            self._abort(stream)

    def stats(self) -> EngineStats:
        """Return a snapshot without waiting for a step."""
        core = self._core.stats()
        return EngineStats(
            model=self._info.model,
            backend=self._info.backend,
            dtype=self._info.dtype,
            device=self._info.device,
            max_model_len=self._core.capacity,
            running=core.running,
            waiting=core.waiting,
            pool=core.pool,
            steps=core.steps,
            preemptions=core.preemptions,
            prompt_tokens=core.prompt_tokens,
            cached_prompt_tokens=core.cached_prompt_tokens,
            generated_tokens=core.generated_tokens,
            draft_tokens=core.draft_tokens,
            accepted_draft_tokens=core.accepted_draft_tokens,
        )

    def health(self) -> Health:
        """Say whether the engine makes progress and takes requests; an idle engine is healthy."""
        if self._death_reason:
            return Health(is_alive=False, is_ready=False, reason=self._death_reason)
        if self._executor.running_for_s > self._limits.hung_step_s:
            reason = f"a step has been running for {self._executor.running_for_s:.0f} s"
            return Health(is_alive=False, is_ready=False, reason=reason)
        if self._is_draining:
            return Health(is_alive=True, is_ready=False, reason="shutting down")
        if self._task is None:
            return Health(is_alive=True, is_ready=False, reason="starting")
        return Health(is_alive=True, is_ready=True)

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────

    def _require_open(self) -> None:
        health = self.health()
        if not health.is_alive:
            raise EngineDead(f"the engine has stopped: {health.reason}")
        if not health.is_ready:
            raise Draining(f"the service takes no requests now: {health.reason}")

    async def _open(self, request: GenerateRequest, created: float) -> RequestStream:
        self._require_open()
        try:
            prompt_token_ids = await self._prompts.encode(request)
        except LooseleafError:
            raise
        except Exception as error:
            self._log.error("prompt.failed", request_id=request.request_id, exc_info=error)
            raise LooseleafError("the prompt of this request could not be read") from error
        self._require_open()  # much may have happened while a long prompt was tokenised
        return self._submit(request, prompt_token_ids, created)

    def _submit(self, request: GenerateRequest, prompt_token_ids: tuple[int, ...], created: float) -> RequestStream:
        key = self._core.add(
            prompt_token_ids,
            request.sampling,
            seed=self._draw_seed(),
            eos_ids=self._eos_ids,
            priority=request.priority,
            namespace=request.namespace,
        )
        echo = self._prompts.prompt_text(request, prompt_token_ids) if request.echo_prompt else None
        stream = RequestStream(request, key, prompt_token_ids, self._tokenizer, created=created, echo=echo)
        self._streams[key] = stream
        self._idle.clear()
        self._has_news = True
        self._wake.set()
        return stream

    async def _take(self, stream: RequestStream) -> list[Event]:
        try:
            return await stream.take()
        except LooseleafError:
            raise
        except Exception as error:
            failure = self._text_failure(stream, error)
            raise failure from error

    def _text_failure(self, stream: RequestStream, error: Exception) -> LooseleafError:
        """Fail one request because its text could not be made; the others know nothing of it."""
        self._log.error("text.failed", request_id=stream.request.request_id, exc_info=error)
        failure = LooseleafError("the tokens of this answer could not be turned into text")
        self._core.abort(stream.key)
        self._end(stream, failure, num_preemptions=0)
        return failure

    def _abort(self, stream: RequestStream) -> None:
        """Give a request up that its consumer left; nothing happens if it has ended."""
        if self._streams.pop(stream.key, None) is None:
            return
        self._core.abort(stream.key)
        self._request_log.aborted(stream)
        self._note_idle()

    def _end(self, stream: RequestStream, error: LooseleafError | None, *, num_preemptions: int) -> None:
        """Finish or fail a stream, once."""
        if self._streams.pop(stream.key, None) is None:
            return
        if error is None:
            stream.finish(self._clock())
            self._request_log.finished(stream, num_preemptions)
        else:
            stream.fail(error)
            self._request_log.failed(stream, error, num_preemptions)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # ── Steps ────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        try:
            while not self._is_stopping or self._steps:
                if self._steps and self._steps[0].output.done():
                    self._finish_step(self._steps.popleft())
                if self._has_news:
                    self._recall_step()
                if self._is_stopping or not self._start_step():
                    await self._wait()
        except EngineDead as error:
            self._die(error.message, error)
        except Exception as error:
            self._die(f"the engine met a fault of its own ({type(error).__name__})", error)
        finally:
            for step in self._steps:
                step.output.cancel()  # nobody will take it; one that is done stays as it is

    def _recall_step(self) -> None:
        """Take back the step made ahead, unless it has begun, for a request that has come since: it should not wait for two."""
        self._has_news = False
        if len(self._steps) < 2:
            return
        batch, output = self._steps[-1]
        if not batch.copies and self._executor.recall(output):
            is_back = self._core.recall(batch.step_id)
            assert is_back, "the step made ahead is not the newest"
            self._steps.pop()
            output.cancel()

    def _start_step(self) -> bool:
        """Give the step thread its next step, where there is one and it may be made now."""
        self._deliver(self._core.shed())
        batch = self._core.schedule(self._clock())
        if batch is None:
            return False
        output = self._executor.submit(batch)
        output.add_done_callback(lambda _: self._wake.set())
        self._steps.append(_Step(batch, output))
        return True

    async def _wait(self) -> None:
        """Wait for the oldest step, or for a request where none runs. Raises `EngineDead` when the step takes too long."""
        self._wake.clear()
        if not self._steps:
            self._audit()
            await self._wake.wait()
        elif not (output := self._steps[0].output).done():
            try:
                async with asyncio.timeout(self._limits.dead_step_s):
                    await self._wake.wait()
            except TimeoutError:
                if not output.done():
                    raise EngineDead(f"a step did not end within {self._limits.dead_step_s:g} s") from None

    def _audit(self) -> None:
        """Check the books while idle: a block in dispute costs its place in the pool, not the service."""
        now = self._clock()
        if now < self._next_audit_s:
            return
        self._next_audit_s = now + AUDIT_PERIOD_S
        for incident in self._core.audit():
            self._log.error("block.quarantined", block=incident.block, reason=incident.reason)

    def _finish_step(self, step: _Step) -> None:
        """Deliver what a step gave. One that failed fails its requests; raises `EngineDead` when the engine cannot go on."""
        try:
            output = step.output.result()
            events = self._core.apply(output)
        except EngineDead:
            raise
        except BadStepOutput as error:
            self._fail_step(step.batch, error)
        except Exception as error:
            if step.output.exception() is None:
                raise  # the fault is the core's: its state cannot be trusted
            self._fail_step(step.batch, error)
        else:
            self._num_failed_steps = 0
            self._metrics.on_step(compute_s=output.compute_s, num_tokens=step.batch.num_tokens)
            self._deliver(events)

    def _fail_step(self, batch: StepBatch, error: Exception) -> None:
        self._log.error("step.failed", step_id=batch.step_id, num_sequences=len(batch.entries), exc_info=error)
        failure = StepFailed(f"the step that computed this request failed ({type(error).__name__}); try again")
        events = self._core.fail_step(batch.step_id, failure)
        self._deliver(events)
        # One that harms nobody was made for the requests of another that failed: that is one fault, not two.
        self._num_failed_steps += bool(events)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineDead(f"{self._num_failed_steps} steps in a row failed, the last with {type(error).__name__}")

    def _deliver(self, events: list[CoreEvent]) -> None:
        now = self._clock()
        endings: list[CoreEvent] = []  # from texts that ended; behind all tokens of this step
        for event in events:
            stream = self._streams.get(event.key)
            if stream is None:
                continue  # given up meanwhile
            if isinstance(event, ChoiceAdvanced):
                try:
                    if stream.push(event, now):
                        endings += self._core.finish_sequence(event.sequence_id)
                except Exception as error:
                    self._text_failure(stream, error)
                    continue
                self._drop_if_unread(stream, now)
            elif isinstance(event, RequestStarted):
                stream.start(event, now)
            else:
                self._deliver_end(stream, event)
        for event in endings:
            stream = self._streams.get(event.key)
            if stream is not None and isinstance(event, RequestFinished):
                self._deliver_end(stream, event)

    def _deliver_end(self, stream: RequestStream, event: RequestFinished | RequestFailed) -> None:
        error = event.error if isinstance(event, RequestFailed) else None
        self._end(stream, error, num_preemptions=event.num_preemptions)

    def _drop_if_unread(self, stream: RequestStream, now: float) -> None:
        limit_s = self._limits.slow_consumer_s
        if stream.unread_since is None or now - stream.unread_since <= limit_s:
            return
        self._core.abort(stream.key)
        failure = SlowConsumer(f"the stream was not read for {limit_s:g} s")
        self._end(stream, failure, num_preemptions=0)

    def _fail_all(self, error: LooseleafError) -> None:
        if not self._death_reason:  # else all have had their error, and the core may be what broke
            self._deliver(self._core.fail_all(error))

    def _die(self, reason: str, error: Exception) -> None:
        """Stop for good: the first fatal cause is kept and every request gets it."""
        self._death_reason = reason
        self._log.error("engine.died", reason=reason, exc_info=error)
        failure = EngineDead(f"the engine has stopped: {reason}")
        for stream in list(self._streams.values()):  # not through the core, which may be what broke
            self._end(stream, failure, num_preemptions=0)
        self._death.set()
