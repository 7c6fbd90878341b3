"""The prompts of a benchmark run, cut from a book by a seed.

Not random tokens: real English, so that tokenizers, samplers and speculation meet what they meet in use.
Invariant: no two prompts that one `PromptBook` hands out begin with the same word, so no prefix cache can help unless
the workload shares a prefix on purpose; two books with one seed hand out the same prompts.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

# Tokens a word in the English of the benchmark text with a vocabulary of about 50,000 entries; used only when there
# is no tokenizer to count with.
TOKENS_PER_WORD = 1.37


class PromptError(Exception):
    """The book cannot give such a prompt; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a run's requests: `prompt_tokens` in all, the first `prefix_tokens` of them the same in every one.

    Of a closed loop each place sends `waves`, one after the other.
    """

    name: str
    prompt_tokens: int
    max_tokens: int
    prefix_tokens: int = 0
    waves: int = 2


WORKLOADS = {
    "w1": Workload("w1", prompt_tokens=200, max_tokens=128),
    # With two waves half of the requests would find the prefix, and the median between them and the others would be nobody's.
    "w2": Workload("w2", prompt_tokens=544, max_tokens=32, prefix_tokens=512, waves=4),
    "w3": Workload("w3", prompt_tokens=1900, max_tokens=32),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send. `num_tokens` is what the server must count in `text`, None when nobody here can count."""

    text: str
    num_tokens: int | None
    max_tokens: int


class Encoding(Protocol):
    """What `tokenizers.Encoding` offers of ids and of [begin, end) character spans, one a token."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class Tokenizer(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def encode(self, sequence: str) -> Encoding: ...


class PromptBook:
    """Hands out prompts in an order that the seed decides, each once."""

    def __init__(self, text: str, *, seed: int | str, tokenizer: Tokenizer | None = None) -> None:
        self._words = text.split()
        self._tokenizer = tokenizer
        self._starts = _starts_with_distinct_words(self._words, random.Random(seed))

    def take(self, workload: Workload, count: int) -> list[Prompt]:
        """Return the next `count` prompts; a shared prefix is drawn anew for each call.

        Raises PromptError when the book has no unused first word left, or cannot be cut to the length exactly.
        """
        prefix = ""
        if workload.prefix_tokens:
            prefix = self._passage("", self._next_start(), workload.prefix_tokens)
        prompts = []
        for _ in range(count):
            text = self._passage(prefix, self._next_start(), workload.prompt_tokens)
            known = workload.prompt_tokens if self._tokenizer is not None else None
            prompts.append(Prompt(text, known, workload.max_tokens))
        return prompts

    def _next_start(self) -> int:
        try:
            return next(self._starts)
        except StopIteration:
            raise PromptError("no word is left that no prompt has begun with; use fewer requests a seed") from None

    def _passage(self, prefix: str, start: int, num_tokens: int) -> str:
        """Return `prefix` and then the words from `start` on (round the end of the book), `num_tokens` long."""
        # A word is at least one token, so this many words are always enough.
        words = list(itertools.islice(itertools.cycle(self._words), start, start + num_tokens))
        if self._tokenizer is None:
            wanted = max(1, round(num_tokens / TOKENS_PER_WORD) - len(prefix.split()))
            return " ".join([*prefix.split(), *words[:wanted]])
        text = " ".join([prefix, *words] if prefix else words)
        return cut_to_tokens(self._tokenizer, text, num_tokens)


def cut_to_tokens(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Cut `text` at a space and fill with one-token words so that the tokenizer counts exactly `num_tokens`.

    A cut inside a word would be encoded differently than the whole text, so the last few tokens are filler instead.
    The count includes the special tokens that the tokenizer adds, as servers count them. Raises PromptError when the
    tokenizer merges across spaces, so that no such cut exists.
    """
    filler = " the"
    num_special = len(tokenizer.encode("").ids)
    # Special tokens have an empty span; where they stand does not matter, only how many there are.
    ends = [end for begin, end in tokenizer.encode(text).offsets if end > begin]
    for kept in range(min(num_tokens - num_special, len(ends)), 0, -1):
        end = ends[kept - 1]
        if end == len(text) or text[end] == " ":
            cut = text[:end] + filler * (num_tokens - num_special - kept)
            if len(tokenizer.encode(cut).ids) == num_tokens:
                return cut
    raise PromptError(f"cannot cut the text to exactly {num_tokens} tokens with this tokenizer")


def _starts_with_distinct_words(words: Sequence[str], rng: random.Random) -> Iterator[int]:
    """Return positions in random order, one for each distinct word, at a random occurrence of it.

    Words that differ only in case or punctuation count as the same.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for position, word in enumerate(words):
        key = "".join(filter(str.isalpha, word)).lower()
        if key:
            places[key].append(position)
    starts = [rng.choice(positions) for positions in places.values()]
    rng.shuffle(starts)
    return iter(starts)
