"""How a request ended: one canonical log line and one count, never a word of its text.

Events: `request.finished`, `request.failed`, `request.aborted` (the client left) and `request.refused` (it never ran).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from service.engine.stream import RequestStream
from service.errors import LooseleafError
from service.messages import GenerateRequest


class EngineMetrics(Protocol):
    """Who counts. `outcome` is "stop", "length", "aborted" or an error's code."""

    def on_request_ended(
        self, outcome: str, *, ttft_s: float | None, duration_s: float, output_tokens: int
    ) -> None: ...

    def on_step(self, *, compute_s: float, num_tokens: int) -> None: ...


class NoMetrics:
    """Counts nothing."""

    def on_request_ended(self, outcome: str, *, ttft_s: float | None, duration_s: float, output_tokens: int) -> None:
        """Ignore it."""

    def on_step(self, *, compute_s: float, num_tokens: int) -> None:
        """Ignore it."""


class RequestLog:
    """Writes and counts the ends of requests."""

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

    def finished(self, stream: RequestStream, num_preemptions: int) -> None:
        """Every choice has its finish reason."""
        reasons = stream.finish_reasons
        outcome = "length" if "length" in reasons else "stop"
        self._report("request.finished", stream, outcome, finish_reason=reasons, preemptions=num_preemptions)

    def failed(self, stream: RequestStream, error: LooseleafError, num_preemptions: int) -> None:
        """The service ended it."""
        self._report("request.failed", stream, error.code, code=error.code, preemptions=num_preemptions)

    def aborted(self, stream: RequestStream) -> None:
        """The client went away."""
        self._report("request.aborted", stream, "aborted")

    def refused(self, request: GenerateRequest, error: LooseleafError, created: float) -> None:
        """It was never queued."""
        duration_s = self._clock() - created
        self._log.info(
            "request.refused",
            request_id=request.request_id,
            code=error.code,
            param=error.param,
            duration_s=round(duration_s, 6),
        )
        self._metrics.on_request_ended(error.code, ttft_s=None, duration_s=duration_s, output_tokens=0)

    def _report(self, event: str, stream: RequestStream, outcome: str, **facts: object) -> None:
        duration_s = self._clock() - stream.created
        ttft_s = None if stream.first_token is None else stream.first_token - stream.created
        self._log.info(
            event,
            request_id=stream.request.request_id,
            prompt_tokens=len(stream.prompt_token_ids),
            cached_tokens=stream.cached_tokens,
            output_tokens=stream.num_output_tokens,
            ttft_s=None if ttft_s is None else round(ttft_s, 6),
            duration_s=round(duration_s, 6),
            **facts,
        )
        self._metrics.on_request_ended(
            outcome, ttft_s=ttft_s, duration_s=duration_s, output_tokens=stream.num_output_tokens
        )
