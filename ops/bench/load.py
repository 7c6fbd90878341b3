"""Sends completions to an OpenAI-compatible server, closed or open loop, and notes when every chunk arrived.

Not statistics (see report.py). Every request ends in exactly one `Answer`, and an answer without `error` has the
token counts that were asked for: a server that stops early, cuts the prompt or hides its usage cannot look fast. The exception
says so itself: an answer that the time limit cut (`is_cut`) has what came until then.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prompts import Prompt, Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send: the base URL without `/v1`, and the model's name there."""

    url: str
    model: str


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are `time.perf_counter()` seconds; None = it never came to that."""

    due: float  # when it should have been sent: closed loop = sent, open loop = the planned arrival
    first: float | None = None  # first chunk with text
    last: float | None = None  # last chunk with a choice
    done: float | None = None
    gaps: list[float] = field(default_factory=list)  # seconds between chunks that carry tokens
    num_chunks: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    is_cut: bool = False  # the load's time was over first; its tokens are uncounted until `count_cut`
    text: list[str] = field(default_factory=list)


class RequestFailed(Exception):
    """A request did not get what it asked for; the message goes into `Answer.error`."""


class SseParser:
    """Puts the `data` of server-sent events together from bytes cut anywhere.

    Knows what OpenAI-style servers send: `data:` lines, blank lines, comments; other fields are skipped. Lines end in
    LF or CRLF. Source: HTML standard, section 9.2.6.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, block: bytes) -> list[bytes]:
        """Return the data of each event that `block` completes."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """Open a session that makes one connection a request: some servers drop idle ones without a word."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )


async def closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Prompt],
    concurrency: int,
    limit_s: float | None = None,
) -> list[Answer]:
    """Keep `concurrency` requests under way until the prompts run out; answers in the order of the prompts.

    After `limit_s` seconds what is under way is cut, and what was not sent has no answer.
    """
    answers: list[Answer | None] = [None] * len(prompts)
    todo: Iterator[tuple[int, Prompt]] = iter(enumerate(prompts))
    until = None if limit_s is None else time.perf_counter() + limit_s

    async def worker() -> None:
        for index, prompt in todo:  # one iterator for all workers: each prompt goes out once
            if until is not None and time.perf_counter() >= until:
                return
            answers[index] = await complete(session, target, prompt, until=until)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(prompts))):
            tasks.create_task(worker())
    return [answer for answer in answers if answer is not None]


async def open_loop(
    session: aiohttp.ClientSession, target: Target, prompts: Sequence[Prompt], rate: float, seed: int | str
) -> list[Answer]:
    """Send at Poisson arrivals, `rate` a second, whatever the server does."""
    rng = random.Random(f"{seed}/arrivals")
    gaps = [0.0, *(rng.expovariate(rate) for _ in prompts[1:])]
    return await timed_loop(session, target, prompts, list(itertools.accumulate(gaps)))


async def timed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float],
    limit_s: float | None = None,
) -> list[Answer]:
    """Send each prompt `arrivals_s` seconds (ascending) after the start, whatever the server does; cut all after `limit_s`.

    Waiting counts from the planned arrival, so a client or server that lags cannot hide its queue.
    """
    start = time.perf_counter()
    until = None if limit_s is None else start + limit_s
    sent = []
    async with asyncio.TaskGroup() as tasks:
        for prompt, arrival_s in zip(prompts, arrivals_s, strict=True):
            due = start + arrival_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent.append(tasks.create_task(complete(session, target, prompt, due, until)))
    return [task.result() for task in sent]


async def complete(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Prompt,
    due: float | None = None,
    until: float | None = None,
) -> Answer:
    """Stream one greedy completion of exactly `prompt.max_tokens` tokens, no longer than until `until`.

    Both are `time.perf_counter()` seconds. Failures are returned, never raised.
    """
    now = time.perf_counter()
    answer = Answer(due=now if due is None else due)
    try:
        async with asyncio.timeout(None if until is None else max(0.0, until - now)) as limit:
            await _stream(session, target, prompt, answer)
            _check_counts(prompt, answer)
    except (aiohttp.ClientError, OSError, TimeoutError, RequestFailed) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            answer.is_cut = True
        else:
            answer.error = str(error) if isinstance(error, RequestFailed) else f"{type(error).__name__}: {error}"
    answer.done = time.perf_counter()
    return answer


def count_cut(answer: Answer, prompt: Prompt, tokenizer: Tokenizer | None) -> None:
    """Count the tokens of an answer that was cut: its text is encoded again, since no server says how far it had come.

    Encoding a text gives about as many tokens as it was generated from. Without a tokenizer a chunk counts as a token.
    """
    if answer.first is not None:
        answer.prompt_tokens = prompt.num_tokens or 0
        text = "".join(answer.text)
        answer.output_tokens = len(tokenizer.encode(text).ids) if tokenizer is not None else answer.num_chunks


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Ask the server for the name of its first model."""
    async with session.get(url + "/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


async def _stream(session: aiohttp.ClientSession, target: Target, prompt: Prompt, answer: Answer) -> None:
    """Fill `answer` from the stream. Raises RequestFailed when the server refuses, fails or stops in between."""
    body = {
        "model": target.model,
        "prompt": prompt.text,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parser = SseParser()
    async with session.post(target.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise RequestFailed(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for block in response.content.iter_any():
            now = time.perf_counter()
            for data in parser.feed(block):
                if data.strip() == b"[DONE]":
                    return
                try:
                    _note_chunk(json.loads(data), now, answer)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise RequestFailed(f"not a completion chunk: {data[:200]!r}") from error
    raise RequestFailed("the stream ended without [DONE]")


def _note_chunk(chunk: dict[str, Any], now: float, answer: Answer) -> None:
    if chunk.get("error"):
        raise RequestFailed(f"error in the stream: {json.dumps(chunk['error'])[:300]}")
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in chunk.get("choices") or ():
        text = choice.get("text") or ""
        previous, answer.last = answer.last, now
        if not text and choice.get("finish_reason"):
            continue  # says only that the stream is over
        # A chunk with empty text is a token whose characters are not complete, or a special token. It moves the
        # clock, but the reader sees nothing: the first token is the first text.
        answer.num_chunks += 1
        answer.text.append(text)
        if answer.first is not None and previous is not None:
            answer.gaps.append(now - previous)
        elif text:
            answer.first = now


def _check_counts(prompt: Prompt, answer: Answer) -> None:
    if answer.output_tokens == 0 and answer.prompt_tokens == 0:
        raise RequestFailed("no usage in the stream, so its tokens cannot be counted")
    if answer.output_tokens != prompt.max_tokens:
        raise RequestFailed(f"asked for {prompt.max_tokens} new tokens, got {answer.output_tokens}")
    if prompt.num_tokens is not None and answer.prompt_tokens != prompt.num_tokens:
        raise RequestFailed(f"the prompt has {prompt.num_tokens} tokens, the server counted {answer.prompt_tokens}")
    if answer.first is None:
        answer.first = answer.last  # nothing but special tokens: their arrival is all there is
    if answer.first is None:
        raise RequestFailed("no chunk with a choice in the stream")
