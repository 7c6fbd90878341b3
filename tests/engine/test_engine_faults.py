"""Whatever breaks, every stream gets its typed end, and the engine says what state it is in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import structlog

from service.engine.async_engine import MAX_FAILED_STEPS, EngineLimits
from service.engine.batch import StepBatch, StepOutput
from service.engine.executor import StepExecutor
from service.errors import Draining, EngineDead, LooseleafError, ModelLoadError, NonFiniteLogits, StepFailed
from tests.factories import TestEngine, collect, make_request, running_engine
from tests.fakes import continuation

PROMPT = "The cat sat"


def fault_at(
    *step_ids: int, error: Callable[[], BaseException] = lambda: RuntimeError("injected")
) -> Callable[[StepBatch], BaseException | None]:
    """Return a fault that raises at these steps."""

    def fault(batch: StepBatch) -> BaseException | None:
        return error() if batch.step_id in step_ids else None

    return fault


async def start_many(it: TestEngine, count: int) -> list[asyncio.Task[object]]:
    """Start requests of which some run and some wait, with the first step held at the gate."""
    it.runner.gate.close()
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(collect(it.engine, make_request(f"number {i}"))) for i in range(count)
    ]
    await it.runner.gate.wait_until_held()
    return tasks


def give_blocks_back(it: TestEngine) -> None:
    """End what the core still has after its engine has died: the fixture looks for blocks that are held."""
    it.core.fail_all(EngineDead("the engine has died"))
    for step in list(it.core._flight._steps):
        it.core.fail_step(step.batch.step_id, EngineDead("the engine has died"))


async def test_a_failing_step_fails_its_requests_only_and_the_engine_goes_on() -> None:
    """API-02: the waiting ones are answered."""
    async with running_engine(fault=fault_at(1), max_num_seqs=1) as it:
        tasks = await start_many(it, 3)
        it.runner.gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, StepFailed) for result in results] == [True, False, False]
        assert "injected" not in str(results[0])  # the cause is in the log, not on the wire
        assert it.engine.health().is_ready
        answer = await collect(it.engine, make_request(PROMPT))
        assert answer.token_ids() == continuation(answer.started.prompt_token_ids, 8)


async def test_steps_that_fail_in_a_row_end_the_engine_and_every_stream() -> None:
    """OPS-01, API-02: the fault is not the requests'."""
    fault = fault_at(*range(1, 100))
    async with running_engine(fault=fault, max_num_seqs=1) as it:
        tasks = await start_many(it, 5)
        it.runner.gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [StepFailed] * MAX_FAILED_STEPS + [EngineDead] * 2
        health = it.engine.health()
        assert not health.is_alive
        assert "3 steps in a row failed" in health.reason
        with pytest.raises(EngineDead):
            await collect(it.engine, make_request(PROMPT))
        assert await it.engine.wait_until_dead() == health.reason
        give_blocks_back(it)


async def test_steps_that_fail_now_and_then_do_not_end_the_engine() -> None:
    """OPS-01: only failures in a row speak against the engine."""
    async with running_engine(fault=fault_at(1, 2, 4, 5, 7)) as it:
        outcomes = [await attempt(it, max_tokens=1) for _ in range(8)]
        assert it.engine.health().is_ready
    assert outcomes == [StepFailed, StepFailed, None, StepFailed, StepFailed, None, StepFailed, None]


async def attempt(it: TestEngine, *, max_tokens: int) -> type[BaseException] | None:
    """Run one request; return the type of what ended it badly."""
    try:
        await collect(it.engine, make_request(PROMPT, max_tokens=max_tokens))
    except LooseleafError as error:
        return type(error)
    return None


@pytest.mark.parametrize("error", [lambda: EngineDead("poisoned context"), lambda: SystemExit(3)])
async def test_a_fatal_error_of_the_runner_ends_the_engine_at_once(error: Callable[[], BaseException]) -> None:
    """OPS-01: a poisoned device cannot serve the next step either."""
    async with running_engine(fault=fault_at(1, error=error), max_num_seqs=1) as it:
        tasks = await start_many(it, 3)
        it.runner.gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDead] * 3
        assert not it.engine.health().is_alive
        give_blocks_back(it)


async def test_a_fault_in_the_scheduler_is_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-01, API-02: running and waiting requests get an error, health says so."""
    async with running_engine(max_num_seqs=1) as it:
        tasks = await start_many(it, 3)

        def broken(now: float) -> None:
            raise ZeroDivisionError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(it.core, "schedule", broken)
            it.runner.gate.open()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDead] * 3
        assert "ZeroDivisionError" in it.engine.health().reason
        give_blocks_back(it)


async def test_a_fault_in_apply_is_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """API-02: the state cannot be trusted, so the engine ends."""
    async with running_engine(max_num_seqs=1) as it:
        tasks = await start_many(it, 2)

        def broken(output: StepOutput) -> None:
            raise ZeroDivisionError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(it.core, "apply", broken)
            it.runner.gate.open()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDead] * 2
        give_blocks_back(it)


async def test_an_output_of_another_step_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """API-02: a runner's slip harms only the requests of that step."""
    async with running_engine() as it:
        execute = it.runner.execute

        def slip(batch: StepBatch) -> StepOutput:
            output = execute(batch)
            return StepOutput(step_id=output.step_id + 1, outputs=output.outputs, compute_s=0.0)

        with monkeypatch.context() as patch:
            patch.setattr(it.runner, "execute", slip)
            with pytest.raises(StepFailed):
                await collect(it.engine, make_request(PROMPT))
        assert (await collect(it.engine, make_request(PROMPT))).last().finish_reason == "length"


