"""The engine's client side: streams, text, refusals."""

from __future__ import annotations

from tests.factories import collect, make_request, running_engine
from tests.fakes import continuation


async def test_a_request_streams_started_then_deltas_then_finished() -> None:
    async with running_engine() as it:
        answer = await collect(it.engine, make_request("The cat sat", request_id="mine", max_tokens=8))
    prompt = it.tokenizer.encode("The cat sat")
    expected = continuation(prompt, 8)
    assert answer.started.request_id == "mine"
    assert list(answer.started.prompt_token_ids) == prompt
    assert answer.token_ids() == expected
    assert answer.text() == it.tokenizer.decode(expected)
    assert answer.last().finish_reason == "length"
    assert answer.finished.usage.prompt_tokens == len(prompt)
    assert answer.finished.usage.completion_tokens == 8
