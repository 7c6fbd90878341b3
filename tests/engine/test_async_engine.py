"""The engine as a client sees it: streams, text, refusals, and that leaving gives everything back."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence

import pytest

from service.engine.async_engine import EngineLimits
from service.engine.batch import StepBatch
from service.engine.request import choice_seed
from service.errors import ContextTooLong, Draining, InvalidRequest, LooseleafError, SlowConsumer
from service.messages import ChatMessage, Delta, Event, Finished, GenerateRequest, SamplingParams, Started
from tests.factories import collect, make_request, running_engine, tiny_template, tiny_tokenizer
from tests.fakes import Choose, continuation


def scripted(text: str, num_prompt: int) -> Choose:
    """Return a choice function that answers with the tokens of `text`, then with end-of-sequence."""
    ids = [*tiny_tokenizer().encode(text, add_special_tokens=False), 2]

    def choose(context: Sequence[int], seed: int) -> int:
        return ids[min(len(context) - num_prompt, len(ids) - 1)]

    return choose


PROMPT = "The cat sat"
NUM_PROMPT = len(tiny_tokenizer().encode(PROMPT))
SHORT = SamplingParams(temperature=0.0, max_tokens=3)


# ── The answer ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_streams_started_then_deltas_then_finished() -> None:
    async with running_engine() as it:
        answer = await collect(it.engine, make_request(PROMPT, request_id="mine", max_tokens=8))
    prompt = it.tokenizer.encode(PROMPT)
    expected = continuation(prompt, 8)
    assert answer.started.request_id == "mine"
    assert list(answer.started.prompt_token_ids) == prompt
    assert answer.token_ids() == expected
    assert answer.text() == it.tokenizer.decode(expected)
    assert answer.last().finish_reason == "length"
    assert answer.finished.usage.prompt_tokens == len(prompt)
    assert answer.finished.usage.completion_tokens == 8


async def test_messages_are_rendered_with_the_chat_template() -> None:
    messages = (ChatMessage(role="user", content="Hello"),)
    async with running_engine() as it:
        request = GenerateRequest(
            request_id="chat", messages=messages, sampling=SamplingParams(temperature=0.0, max_tokens=3)
        )
        answer = await collect(it.engine, request)
    expected = tiny_template().encode([{"role": "user", "content": "Hello"}])
    assert list(answer.started.prompt_token_ids) == expected
    assert answer.token_ids() == continuation(expected, 3)


async def test_a_token_id_prompt_is_never_altered_and_an_echo_gives_its_text() -> None:
    prompt = tuple(tiny_tokenizer().encode("Once upon"))
    async with running_engine() as it:
        answer = await collect(it.engine, make_request(prompt, echo_prompt=True))
        own = await collect(it.engine, make_request("Once upon", echo_prompt=True))
    assert answer.started.prompt_token_ids == prompt
    assert answer.started.prompt_text == own.started.prompt_text == "Once upon"


async def test_an_end_of_sequence_token_is_counted_and_is_not_text() -> None:
    async with running_engine(choose=scripted("fine.", NUM_PROMPT)) as it:
        answer = await collect(it.engine, make_request(PROMPT, max_tokens=50))
    assert answer.text() == "fine."
    assert answer.token_ids()[-1] == 2
    assert answer.last().finish_reason == "stop"
    assert answer.last().stop_reason is None
    assert answer.finished.usage.completion_tokens == len(answer.token_ids())


@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_token_is_text_only_where_it_is_asked_for(is_included: bool) -> None:
    """The token that ends a choice is reported, counted, and left out of the text."""
    ids = tiny_tokenizer().encode("fine.", add_special_tokens=False)
    async with running_engine(choose=scripted("fine.", NUM_PROMPT)) as it:
        request = make_request(PROMPT, stop_token_ids=(ids[-1],), include_stop_str_in_output=is_included)
        answer = await collect(it.engine, request)
        shown = await collect(it.engine, make_request(PROMPT, skip_special_tokens=False))
    assert answer.token_ids() == ids
    assert answer.text() == it.tokenizer.decode(ids if is_included else ids[:-1])
    assert answer.last().stop_reason == ids[-1]
    assert shown.text() == "fine."  # not even with special tokens shown is the end of the text a part of it


async def test_text_held_back_for_a_stop_string_is_given_out_at_the_end() -> None:
    text = "one two thr"
    async with running_engine(choose=scripted(text, NUM_PROMPT)) as it:
        stopped = await collect(it.engine, make_request(PROMPT, max_tokens=50, stop=("three",)))
    assert stopped.text() == text
    assert (stopped.last().finish_reason, stopped.last().stop_reason) == ("stop", None)


@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_string_across_tokens_ends_the_choice_and_the_engine_stops_computing(
    is_included: bool, overlaps: bool
) -> None:
    text = "one two three four five six seven"
    async with running_engine(choose=scripted(text, NUM_PROMPT)) as it:
        request = make_request(PROMPT, max_tokens=200, stop=("three fo", "zzz"), include_stop_str_in_output=is_included)
        answer = await collect(it.engine, request)
        num_computed = sum(len(entry.seeds) for batch in it.runner.batches for entry in batch.entries)
    assert answer.text() == ("one two three fo" if is_included else "one two ")
    assert answer.last().finish_reason == "stop"
    assert answer.last().stop_reason == "three fo"
    assert len(answer.token_ids()) == answer.finished.usage.completion_tokens
    assert num_computed - len(answer.token_ids()) <= overlaps  # a step that was in flight by then
    assert not any("three" in delta.text for delta in answer.deltas if not is_included)


async def test_stop_strings_do_not_count_before_min_tokens() -> None:
    """SMP-08: a stop string within the first min_tokens tokens is text; the next one stops."""
    text = "stop and stop and stop"
    first = len(tiny_tokenizer().encode("stop and", add_special_tokens=False))
    async with running_engine(choose=scripted(text, NUM_PROMPT)) as it:
        answer = await collect(it.engine, make_request(PROMPT, max_tokens=200, stop=("stop",), min_tokens=first))
    assert answer.text() == "stop and "
    assert answer.last().stop_reason == "stop"
    assert len(answer.token_ids()) >= first


async def test_a_stop_string_and_the_last_token_at_once_is_a_stop() -> None:
    text = "one two three"
    num_tokens = len(tiny_tokenizer().encode(text, add_special_tokens=False))
    async with running_engine(choose=scripted(text, NUM_PROMPT)) as it:
        answer = await collect(it.engine, make_request(PROMPT, max_tokens=num_tokens, stop=("three",)))
    assert answer.text() == "one two "
    assert (answer.last().finish_reason, answer.last().stop_reason) == ("stop", "three")


async def test_choices_have_their_own_text_seed_and_end() -> None:
    """SMP-14: three choices, indices 0..2, one finish reason each, prompt counted once."""
    async with running_engine() as it:
        answer = await collect(it.engine, make_request(PROMPT, n=3, temperature=1.0, max_tokens=6, seed=5))
        again = await collect(it.engine, make_request(PROMPT, n=3, temperature=1.0, max_tokens=6, seed=5))
        assert it.engine.stats().pool.used == 0
    for index in range(3):
        expected = continuation(answer.started.prompt_token_ids, 6, seed=choice_seed(5, index))
        assert answer.token_ids(index) == again.token_ids(index) == expected
        assert answer.last(index).finish_reason == "length"
    assert len({answer.text(index) for index in range(3)}) == 3
    usage = answer.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (NUM_PROMPT, 18)


async def test_logprobs_name_tokens_and_alternatives() -> None:
    async with running_engine() as it:
        answer = await collect(it.engine, make_request(PROMPT, logprobs=2, prompt_logprobs=0, max_tokens=3))
    logprobs = [entry for delta in answer.deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == answer.token_ids()
    assert all(len(entry.top) == 2 and entry.text == it.tokenizer.token_text(entry.token_id) for entry in logprobs)
    prompt_logprobs = answer.started.prompt_logprobs
    assert prompt_logprobs is not None
    assert [entry.token_id for entry in prompt_logprobs] == list(answer.started.prompt_token_ids)
    assert prompt_logprobs[0].logprob is None
    assert all(entry.logprob is not None for entry in prompt_logprobs[1:])


async def test_requests_with_one_id_are_answered_apart() -> None:
    """API-11: the client's id is echoed and is never a key."""
    async with running_engine() as it:
        requests = [
            make_request(f"{word} sat", request_id="same", max_tokens=n) for word, n in (("A cat", 4), ("Two dogs", 9))
        ]
        answers = await asyncio.gather(*(collect(it.engine, request) for request in requests))
    for answer, n in zip(answers, (4, 9), strict=True):
        assert answer.started.request_id == "same"
        assert answer.token_ids() == continuation(answer.started.prompt_token_ids, n)


