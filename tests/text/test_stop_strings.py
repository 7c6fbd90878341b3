"""Stop strings end the text at the leftmost match, wherever token borders fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidRequest
from service.text import Tokenizer
from service.text.stop_strings import StopScanner, StopStrings

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=12)


def leftmost(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The definition: the smallest start; of those that start together, the shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def scan(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    scanner = StopScanner(StopStrings(stops))
    text = "".join(scanner.feed(piece) for piece in pieces) + scanner.finish()
    return text, scanner.matched


@given(pieces=PIECES, stops=STOPS)
def test_the_text_ends_exactly_before_the_leftmost_match(pieces: list[str], stops: tuple[str, ...]) -> None:
    """SMP-07"""
    whole = "".join(pieces)
    match = leftmost(whole, stops)
    assert scan(pieces, stops) == ((whole, None) if match is None else (whole[: match[0]], match[1]))


@given(pieces=PIECES, stops=STOPS)
def test_no_more_is_held_back_than_the_longest_stop_less_one(pieces: list[str], stops: tuple[str, ...]) -> None:
    """SMP-07"""
    scanner = StopScanner(StopStrings(stops))
    fed = given_out = 0
    for piece in pieces:
        given_out += len(scanner.feed(piece))
        fed += len(piece)
        if scanner.matched is not None:
            break
        assert fed - given_out <= max(map(len, stops)) - 1


@given(text=st.text(alphabet="abc", max_size=20), stops=STOPS)
def test_no_delta_is_ever_taken_back(text: str, stops: tuple[str, ...]) -> None:
    """SMP-07: each character is given out once, in order, and never as part of a match."""
    scanner = StopScanner(StopStrings(stops))
    seen = ""
    for character in text:
        seen += scanner.feed(character)
        assert text.startswith(seen)
        assert not any(stop in seen for stop in stops)


@pytest.mark.parametrize(
    ("stops", "expected", "stopped_by"),
    [
        (("three four",), "one two ", "three four"),
        (("e fo",), "one two thre", "e fo"),  # ends in the middle of a token
        (("x",), "one two three four fi", "x"),
        (("🙂",), "one two three four fix ", "🙂"),  # a character of several tokens
        (("three f", "three four", "th", "four"), "one two ", "th"),  # one is a prefix of others
        (("never",), "one two three four fix 🙂 end", None),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_are_found_across_tokens(
    smollm: Tokenizer, stops: tuple[str, ...], expected: str, stopped_by: str | None, size: int
) -> None:
    """SMP-07"""
    ids = smollm.encode("one two three four fix 🙂 end")
    stream = smollm.new_stream(stop=stops)
    text = "".join(stream.push(ids[start : start + size]).text for start in range(0, len(ids), size))
    assert text + stream.finish() == expected
    assert stream.stopped_by == stopped_by


def test_the_stop_string_is_included_on_request(smollm: Tokenizer) -> None:
    """SMP-07"""
    stream = smollm.new_stream(stop=("two",), include_stop=True)
    delta = stream.push(smollm.encode("one two three"))
    assert (delta.text, delta.stopped_by) == ("one two", "two")


def test_a_push_tells_how_many_ids_it_took_until_the_stop(smollm: Tokenizer) -> None:
    ids = smollm.encode("one two three")
    assert smollm.new_stream(stop=("two",)).push(ids).num_ids == 2
    assert smollm.new_stream().push(ids).num_ids == 3


def test_after_a_stop_nothing_more_comes(smollm: Tokenizer) -> None:
    stream = smollm.new_stream(stop=("one",))
    stream.push(smollm.encode("one"))
    after = stream.push(smollm.encode(" two"))
    assert (after.text, after.stopped_by, after.num_ids, stream.finish()) == ("", "one", 0, "")


def test_a_match_inside_an_unfinished_longer_one_counts_when_the_text_ends(smollm: Tokenizer) -> None:
    """SMP-07: "two three" might still have become the longer stop, which starts further left."""
    stream = smollm.new_stream(stop=("one two three four", "two"))
    pushed = stream.push(smollm.encode("one two three"))
    assert (pushed.text, pushed.stopped_by) == ("", None)
    assert stream.finish() == "one "
    assert stream.stopped_by == "two"


def test_an_empty_stop_string_is_refused_with_its_place(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as refused:
        smollm.new_stream(stop=("a", ""))
    assert refused.value.param == "stop[1]"
