"""A long random mix of everything that can happen to a request, and then silence: nothing may be left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from service.engine.request import choice_seed
from service.errors import QueueFull
from tests.factories import TestEngine, collect, make_request, running_engine
from tests.fakes import choose_by_hash, continuation

EOS = 2


def choose(context: Sequence[int], seed: int) -> int:
    """Every token of the context counts, and about one choice in thirty ends the text."""
    token = choose_by_hash(context, seed)
    return EOS if token % 30 == 0 else token


def expected(prompt: Sequence[int], num_tokens: int, seed: int) -> list[int]:
    """What the request gets alone: up to `num_tokens`, less if the text ends."""
    tokens = continuation(prompt, num_tokens, seed=seed, choose=choose)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


class Mix:
    """Starts requests that end in every way; checks each answer that came to an end by itself."""

    def __init__(self, it: TestEngine, seed: int) -> None:
        self.it = it
        self.draw = random.Random(seed)
        self.ends: Counter[str] = Counter()

    def prompt(self) -> tuple[int, ...]:
        stem, length = self.draw.randrange(4), self.draw.randrange(1, 120)
        return tuple(5 + (stem * 101 + position * 13) % 300 for position in range(length))

    async def one(self) -> None:
        kind = self.draw.choice(["finish", "finish", "stop string", "three", "leave", "cancel", "cancel", "cancel"])
        prompt = self.prompt()
        n = 3 if kind == "three" else self.draw.choice([1, 1, 2])
        request = make_request(
            prompt,
            n=n,
            temperature=1.0,
            max_tokens=self.draw.randrange(1, 60),
            seed=7,
            priority=self.draw.choice([0, 0, 0, -1, 1]),
            stop=("e", "th") if kind == "stop string" else (),
        )
        if kind == "leave":
            await self.leave(request, after=self.draw.randrange(1, 12))
        elif kind == "cancel":
            await self.cancel(request, after=self.draw.choice([0, 0, 1, 2, 5]))
        else:
            answer = await collect(self.it.engine, request)
            assert request.sampling.max_tokens is not None
            for index in range(n):
                got = answer.token_ids(index)
                whole = expected(prompt, request.sampling.max_tokens, choice_seed(7, index))
                end = answer.last(index)
                if end.stop_reason is None:
                    assert got == whole
                    assert (end.finish_reason == "stop") == (got[-1] == EOS)
                else:
                    assert got == whole[: len(got)]
                self.ends[f"{end.finish_reason} {end.stop_reason or ''}".strip()] += 1

    async def leave(self, request: object, after: int) -> None:
        stream = self.it.engine.generate(request)  # type: ignore[arg-type]
        num_lists = 0
        async for _ in stream:
            num_lists += 1
            if num_lists == after:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        self.ends["left" if num_lists == after else "read"] += 1

    async def cancel(self, request: object, after: int) -> None:
        """Cancel the reader once it has had so many lists of events; 0 means while it waits or its prompt is computed."""
        num_lists, is_due = 0, asyncio.Event()

        async def read() -> None:
            nonlocal num_lists
            async for _ in self.it.engine.generate(request):  # type: ignore[arg-type]
                num_lists += 1
                if num_lists == after:
                    is_due.set()

        task = asyncio.create_task(read())
        due = asyncio.create_task(is_due.wait())
        if after:
            await asyncio.wait([task, due], return_when=asyncio.FIRST_COMPLETED)
        else:
            for _ in range(self.draw.choice([0, 1, 5, 50])):
                await asyncio.sleep(0)
        due.cancel()
        if task.cancel():
            self.ends["cancelled in decode" if num_lists else "cancelled before its first token"] += 1
        await asyncio.wait([task, due])


@pytest.mark.parametrize("seed", range(3))
async def test_after_any_mix_of_endings_every_block_is_free_and_no_request_is_left(seed: int) -> None:
    """BLK-10: end of text, stop string, length, n = 3, abort while waiting, in a prefill chunk, in decode, disconnect; then idle, five times."""
    async with running_engine(
        choose=choose, num_blocks=61, block_size=4, max_num_seqs=6, token_budget=16, max_waiting=40, max_model_len=200
    ) as it:
        mix = Mix(it, seed)
        for _ in range(5):
            await asyncio.gather(*(mix.one() for _ in range(30)))
            await collect(it.engine, make_request((10,), max_tokens=1))  # what is in flight has been applied
            it.core.check()
            stats = it.engine.stats()
            assert (stats.running, stats.waiting, stats.pool.used) == (0, 0, 0)
            assert stats.pool.free + stats.pool.cached == stats.pool.total
            assert it.core.is_idle
            assert not it.engine._streams
        assert stats.preemptions > 0
        assert stats.cached_prompt_tokens > 0
    cancelled = {"cancelled in decode", "cancelled before its first token"}
    assert {"stop", "stop e", "length", "left", *cancelled} <= set(mix.ends), mix.ends


async def test_a_full_queue_refuses_and_leaves_nothing() -> None:
    """BLK-10: a refusal is an ending, too."""
    async with running_engine(max_num_seqs=1, max_waiting=3) as it:
        it.runner.gate.close()
        tasks = [asyncio.create_task(collect(it.engine, make_request(f"number {i}"))) for i in range(9)]
        await it.runner.gate.wait_until_held()
        it.runner.gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, QueueFull) for result in results) == len(
            [result for result in results if isinstance(result, BaseException)]
        )
        assert any(isinstance(result, QueueFull) for result in results)
        assert not it.engine._streams