async def test_a_consumer_that_lags_gets_the_same_text_in_fewer_deltas() -> None:
    """API-05: pending deltas merge; the engine does not wait for the reader."""
    async with running_engine() as it:
        fast = await collect(it.engine, make_request(PROMPT, max_tokens=40))
        lagging = it.engine.generate(make_request(PROMPT, max_tokens=40))
        events: list[Event] = [*await anext(lagging)]
        await collect(it.engine, make_request("Another one", max_tokens=60))  # ends after the other has been computed
        assert it.engine.stats().running == 0
        async for batch in lagging:
            events += batch
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) < 5 < len(fast.deltas)
    assert "".join(delta.text for delta in deltas) == fast.text()
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)


async def test_a_consumer_that_never_reads_is_ended_and_its_neighbour_is_not() -> None:
    """API-05: after the limit the stream fails with `SlowConsumer` and its blocks are free."""
    async with running_engine(limits=EngineLimits(slow_consumer_s=30.0), max_model_len=1000) as it:
        slow = it.engine.generate(make_request(PROMPT, max_tokens=900))
        await anext(slow)
        neighbour = it.engine.generate(make_request("Another one", max_tokens=200))
        await anext(neighbour)
        it.runner.gate.close()
        await it.runner.gate.wait_until_held()
        it.clock.advance(31.0)
        it.runner.gate.open()
        tokens = [token async for batch in neighbour for e in batch if isinstance(e, Delta) for token in e.token_ids]
        assert len(tokens) >= 198  # all but what came with the first events
        with pytest.raises(SlowConsumer, match="not read for 30 s"):
            await anext(slow)
        assert it.engine.stats().pool.used == 0


