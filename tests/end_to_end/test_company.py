"""With a real model, whoever else is being served changes no answer: seeds, penalties, preemption, a shared prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from service.messages import Delta
from tests.end_to_end.tiny_service import PROMPT, TinyService, tiny_service
from tests.factories import collect, make_request

SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 24, "ignore_eos": True}
PLAIN: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
ONE_WORD = "cat cat cat cat cat cat cat cat"


@pytest.fixture
async def service() -> AsyncIterator[TinyService]:
    async with tiny_service() as running:
        yield running


async def ids(service: TinyService, prompt: str | tuple[int, ...] = PROMPT, **sampling: Any) -> list[int]:
    return (await collect(service.engine, make_request(prompt, **sampling))).token_ids()


async def test_a_seeded_request_is_the_same_alone_and_in_any_company(service: TinyService) -> None:
    """SMP-04: beside unseeded and greedy ones, at another place in the batch, and when others join late."""
    alone = await ids(service, **SEEDED)
    assert await ids(service, **{**SEEDED, "seed": 43}) != alone
    others: list[dict[str, Any]] = [
        {**SEEDED, "seed": None},
        PLAIN,
        {**SEEDED, "seed": None, "temperature": 2.0},
        {**SEEDED, "seed": 7, "n": 3},
    ]
    for place in range(len(others) + 1):
        requests = [ids(service, "Two dogs", **other) for other in others]
        requests.insert(place, ids(service, **SEEDED))
        assert (await asyncio.gather(*requests))[place] == alone
    stream = service.engine.generate(make_request(PROMPT, **SEEDED))
    got: list[int] = []
    late: list[asyncio.Task[list[int]]] = []
    async for events in stream:
        got += [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        if len(late) < 6:
            late.append(asyncio.create_task(ids(service, "A late one", **{**SEEDED, "seed": None})))
    await asyncio.gather(*late)
    assert got == alone


async def test_penalties_act_on_their_own_request_whatever_the_order(service: TinyService) -> None:
    """SMP-05: with and without repetition_penalty, both ways round, and a third with presence_penalty."""
    bias = {"logit_bias": {77: 6.0}}
    kinds = [
        {**PLAIN, **bias},
        {**PLAIN, **bias, "repetition_penalty": 2.0},
        {**PLAIN, **bias, "presence_penalty": -2.0},
    ]
    solo = [await ids(service, **kind) for kind in kinds]
    assert len({tuple(answer) for answer in solo}) == 3
    for order in ([0, 1], [1, 0], [0, 1, 2], [2, 1, 0], [1, 2, 0]):
        together = await asyncio.gather(*(ids(service, **kinds[index]) for index in order))
        assert list(together) == [solo[index] for index in order]


async def test_presence_and_frequency_look_at_generated_tokens_and_repetition_at_the_prompt_too(
    service: TinyService,
) -> None:
    """SMP-06: the first token after a prompt of one word eight times, with its logprobs."""
    prompt = tuple(service.assembly.tokenizer.encode(ONE_WORD))
    word = prompt[-1]
    asked = {**PLAIN, "max_tokens": 1, "logprobs": 5, "logit_bias": {word: 10.0}}

    async def first(**penalty: float) -> tuple[int, Any]:
        answer = await collect(service.engine, make_request(prompt, **{**asked, **penalty}))
        (delta,) = [delta for delta in answer.deltas if delta.token_ids]
        assert delta.logprobs is not None
        return delta.token_ids[0], delta.logprobs[0].top

    token, top = await first()
    assert token == word
    assert await first(presence_penalty=2.0) == (word, top)
    assert await first(frequency_penalty=2.0) == (word, top)
    other, same_top = await first(repetition_penalty=10.0)
    assert other != word
    assert same_top == top  # logprobs are those of the model


async def test_preempted_and_chunked_requests_with_penalties_and_seeds_answer_as_if_alone() -> None:
    """SMP-04, SMP-06, BLK-05, SCH-05: twelve requests with one long prefix in a pool of about two, in chunks of nine tokens."""
    prefix = tuple(5 + (7 * i * i + i) % 300 for i in range(40))
    fields = {**SEEDED, "repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 60}
    async with tiny_service() as wide:
        expected = [await ids(wide, (*prefix, i, i + 9), **fields) for i in range(10, 22)]
    cache, scheduler = {"num_blocks": 1 + 26, "block_size": 8}, {"token_budget": 9, "max_num_seqs": 8}
    async with tiny_service(cache=cache, scheduler=scheduler) as service:
        got = await asyncio.gather(*(ids(service, (*prefix, i, i + 9), **fields) for i in range(10, 22)))
        stats = service.engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_prompt_tokens > 0
    assert list(got) == expected


@pytest.mark.parametrize("checkpoint", ["tiny-llama", "tiny-gemma3"])
async def test_identical_prompts_at_once_and_again_answer_alike(checkpoint: str) -> None:
    """BLK-01, BLK-06, BLK-08: cold and together, then from the cache, at every length around a block's edge."""
    async with tiny_service(checkpoint, cache={"prefix_caching": False}) as plain:
        prompts = [tuple(5 + (11 * i * i + n) % 300 for i in range(n)) for n in (15, 16, 17, 32, 63, 64, 65)]
        expected = [await ids(plain, prompt, **PLAIN) for prompt in prompts]
    async with tiny_service(checkpoint, scheduler={"token_budget": 24}) as service:
        for prompt, answer in zip(prompts, expected, strict=True):
            cold = await asyncio.gather(*(ids(service, prompt, **PLAIN) for _ in range(4)))
            assert cold == [answer] * 4
            again = await collect(service.engine, make_request(prompt, **PLAIN))
            assert again.token_ids() == answer
            assert again.finished.usage.cached_tokens == (len(prompt) - 1) // 16 * 16
            longer = await collect(service.engine, make_request((*prompt, 99), **PLAIN))
            assert longer.finished.usage.cached_tokens == len(prompt) // 16 * 16
