"""Chats drawn from the trace keep what the trace says of them, at the size of a small machine."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import serve
from conversation import BLOCK_TOKENS, OUTPUT_DIVISOR, PROMPT_DIVISOR, Passages, chat_turns, draw_chats, scale

from service.simulate import TraceRequest, read_trace

MAX_CONTEXT = 2048


@pytest.fixture(scope="module")
def trace(data: Path) -> list[TraceRequest]:
    return read_trace(data / "traces/mooncake_conversation.jsonl.gz")


@pytest.fixture(scope="module")
def passages() -> Passages:
    tokenizer = serve.read_tokenizer(serve.DEFAULT_TOKENIZER)
    assert tokenizer is not None
    return Passages(serve.DEFAULT_TEXT.read_text(), tokenizer, seed=1)


def request(num_prompt: int, *ids: int, output: int = 400, arrival_s: float = 0.0) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, num_prompt=num_prompt, num_output=output, hash_ids=ids)


def test_lengths_are_divided_and_whole_blocks_stay_whole() -> None:
    scaled = scale(request(3 * 512 + 160, 0, 1, 2, 3))
    assert scaled.num_prompt == 3 * BLOCK_TOKENS + 160 // PROMPT_DIVISOR
    assert scaled.num_output == 400 // OUTPUT_DIVISOR
    assert scale(request(5, 0, output=1)).num_output == 2


def test_the_drawn_requests_fit_and_come_in_the_time_given(trace: list[TraceRequest]) -> None:
    drawn = draw_chats(trace, 90, duration_s=30.0, max_context=MAX_CONTEXT, seed=7)
    assert len(drawn) == 90
    assert all(turn.num_prompt + turn.num_output <= MAX_CONTEXT for turn in drawn)
    assert 0 <= drawn[0].arrival_s <= drawn[-1].arrival_s <= 30.0
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(drawn))


def test_chats_are_drawn_whole(trace: list[TraceRequest]) -> None:
    everything, drawn = defaultdict(int), defaultdict(int)
    for turn in trace:
        everything[turn.hash_ids[1:2]] += 1
    for turn in draw_chats(trace, 400, duration_s=30.0, max_context=MAX_CONTEXT, seed=7):
        drawn[turn.hash_ids[1:2]] += 1
    drawn.pop((), None)  # nothing but what all prompts share
    cut_short = [chat for chat, count in drawn.items() if count != everything[chat]]
    assert len(cut_short) <= 1  # the last one drawn
    assert max(drawn.values()) > 2


def test_a_seed_gives_the_same_chats_and_another_one_others(trace: list[TraceRequest]) -> None:
    one, again, other = (
        draw_chats(trace, 30, duration_s=30.0, max_context=MAX_CONTEXT, seed=seed) for seed in ("1/0", "1/0", "1/1")
    )
    assert one == again
    assert one != other


def test_a_chat_with_one_request_too_long_is_left_out_as_a_whole() -> None:
    long = 16 * MAX_CONTEXT
    trace = [
        request(512, 0, arrival_s=0.0),
        request(1024, 0, 1, arrival_s=1.0),
        request(long, 0, 1, *range(10, long // 512 + 8), arrival_s=2.0),
        request(1024, 0, 2, arrival_s=4.0),
    ]
    drawn = draw_chats(trace, 10, duration_s=1.0, max_context=MAX_CONTEXT, seed=1)
    assert sorted(turn.hash_ids for turn in drawn) == [(0,), (0, 2)]
    assert [turn.arrival_s for turn in drawn] == [0.0, 1.0]


def test_prompts_begin_alike_exactly_as_far_as_their_ids(passages: Passages) -> None:
    tokenizer = serve.read_tokenizer(serve.DEFAULT_TOKENIZER)
    assert tokenizer is not None
    one = scale(request(3 * 512, 0, 1, 2))
    longer = scale(request(3 * 512 + 320, 0, 1, 2, 9))
    forked = scale(request(3 * 512, 0, 1, 5))
    ids = [tokenizer.encode(passages.prompt(turn).text).ids for turn in (one, longer, forked)]
    assert [len(found) for found in ids] == [96, 116, 96]
    assert ids[0] == ids[1][:96]
    assert ids[0][:64] == ids[2][:64]
    assert ids[0][64:] != ids[2][64:]


@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 500])
def test_a_prompt_has_the_number_of_tokens_that_the_trace_gives(tokens: int, passages: Passages) -> None:
    prompt = passages.prompt(scale(request(16 * tokens, *range(100, 100 + -(-tokens // 32)))))
    assert prompt.num_tokens == tokens


def test_the_rate_is_the_mean_over_the_time(trace: list[TraceRequest], passages: Passages) -> None:
    turns = chat_turns(trace, passages, rate=2.0, duration_s=10.0, max_context=MAX_CONTEXT, seed=3)
    assert len(turns) == 20