# ── Leaving ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_the_iterator_aborts_and_gives_the_blocks_back(n: int) -> None:
    """API-03, SMP-14: a client that goes away in the middle."""
    async with running_engine() as it:
        stream = it.engine.generate(make_request(PROMPT, max_tokens=900, n=n, temperature=1.0))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await collect(it.engine, make_request("Another one"))  # a step later
        stats = it.engine.stats()
        assert (stats.running, stats.waiting, stats.pool.used) == (0, 0, 0)


async def test_cancelling_a_reader_that_waits_in_the_queue_frees_its_place() -> None:
    """API-03: fifty clients that leave while queued."""
    async with running_engine(max_num_seqs=1) as it:
        running = it.engine.generate(make_request(PROMPT, max_tokens=900))
        await anext(running)
        it.runner.gate.close()
        tasks = [asyncio.create_task(collect(it.engine, make_request(f"number {i}"))) for i in range(50)]
        await it.runner.gate.wait_until_held()
        assert it.engine.stats().waiting == 50
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert it.engine.stats().waiting == 0
        it.runner.gate.open()
        await running.aclose()  # type: ignore[attr-defined]


async def test_leaving_during_a_step_frees_the_blocks_after_it() -> None:
    """API-03: the step in flight may still write into them."""
    async with running_engine() as it:
        it.runner.gate.close()
        task = asyncio.create_task(collect(it.engine, make_request(PROMPT)))
        await it.runner.gate.wait_until_held()
        task.cancel()
        await asyncio.wait([task])
        assert it.engine.stats().pool.used > 0
        it.runner.gate.open()
        await collect(it.engine, make_request("Another one"))
        assert it.engine.stats().pool.used == 0


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ((1, 2, 320), {}, "prompt[2]"),
        ((-1, 2), {}, "prompt[0]"),
        ((), {}, "prompt"),
        ("", {}, "prompt"),
        (PROMPT, {"logit_bias": {320: 1.0}}, "logit_bias"),
        (PROMPT, {"logit_bias": {-1: 1.0}}, "logit_bias"),
        (PROMPT, {"logit_bias": {7: math.nan}}, "logit_bias"),
        (PROMPT, {"stop_token_ids": (320,)}, "stop_token_ids"),
        (PROMPT, {"temperature": math.nan}, "temperature"),
        (PROMPT, {"min_p": math.nan}, "min_p"),
        (PROMPT, {"min_tokens": 9}, "min_tokens"),
        (PROMPT, {"n": 9}, "n"),
        (PROMPT, {"max_tokens": 1000}, "max_tokens"),
    ],
)
async def test_bad_input_is_refused_with_the_field_beside_an_undisturbed_neighbour(
    prompt: str | tuple[int, ...], sampling: dict[str, object], param: str
) -> None:
    """SMP-03, SMP-08, SMP-12, SCH-06: before anything is scheduled."""
    async with running_engine() as it:
        neighbour = asyncio.create_task(collect(it.engine, make_request(PROMPT, max_tokens=30)))
        with pytest.raises(InvalidRequest) as caught:
            await collect(it.engine, make_request(prompt, **sampling))  # type: ignore[arg-type]
        assert caught.value.param == param
        answer = await neighbour
    assert answer.token_ids() == continuation(answer.started.prompt_token_ids, 30)


