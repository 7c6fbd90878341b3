"""Guesses a sequence's next tokens from its own past: where its last n tokens stood before, what followed them may follow again.

Model-free prompt lookup (Saxena, "Prompt Lookup Decoding", 2023). Not a judge of its guesses; whether they are worth computing is
decided in `speculation`. Invariant: a look-up and a new token cost O(1) whatever the length of the context, and memory is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tokens taken in per call, at about 0.3 µs each: a long prompt is read over several steps, so that none of them waits for it.
READ_LIMIT = 4096
# N-grams in one generation, at about 170 bytes each. When it is full the one before it is forgotten, so the far past is.
GENERATION_SIZE = 2**15

Gram = tuple[int, ...]


class NgramIndex:
    """The most recent place of every n-gram of one sequence, for n from `min_ngram` to `max_ngram`.

    `tokens` is passed in by its owner at each call and must only have been appended to since the last one.
    """

    __slots__ = ("_earlier", "_lengths", "_num_read", "_recent")

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._lengths = tuple(range(max_ngram, min_ngram - 1, -1))
        self._num_read = 0  # n-grams that are followed by a token before this position are known
        self._recent: dict[Gram, int] = {}  # n-gram → position of the token that followed it
        self._earlier: dict[Gram, int] = {}

    def read(self, tokens: list[int]) -> None:
        """Take in what has been appended, as far as one call may."""
        begin, end = self._num_read, min(len(tokens), self._num_read + READ_LIMIT)
        for length in self._lengths:
            first = max(begin, length)
            if first < end:
                # The n-gram before position p is tokens[p - length : p]; column i holds token i of each.
                columns = [tokens[first - length + i : end - length + i] for i in range(length)]
                self._recent.update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self._num_read = end
        if len(self._recent) >= GENERATION_SIZE:
            self._earlier, self._recent = self._recent, {}

    def find(self, tokens: list[int], longest: int) -> tuple[int, int] | None:
        """Return the position that followed the most recent earlier place of the longest known ending, and how many tokens match there.

        The match may be longer than the n-gram by which it was found, up to `longest` tokens.
        """
        for length in self._lengths:
            if length >= len(tokens):
                continue
            gram = tuple(tokens[-length:])
            position = self._recent.get(gram)
            if position is None and self._earlier:
                position = self._earlier.get(gram)
            if position is not None:
                most = min(longest, position)
                while length < most and tokens[position - length - 1] == tokens[-length - 1]:
                    length += 1
                return position, length
        return None


def continued(tokens: Sequence[int], position: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from `position` on; where the sequence ends before, it goes on as it repeats itself from there."""
    found = tuple(tokens[position : position + count])
    if len(found) < count:
        found *= -(-count // len(found))
    return found[:count]
