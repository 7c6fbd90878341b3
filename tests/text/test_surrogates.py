"""Lone surrogates become U+FFFD wherever text enters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text import ChatTemplate, Tokenizer, replace_lone_surrogates
from tests.text.builders import CHATML


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\ud83d", "\ufffd"),
        ("a\udc00b", "a\ufffdb"),
        ("\ud83d\ude42", "🙂"),
        ("\ude42\ud83d", "\ufffd\ufffd"),
        ("x\ud83d🙂\ud83d\ude42\ud83d", "x\ufffd🙂🙂\ufffd"),
        ("plain é", "plain é"),
    ],
)
def test_each_lone_surrogate_is_replaced_and_pairs_are_joined(text: str, expected: str) -> None:
    """API-08"""
    assert replace_lone_surrogates(text) == expected


@given(st.text(alphabet=st.characters(categories=["Cs", "L", "So"])))
def test_the_result_can_always_be_encoded_and_has_no_more_characters(text: str) -> None:
    """API-08"""
    replaced = replace_lone_surrogates(text)
    assert replaced.encode("utf-8").decode("utf-8") == replaced
    assert len(replaced) <= len(text)


def test_tokenizer_stop_strings_and_chat_follow_the_same_rule(tiny: Tokenizer) -> None:
    """API-08"""
    assert tiny.encode("a\udc00b") == tiny.encode("a\ufffdb")
    chat = ChatTemplate(CHATML, tiny)
    broken = [{"role": "user", "content": "a\udc00b", "name": "\ud83d"}]
    assert chat.encode(broken) == chat.encode([{"role": "user", "content": "a\ufffdb", "name": "\ufffd"}])
    stream = tiny.new_stream(stop=("\ud83d",))
    assert stream.push(tiny.encode("ab\ufffdc")).text == "ab"
    assert stream.stopped_by == "\ufffd"