async def test_exactly_one_of_prompt_and_messages_is_needed() -> None:
    messages = (ChatMessage(role="user", content="Hello"),)
    async with running_engine() as it:
        for request in (
            GenerateRequest(request_id="none"),
            GenerateRequest(request_id="both", prompt="a", messages=messages),
            GenerateRequest(request_id="empty", messages=()),
        ):
            with pytest.raises(InvalidRequest, match=r"exactly one|at least one"):
                await collect(it.engine, request)


async def test_a_prompt_far_too_long_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """API-09, the engine's part: a bound on the tokens that costs nothing."""
    text = "word " * 10_000
    async with running_engine(max_model_len=200) as it:
        monkeypatch.setattr(it.tokenizer, "encode", lambda *args, **kwargs: pytest.fail("tokenised"))
        with pytest.raises(ContextTooLong, match="at most 199 fit"):
            await collect(it.engine, make_request(text))
        chat = GenerateRequest(request_id="chat", messages=(ChatMessage(role="user", content=text),))
        with pytest.raises(ContextTooLong) as caught:
            await collect(it.engine, chat)
    assert caught.value.param == "messages"


async def test_a_long_prompt_is_tokenised_on_a_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """API-09: never on the loop, never on the step thread."""
    names: list[str] = []
    async with running_engine(num_blocks=3000, max_model_len=8000, token_budget=512) as it:
        encode = it.tokenizer.encode

        def spy(text: str, **options: bool) -> list[int]:
            names.append(threading.current_thread().name)
            return encode(text, **options)

        monkeypatch.setattr(it.tokenizer, "encode", spy)
        await collect(it.engine, make_request("word " * 500))
    assert len(names) == 1
    assert names[0].startswith("looseleaf-text")


async def test_a_prompt_that_cannot_be_read_fails_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """API-02: a fault of the tokenizer is the service's, and only this request's."""
    async with running_engine() as it:
        with monkeypatch.context() as patch:
            patch.setattr(it.tokenizer, "encode", lambda *args, **options: 1 // 0)
            with pytest.raises(LooseleafError) as caught:
                await collect(it.engine, make_request(PROMPT))
        assert caught.value.http_status == 500
        await collect(it.engine, make_request(PROMPT))


async def test_every_chat_is_rendered_on_a_worker_thread() -> None:
    """API-09, TOK-09: a template may take its whole time limit for a short message, and a tool call may hold megabytes."""
    names: list[str] = []

    class Spy:
        def encode(self, messages: object) -> list[int]:
            names.append(threading.current_thread().name)
            return [10, 11, 12]

    async with running_engine(template=Spy()) as it:  # type: ignore[arg-type]
        for message in (
            ChatMessage(role="user", content="short"),
            ChatMessage(role="assistant", tool_calls=({"function": {"arguments": "x" * 100_000}},)),
        ):
            await collect(it.engine, GenerateRequest(request_id="chat", messages=(message,), sampling=SHORT))
    assert [name.startswith("looseleaf-text") for name in names] == [True, True]


async def test_a_stop_while_prompts_wait_for_a_worker_ends_their_requests_with_a_typed_error() -> None:
    """API-02: also those that no worker has begun."""
    entered, may_go = threading.Semaphore(0), threading.Event()

    class Slow:
        def encode(self, messages: object) -> list[int]:
            entered.release()
            may_go.wait(10)
            return [10, 11, 12]

    async with running_engine(template=Slow()) as it:  # type: ignore[arg-type]
        chat = GenerateRequest(request_id="c", messages=(ChatMessage(role="user", content="hi"),), sampling=SHORT)
        tasks = [asyncio.create_task(collect(it.engine, chat)) for _ in range(5)]
        for _ in range(2):
            assert await asyncio.to_thread(entered.acquire, timeout=10)
        await it.engine.stop()
        may_go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Draining] * 5


# ── The end of the engine ────────────────────────────────────────────────────────────────────────────


