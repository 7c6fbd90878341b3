"""W4: chats of several turns, from the Mooncake conversation trace, made small enough for one small machine.

The trace has arrival times, token counts and ids of equal prompt blocks, no text. What is kept of it: which prompts begin alike and how
far, how turns of one chat follow each other, how lengths are spread. What is scaled: lengths, so that chats fit the context, and time.
Text comes from the benchmark's book: equal ids become equal passages, so a prefix cache finds exactly what the trace has.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from prompts import Prompt, PromptError, Tokenizer, cut_to_tokens

from service.simulate import TraceRequest, num_common_ids
from service.simulate.trace import HASH_TOKENS

PROMPT_DIVISOR = 16  # a block of 512 tokens becomes one of 32; nine chats of ten then fit into 2,048 tokens
OUTPUT_DIVISOR = (
    4  # answers are short in the trace (343 tokens in the mean): divided by 16 too, none would be left to decode
)
MIN_OUTPUT_TOKENS = 2  # one to wait for, one to keep pace
FILLER = " the"  # a token
BLOCK_TOKENS = HASH_TOKENS // PROMPT_DIVISOR


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a chat, due `arrival_s` seconds after the start."""

    arrival_s: float
    prompt: Prompt


def scale(request: TraceRequest) -> TraceRequest:
    """Divide the lengths. Whole blocks stay whole: 512 tokens become 32."""
    return TraceRequest(
        arrival_s=request.arrival_s,
        num_prompt=max(1, request.num_prompt // PROMPT_DIVISOR),
        num_output=max(MIN_OUTPUT_TOKENS, request.num_output // OUTPUT_DIVISOR),
        hash_ids=request.hash_ids,
    )


def draw_chats(
    trace: Sequence[TraceRequest], num_requests: int, *, duration_s: float, max_context: int, seed: int | str
) -> list[TraceRequest]:
    """Draw whole chats until there are `num_requests`, and squeeze the trace's time into `duration_s`; ordered by arrival.

    A chat is what goes on alike after the blocks that all prompts begin with. One with a request over `max_context` tokens is left out
    as a whole, so that no turn lacks the ones before it; only the last chat drawn may lose its end.
    """
    num_common = num_common_ids(trace)
    chats: dict[int, list[TraceRequest]] = defaultdict(list)
    for position, request in enumerate(trace):
        is_alone = len(request.hash_ids) <= num_common
        chats[-1 - position if is_alone else request.hash_ids[num_common]].append(scale(request))
    fitting = [
        chat for chat in chats.values() if all(turn.num_prompt + turn.num_output <= max_context for turn in chat)
    ]
    random.Random(f"{seed}/chats").shuffle(fitting)
    drawn = list(itertools.islice(itertools.chain.from_iterable(fitting), num_requests))
    squeeze = duration_s / trace[-1].arrival_s
    return sorted(
        (
            TraceRequest(
                arrival_s=request.arrival_s * squeeze,
                num_prompt=request.num_prompt,
                num_output=request.num_output,
                hash_ids=request.hash_ids,
            )
            for request in drawn
        ),
        key=lambda request: request.arrival_s,
    )


class Passages:
    """Text for block ids: the same id always gives the same text, of exactly the number of tokens asked for."""

    def __init__(self, text: str, tokenizer: Tokenizer, seed: int | str) -> None:
        self._words = text.split()
        self._tokenizer = tokenizer
        self._num_special = len(tokenizer.encode("").ids)
        self._seed = seed
        self._made: dict[tuple[int, int], str] = {}

    def prompt(self, request: TraceRequest) -> Prompt:
        """Write one prompt: a passage for each id, the last one short if need be.

        Raises PromptError when the tokenizer counts passages differently beside each other than alone.
        """
        lengths = [BLOCK_TOKENS] * (request.num_prompt // BLOCK_TOKENS)
        if rest := request.num_prompt % BLOCK_TOKENS:
            lengths.append(rest)
        # A rest of less than a scaled token may have left an id without text.
        text = "".join(self._passage(id_, length) for id_, length in zip(request.hash_ids, lengths, strict=False))
        num_tokens = request.num_prompt + self._num_special
        if (counted := len(self._tokenizer.encode(text).ids)) != num_tokens:
            raise PromptError(f"passages of {num_tokens} tokens are {counted} beside each other")
        return Prompt(text, num_tokens, request.num_output)

    def _passage(self, id_: int, num_tokens: int) -> str:
        """Return text that begins with a space, so that it is encoded beside other passages as it is alone."""
        key = (id_, num_tokens)
        if key not in self._made:
            start = random.Random(f"{self._seed}/{id_}").randrange(len(self._words))
            words = itertools.islice(itertools.cycle(self._words), start, start + num_tokens)
            text = "".join(f" {word}" for word in words)
            try:
                self._made[key] = cut_to_tokens(self._tokenizer, text, num_tokens + self._num_special)
            except PromptError:  # the first word alone is longer
                self._made[key] = FILLER * num_tokens
        return self._made[key]


def chat_turns(
    trace: Sequence[TraceRequest],
    passages: Passages,
    *,
    rate: float,
    duration_s: float,
    max_context: int,
    seed: int | str,
) -> list[Turn]:
    """Return the turns to send, `rate` a second in the mean over `duration_s`, at the times that the trace gives."""
    drawn = draw_chats(trace, round(rate * duration_s), duration_s=duration_s, max_context=max_context, seed=seed)
    return [Turn(request.arrival_s, passages.prompt(request)) for request in drawn]
