"""The index of n-grams against a plain search of the whole past."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine import ngram
from service.engine.ngram import NgramIndex, continued


def searched(tokens: list[int], min_ngram: int, max_ngram: int, longest: int) -> tuple[int, int] | None:
    """What `find` promises, by looking everywhere."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for position in range(len(tokens) - 1, length - 1, -1):
            if tokens[position - length : position] == tokens[-length:]:
                matching = [n for n in range(1, position + 1) if tokens[position - n : position] == tokens[-n:]]
                return position, max(length, min(longest, max(matching)))
    return None


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 2),
    longest=st.integers(1, 9),
)
def test_the_most_recent_place_of_the_longest_ending_is_found(
    pieces: list[list[int]], min_ngram: int, more: int, longest: int
) -> None:
    index, tokens = NgramIndex(min_ngram, min_ngram + more), []
    for piece in pieces:
        tokens += piece
        index.read(tokens)
        assert index.find(tokens, longest) == searched(tokens, min_ngram, min_ngram + more, longest)


def test_a_long_past_is_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "READ_LIMIT", 10)
    tokens = [*range(100, 130), 100, 101]
    index = NgramIndex(2, 2)
    index.read(tokens[:-1])
    assert index.find(tokens, 2) == (2, 2)
    index.read(tokens)
    assert index.find([*tokens, 115, 116], 2) == (17, 2)
    assert index.find([*tokens, 127, 128], 2) is None
    index.read(tokens)
    index.read(tokens)
    assert index.find([*tokens, 127, 128], 2) == (29, 2)


def test_memory_is_bounded_and_the_recent_past_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "GENERATION_SIZE", 50)
    index, tokens = NgramIndex(1, 3), []
    for token in range(500):
        tokens.append(token)
        index.read(tokens)
        assert len(index._recent) + len(index._earlier) <= 2 * (50 + 3)
    assert index.find([*tokens, 490], 2) == (491, 1)
    assert index.find([*tokens, 3], 2) is None


@pytest.mark.parametrize(
    ("position", "count", "expected"),
    [(1, 2, (11, 12)), (2, 2, (12, 13)), (3, 4, (13, 13, 13, 13)), (2, 5, (12, 13, 12, 13, 12)), (0, 0, ())],
)
def test_a_guess_goes_on_past_the_end_as_the_sequence_repeats_itself(
    position: int, count: int, expected: tuple[int, ...]
) -> None:
    assert continued([10, 11, 12, 13], position, count) == expected