async def test_draining_lets_the_running_finish_and_refuses_the_new() -> None:
    async with running_engine() as it:
        it.runner.gate.close()
        running = asyncio.create_task(collect(it.engine, make_request(PROMPT, max_tokens=20)))
        await it.runner.gate.wait_until_held()
        drain = asyncio.create_task(it.engine.drain(60.0))
        await asyncio.sleep(0)  # the drain begins
        health = it.engine.health()
        assert (health.is_alive, health.is_ready) == (True, False)
        with pytest.raises(Draining):
            await collect(it.engine, make_request("late"))
        it.runner.gate.open()
        assert await drain
        assert len((await running).token_ids()) == 20


async def test_a_drain_past_its_deadline_ends_what_is_left_with_a_typed_error() -> None:
    async with running_engine(max_num_seqs=1) as it:
        it.runner.gate.close()
        tasks = [asyncio.create_task(collect(it.engine, make_request(f"number {i}"))) for i in range(3)]
        await it.runner.gate.wait_until_held()
        assert not await it.engine.drain(0.0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Draining] * 3
        it.runner.gate.open()


async def test_stopping_ends_running_requests_and_joins_the_step_thread() -> None:
    async with running_engine() as it:
        it.runner.gate.close()
        task = asyncio.create_task(collect(it.engine, make_request(PROMPT)))
        await it.runner.gate.wait_until_held()
        stop = asyncio.create_task(it.engine.stop())
        with pytest.raises(Draining):
            await task
        it.runner.gate.open()
        await stop
        assert it.runner.is_closed
        await it.engine.stop()


async def test_an_idle_engine_schedules_nothing_and_is_healthy() -> None:
    """OPS-01: idle is healthy; no step without a request."""
    async with running_engine() as it:
        await collect(it.engine, make_request(PROMPT))
        num_steps = it.engine.stats().steps
        for _ in range(20):
            await asyncio.sleep(0)
        assert it.engine.stats().steps == num_steps == len(it.runner.batches)
        assert it.engine.health().is_ready


# ── Steps made ahead ─────────────────────────────────────────────────────────────────────────────────


async def test_a_step_is_made_while_one_is_computed_and_made_again_when_a_request_comes() -> None:
    """The late one is computed in the very next step, as if that had not been made already."""
    async with running_engine(overlap=True) as it:
        it.runner.gate.close()
        first = asyncio.create_task(collect(it.engine, make_request((10, 11, 12), max_tokens=4)))
        await it.runner.gate.wait_until_held()
        assert len(it.core._flight) == 2
        late = asyncio.create_task(collect(it.engine, make_request((20, 21, 22), max_tokens=4)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert it.engine.stats().running == 2
        assert len(it.core._flight) == 2
        it.runner.gate.open()
        answers = await asyncio.gather(first, late)
        assert [len(batch.entries) for batch in it.runner.batches[:2]] == [1, 2]
    for answer in answers:
        assert answer.token_ids() == continuation(answer.started.prompt_token_ids, 4)


async def test_steps_made_in_turn_are_one_at_a_time() -> None:
    async with running_engine(overlap=False) as it:
        it.runner.gate.close()
        first = asyncio.create_task(collect(it.engine, make_request((10, 11, 12), max_tokens=4)))
        await it.runner.gate.wait_until_held()
        assert len(it.core._flight) == 1
        it.runner.gate.open()
        await first


async def test_a_step_that_was_recalled_is_not_computed_and_one_that_has_begun_stays() -> None:
    async with running_engine() as it:
        it.runner.gate.close()
        one, two, three = (StepBatch(step_id=step_id, entries=()) for step_id in (101, 102, 103))
        outputs = [it.executor.submit(batch) for batch in (one, two, three)]
        await it.runner.gate.wait_until_held()
        assert not it.executor.recall(outputs[0])
        assert it.executor.recall(outputs[1])
        assert not it.executor.recall(outputs[1])
        it.runner.gate.open()
        assert (await outputs[0]).step_id == 101
        assert (await outputs[2]).step_id == 103
        assert it.runner.batches == [one, three]


async def test_closing_the_executor_tells_every_result_that_was_computed() -> None:
    """Also those that are told a moment late because another step waits behind them."""
    async with running_engine() as it:
        outputs = [it.executor.submit(StepBatch(step_id=step_id, entries=())) for step_id in range(101, 106)]
        assert await it.executor.close()
        assert [output.step_id for output in await asyncio.gather(*outputs)] == list(range(101, 106))