@pytest.mark.parametrize("stop", [(), ("zzz",)])
async def test_a_text_that_cannot_be_made_fails_its_own_request(
    stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """API-02: the detokeniser raises, for a text made at once and for one made when it is read."""
    async with running_engine() as it:
        new_stream = it.tokenizer.new_stream

        class Broken:
            stopped_by = None

            def push(self, ids: object) -> None:
                raise ZeroDivisionError("injected")

        def choose(prompt_ids: tuple[int, ...], **options: object) -> object:
            return Broken() if prompt_ids[0] == 9 else new_stream(prompt_ids, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(it.tokenizer, "new_stream", choose)
        neighbour = asyncio.create_task(collect(it.engine, make_request(PROMPT, max_tokens=30)))
        with pytest.raises(LooseleafError, match="could not be turned into text"):
            await collect(it.engine, make_request((9, 10, 11), stop=stop, max_tokens=30))
        answer = await neighbour
    assert answer.token_ids() == continuation(answer.started.prompt_token_ids, 30)


async def test_impossible_logits_fail_one_request_with_their_own_error() -> None:
    async with running_engine(poison=lambda entry: "NaN" if 9 in entry.token_ids else None) as it:
        neighbour = asyncio.create_task(collect(it.engine, make_request((10, 11), max_tokens=4)))
        with pytest.raises(NonFiniteLogits):
            await collect(it.engine, make_request((9, 10, 11)))
        await neighbour


async def test_a_step_that_hangs_makes_the_engine_unhealthy_and_refuses_new_requests() -> None:
    """OPS-01: not alive after the documented time, alive again when the step ends after all."""
    async with running_engine(limits=EngineLimits(hung_step_s=10.0)) as it:
        (task,) = await start_many(it, 1)
        it.clock.advance(9.0)
        assert it.engine.health().is_alive
        it.clock.advance(2.0)
        health = it.engine.health()
        assert not health.is_alive
        assert not health.is_ready
        assert health.reason == "a step has been running for 11 s"
        with pytest.raises(EngineDead, match="11 s"):
            await collect(it.engine, make_request(PROMPT))
        it.runner.gate.open()
        await task
        assert it.engine.health().is_ready


async def test_a_step_that_never_ends_fails_running_and_waiting_requests() -> None:
    """OPS-01: nobody waits for ever; the first cause stays."""
    async with running_engine(limits=EngineLimits(dead_step_s=0.01), max_num_seqs=1) as it:
        tasks = await start_many(it, 3)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDead] * 3
        assert it.engine.health().reason == "a step did not end within 0.01 s"
        it.runner.gate.open()
        give_blocks_back(it)


async def test_a_runner_that_cannot_be_made_fails_the_start() -> None:
    def factory() -> object:
        raise ModelLoadError("no such file")

    executor = StepExecutor(factory)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError):
        await executor.start()
    assert await executor.close()


# ── One line a request ───────────────────────────────────────────────────────────────────────────────


class Counting:
    """Metrics that remember."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.tokens = 0

    def on_request_ended(self, outcome: str, *, ttft_s: float | None, duration_s: float, output_tokens: int) -> None:
        self.outcomes.append(outcome)

    def on_step(self, *, compute_s: float, num_tokens: int) -> None:
        self.tokens += num_tokens


async def test_each_request_is_logged_once_with_its_facts_and_never_its_text() -> None:
    metrics = Counting()
    with structlog.testing.capture_logs() as logs:
        async with running_engine(metrics=metrics, poison=lambda e: "NaN" if 9 in e.token_ids else None) as it:
            await collect(it.engine, make_request(PROMPT, request_id="good"))
            stream = it.engine.generate(make_request(PROMPT, request_id="left", max_tokens=900))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            with pytest.raises(NonFiniteLogits):
                await collect(it.engine, make_request((9, 10), request_id="bad"))
            with pytest.raises(LooseleafError):
                await collect(it.engine, make_request((), request_id="empty"))
    lines = {line["request_id"]: line for line in logs if "request_id" in line}
    assert [line["event"] for line in logs if "request_id" in line] == [
        "request.finished",
        "request.aborted",
        "request.failed",
        "request.refused",
    ]
    good = lines["good"]
    assert good["finish_reason"] == ["length"]
    assert (good["prompt_tokens"], good["output_tokens"], good["preemptions"]) == (
        len(it.tokenizer.encode(PROMPT)),
        8,
        0,
    )
    assert {"cached_tokens", "ttft_s", "duration_s"} <= set(good)
    assert lines["bad"]["code"] == "non_finite_logits"
    assert not any(PROMPT in str(value) for line in logs for value in line.values())
    assert metrics.outcomes == ["length", "aborted", "non_finite_logits", "invalid_request"]
    assert metrics.tokens >= len(it.tokenizer.encode(PROMPT)) + 7


async def test_no_stream_is_left_without_an_end_when_the_engine_stops_under_load() -> None:
    """API-02: ten streams, one stop."""
    async with running_engine() as it:
        tasks = await start_many(it, 10)
        stop = asyncio.create_task(it.engine.stop())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Draining] * 10
        it.runner.gate.open()
        await stop
