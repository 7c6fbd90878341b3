"""An engine that answers from a script, for tests of what stands between a socket and the engine.

A test gives `script`, a function from the request to its steps: lists of events to send, an exception to raise, or an `asyncio.Event` to
wait for (how a test holds an answer at a point of its choosing). Everything that was asked is recorded; an answer whose iterator was closed
before its end counts as aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from service.errors import LooseleafError
from service.messages import (
    Delta,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Health,
    PoolUsage,
    Started,
    TokenLogprob,
    TopToken,
    Usage,
)

MODEL = "tiny-test"
Step = list[Event] | LooseleafError | Exception | asyncio.Event
Script = Callable[[GenerateRequest], Iterable[Step]]


class FakeEngine:
    """Implements `EngineClient`."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or (lambda request: spoken(request, ["Hello", ",", " world"]))
        self.health_now = Health(is_alive=True, is_ready=True)
        self.requests: list[GenerateRequest] = []
        self.num_finished = 0
        self.num_failed = 0
        self.num_aborted = 0
        self.num_running = 0
        self._changed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        self.requests.append(request)
        self.num_running += 1
        self._notify()
        has_ended = False
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    has_ended = True
                    self.num_failed += 1
                    raise step
                else:
                    if any(isinstance(event, Finished) for event in step):
                        has_ended = True
                        self.num_finished += 1
                    yield step
                    await asyncio.sleep(0)  # as an engine would: the next step is another turn of the loop
            has_ended = True
        finally:
            self.num_running -= 1
            if not has_ended:
                self.num_aborted += 1
            self._notify()

    def stats(self) -> EngineStats:
        return EngineStats(
            model=MODEL,
            backend="reference",
            dtype="float32",
            device="cpu",
            max_model_len=2048,
            running=self.num_running,
            waiting=0,
            pool=PoolUsage(total=63, used=3, cached=10, free=50, shared=1, block_size=16),
            steps=7,
            preemptions=0,
            prompt_tokens=11,
            cached_prompt_tokens=4,
            generated_tokens=13,
        )

    def health(self) -> Health:
        return self.health_now

    async def until(self, condition: Callable[[FakeEngine], bool]) -> None:
        """Wait until `condition` holds; a test that would wait for ever fails instead."""
        async with asyncio.timeout(10):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()


def started(request: GenerateRequest) -> Started:
    """The first event: the prompt has one token for each of its words, or the ids that were given."""
    text = prompt_text(request)
    ids = request.prompt if isinstance(request.prompt, tuple) else tuple(range(100, 100 + len(words(text))))
    logprobs = None
    if request.sampling.prompt_logprobs is not None:
        entries = [entry(word, 100 + i, request.sampling.prompt_logprobs) for i, word in enumerate(words(text))]
        logprobs = (structs_without_logprob(entries[0]), *entries[1:]) if entries else ()
    return Started(
        request_id=request.request_id,
        prompt_token_ids=ids,
        cached_tokens=2,
        prompt_text=text if request.echo_prompt else None,
        prompt_logprobs=logprobs,
    )


def spoken(
    request: GenerateRequest,
    pieces: list[str],
    *,
    finish_reason: FinishReason = "stop",
    pause: asyncio.Event | None = None,
) -> Iterable[Step]:
    """Answer every choice with `pieces`, a token each, its index appended to the last one when n > 1.

    `pause` holds the answer after its first token. `max_tokens` cuts as an engine would.
    """
    first = started(request)
    yield [first]
    sampling = request.sampling
    limit = len(pieces) if sampling.max_tokens is None else min(sampling.max_tokens, len(pieces))
    for step in range(limit):
        events: list[Event] = []
        for index in range(sampling.n):
            is_last = step == limit - 1
            text = pieces[step] + (f"#{index}" if is_last and sampling.n > 1 else "")
            events.append(
                Delta(
                    index=index,
                    text=text,
                    token_ids=(step,),
                    logprobs=None if sampling.logprobs is None else (entry(text, step, sampling.logprobs),),
                    finish_reason=("length" if limit < len(pieces) else finish_reason) if is_last else None,
                )
            )
        yield events
        if step == 0 and pause is not None:
            yield pause
    if limit == 0:
        yield [Delta(index=index, text="", finish_reason="length") for index in range(sampling.n)]
    usage = Usage(
        prompt_tokens=len(first.prompt_token_ids),
        completion_tokens=limit * sampling.n,
        cached_tokens=first.cached_tokens,
    )
    yield [Finished(usage=usage)]


def entry(text: str, token_id: int, num_top: int) -> TokenLogprob:
    """A token with made-up logprobs."""
    top = tuple(
        TopToken(token_id=900 + i, text=f"top{i}", raw=f"top{i}".encode(), logprob=-0.5 - i) for i in range(num_top)
    )
    return TokenLogprob(token_id=token_id, text=text, raw=text.encode(), logprob=-0.25, top=top)


def structs_without_logprob(token: TokenLogprob) -> TokenLogprob:
    """The first prompt token, which nothing precedes."""
    return TokenLogprob(token_id=token.token_id, text=token.text, raw=token.raw, logprob=None)


def words(text: str) -> list[str]:
    """Cut text into words that keep the space before them."""
    cut: list[str] = []
    for part in text.split(" "):
        cut.append(f" {part}" if cut else part)
    return cut


def prompt_text(request: GenerateRequest) -> str:
    """The prompt as text."""
    if isinstance(request.prompt, str):
        return request.prompt
    if request.prompt is not None:
        return " ".join(f"t{token_id}" for token_id in request.prompt)
    return " ".join(str(message.content) for message in request.messages or ())
