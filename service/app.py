"""Composition root: sockets first, then the model, then service until a signal or a fault, then the drain.

The sockets are bound before the model is loaded, so that a port in use is known at once and `/healthz` answers while loading. Exit codes:
0 after a signal, 1 after a fault of the engine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from service.config import Config, LoadedConfig
from service.errors import Loading
from service.log import configure_logging
from service.messages import EngineClient, EngineStats, Event, GenerateRequest, Health, PoolUsage
from service.metrics import ServiceMetrics
from service.transports.http import HttpServer, create_app
from service.transports.rpc import RpcServer
from service.transports.server import TransportServer

log = structlog.get_logger(__name__)

OBJECTS_WORTH_A_COLLECTION = 500_000  # made since collection was switched off, less those that are gone already
FAULT_DRAIN_S = 1.0  # after a fault every stream already has its error; this lets the last frames out


def serve(loaded: LoadedConfig) -> int:
    """Serve until a signal or a fault; returns the exit code. Raises `StartupError`."""
    configure_logging(loaded.config.log)
    # Of what loading makes nearly all stays, and each full collection would walk it again: a seventh of the time until it is ready.
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(loaded.config))
    finally:
        gc.enable()  # also when it never became ready


class EngineSeat:
    """The `EngineClient` that the transports get: empty while the model loads, then the engine's."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: EngineClient | None = None
        self.phase = "starting"

    def fill(self, engine: EngineClient) -> None:
        """From now on every call goes to `engine`."""
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        """Pass the request on; raises `Loading` before there is an engine."""
        if self._engine is None:
            raise Loading(f"the service is not ready yet: {self.phase}")
        stream = self._engine.generate(request)
        try:
            async for events in stream:
                yield events
        finally:
            await stream.aclose()  # type: ignore[attr-defined] # an async generator, which is how `generate` is written

    def stats(self) -> EngineStats:
        """The engine's snapshot, or an empty one."""
        if self._engine is not None:
            return self._engine.stats()
        config = self._config
        return EngineStats(
            model=config.model.served_name or config.model.path,
            backend=config.backend.name,
            dtype=config.model.dtype,
            device=config.backend.device,
            max_model_len=0,
            running=0,
            waiting=0,
            pool=PoolUsage(total=0, used=0, cached=0, free=0, shared=0, block_size=config.cache.block_size),
            steps=0,
            preemptions=0,
            prompt_tokens=0,
            cached_prompt_tokens=0,
            generated_tokens=0,
        )

    def health(self) -> Health:
        """Alive and not ready while loading, then the engine's."""
        if self._engine is None:
            return Health(is_alive=True, is_ready=False, reason=self.phase)
        return self._engine.health()


async def _serve(config: Config) -> int:
    began = time.monotonic()
    seat = EngineSeat(config)
    metrics = ServiceMetrics(seat.stats)
    http = HttpServer(create_app(seat, config, metrics_text=metrics.render), config.server)
    rpc = RpcServer(seat, config.server) if config.server.rpc is not None else None
    http.bind()
    if rpc is not None:
        rpc.bind()
    transports: list[TransportServer] = [http] if rpc is None else [http, rpc]
    stopping = _stop_on_signals()
    for transport in transports:
        await transport.start()
    log.info("service.listening", url=http.url, rpc=None if rpc is None else rpc.address)
    try:
        return await _serve_model(config, seat, metrics, transports, stopping, began, http.url)
    finally:
        for transport in transports:
            await transport.stop()


async def _serve_model(
    config: Config,
    seat: EngineSeat,
    metrics: ServiceMetrics,
    transports: list[TransportServer],
    stopping: asyncio.Event,
    began: float,
    url: str,
) -> int:
    """Load, serve and drain, with the transports already accepting."""
    loading = asyncio.ensure_future(_load(config, seat, metrics))
    if not await _finishes_before(loading, stopping):
        for transport in transports:
            await transport.stop()
        log.info("service.stopped", reason="signal while loading")
        _leave(0)  # the step thread is inside a load that cannot be interrupted
    engine = await loading
    seat.fill(engine)
    _keep_what_was_loaded()
    stats = engine.stats()
    log.info(
        "service.ready",
        url=url,
        model=stats.model,
        backend=stats.backend,
        dtype=stats.dtype,
        blocks=stats.pool.total,
        max_model_len=stats.max_model_len,
        start_s=round(time.monotonic() - began, 3),
    )
    dead = asyncio.ensure_future(engine.wait_until_dead())
    is_dead = await _finishes_before(dead, stopping)
    limit_s = FAULT_DRAIN_S if is_dead else config.server.drain_s
    log.info("service.draining", reason=dead.result() if is_dead else "signal", limit_s=limit_s)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.drain(limit_s))
        for transport in transports:
            group.create_task(transport.drain(limit_s))
    dead.cancel()
    await engine.stop()
    log.info("service.stopped", reason="fault" if is_dead else "signal")
    return 1 if is_dead else 0


def _keep_what_was_loaded() -> None:
    """Begin to collect garbage again, and never walk what loading made: nearly all of it stays.

    Of some 380,000 objects 7,000 are garbage and hold no memory to speak of, and to find them takes 0.1 s of a start. One that compiled kernels
    leaves 1,100,000, half of them garbage.
    """
    if gc.get_count()[0] > OBJECTS_WORTH_A_COLLECTION:
        gc.collect()
    gc.freeze()
    gc.enable()


async def _load(config: Config, seat: EngineSeat, metrics: ServiceMetrics) -> Any:
    """Build the engine, its runner on the step thread, and start it."""
    # Imported here: torch takes a second, and the sockets should answer before.
    from service.engine.async_engine import AsyncEngine, EngineLimits
    from service.engine.executor import StepExecutor

    loop = asyncio.get_running_loop()
    parts: list[Any] = []

    def report(text: str) -> None:
        seat.phase = text
        loop.call_soon_threadsafe(lambda: log.info("service.starting", phase=text))

    def build() -> Any:
        from service.assembly import assemble

        parts.append(assemble(config, report))
        return parts[0].runner

    executor = StepExecutor(build)
    await executor.start()
    assembly = parts[0]
    for name, reasons in assembly.refusals.items():
        log.info("backend.refused", backend=name, reasons=reasons)
    engine = AsyncEngine(
        assembly.core,
        executor,
        assembly.tokenizer,
        assembly.template,
        info=assembly.info,
        eos_ids=assembly.eos_ids,
        limits=EngineLimits(slow_consumer_s=config.server.slow_consumer_s),
        metrics=metrics,
    )
    await engine.start()
    return engine


async def _finishes_before(work: asyncio.Future[Any], stopping: asyncio.Event) -> bool:
    """Wait for whichever comes first; say whether it was `work`."""
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    return work.done()


def _stop_on_signals() -> asyncio.Event:
    """Set the returned event at the first SIGTERM or SIGINT; the second one ends the process at once."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            _leave(130)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopping


def _leave(code: int) -> None:
    """End the process without waiting for a thread that may compute for long."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
