"""Incremental text equals whole text, however the ids arrive."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text import Tokenizer

CHARACTERS_OF_MANY_TOKENS = [
    "🇨🇳🇫🇷",
    "👩‍👩‍👧‍👦 family",
    "안녕하세요",
    "สวัสดีครับ",
    "नमस्ते दुनिया",
    "e\u0301 Z\u0337\u0322a\u0335",
    "你好，世界 𝔘𝔫",
]


def text_of(tokenizer: Tokenizer, prompt: list[int], pushes: list[list[int]]) -> list[str]:
    stream = tokenizer.new_stream(prompt)
    return [*(stream.push(ids).text for ids in pushes), stream.finish()]


@pytest.mark.parametrize("text", CHARACTERS_OF_MANY_TOKENS)
@pytest.mark.parametrize("kind", ["smollm", "tiny", "llama2"])
def test_characters_split_over_tokens_arrive_whole(text: str, kind: str, request: pytest.FixtureRequest) -> None:
    """TOK-01"""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text) / 2
    deltas = text_of(tokenizer, [], [[index] for index in ids])
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_text_that_ends_inside_a_character_ends_in_one_replacement_character(smollm: Tokenizer) -> None:
    """TOK-01"""
    ids = [*smollm.encode("ok "), *smollm.encode("🙂")]
    *deltas, last = text_of(smollm, [], [[index] for index in ids[:-1]])
    assert "".join(deltas) == "ok "
    assert last == "\ufffd"
    assert "".join(deltas) + last == smollm.decode(ids[:-1])


@pytest.mark.parametrize("kind", ["smollm", "llama2"])
@pytest.mark.parametrize("output", ["Alice was", " Alice was", "  two", "'s", "."])
def test_output_text_is_prompt_and_output_minus_prompt(kind: str, output: str, request: pytest.FixtureRequest) -> None:
    """TOK-02"""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    prompt = tokenizer.encode("once or twice")
    # What follows a special token gets SentencePiece's own leading space, as the ids that a model generates have it.
    ids = tokenizer.encode(output, add_special_tokens=False)
    expected = tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))
    assert "".join(text_of(tokenizer, prompt, [[index] for index in ids])) == expected
    assert "".join(text_of(tokenizer, prompt, [ids])) == expected


def test_sentencepiece_keeps_the_space_between_words_and_drops_only_the_first_of_all(llama2: Tokenizer) -> None:
    """TOK-02"""
    word = llama2.encode("Alice", add_special_tokens=False)
    assert "".join(text_of(llama2, llama2.encode("once"), [word, word])) == " Alice Alice"
    assert "".join(text_of(llama2, [1], [word, word])) == "Alice Alice"
    assert "".join(text_of(llama2, [], [word])) == "Alice"


def test_a_character_begun_in_the_prompt_is_completed_by_the_output(smollm: Tokenizer) -> None:
    """TOK-02: raw prompt ids may end inside a character."""
    ids = smollm.encode("a🙂b")
    split = ids.index(smollm.encode("🙂")[1])
    assert "".join(text_of(smollm, ids[:split], [[index] for index in ids[split:]])) == "🙂b"


def test_special_tokens_are_hidden_or_shown_as_asked(smollm: Tokenizer) -> None:
    ids = smollm.encode("hi<|im_end|>there")
    assert smollm.new_stream().push(ids).text == "hithere"
    assert smollm.new_stream(skip_special_tokens=False).push(ids).text == "hi<|im_end|>there"


@pytest.mark.parametrize("kind", ["smollm", "tiny", "llama2"])
def test_random_ids_never_raise_and_give_the_whole_text(kind: str, request: pytest.FixtureRequest) -> None:
    """TOK-08: byte tokens, added tokens and ids outside the vocabulary included."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    draw = random.Random(8)
    highest = tokenizer.vocab_size + 40
    for _ in range(34_000):
        prompt = [draw.randrange(highest) for _ in range(draw.randrange(3))]
        ids = [draw.randrange(highest) for _ in range(draw.randrange(10))]
        stream = tokenizer.new_stream(prompt)
        text = "".join([stream.push((index,)).text for index in ids]) + stream.finish()
        if not prompt:
            assert text == tokenizer.decode(ids)
        else:
            assert tokenizer.decode(prompt + ids).endswith(text)
    stream = tokenizer.new_stream([-1, 2**40])
    assert stream.push([-1, 2**40, -(2**70)]).text == ""


@pytest.fixture(scope="module")
def byte_ids(smollm: Tokenizer) -> dict[int, int]:
    """SmolLM2's ids of the single bytes; its vocabulary leaves some bytes out that UTF-8 never uses."""
    texts = (
        (smollm.token_bytes(index), index) for index in range(smollm.vocab_size) if index not in smollm.special_ids
    )
    single = {text[0]: index for text, index in texts if len(text) == 1}
    assert len(single) > 200
    return single


@settings(max_examples=150, deadline=None)
@given(bytes_=st.binary(max_size=24), cuts=st.lists(st.integers(1, 5), max_size=24), stops=st.booleans())
def test_any_cutting_gives_the_same_text(
    smollm: Tokenizer, byte_ids: dict[int, int], bytes_: bytes, cuts: list[int], stops: bool
) -> None:
    """TOK-01, TOK-08: tokens of one byte each, valid UTF-8 or not."""
    ids = [byte_ids[byte] for byte in bytes_ if byte in byte_ids]
    pushes, rest = [], ids
    for cut in cuts:
        pushes.append(rest[:cut])
        rest = rest[cut:]
    stream = smollm.new_stream(stop=("\x00\x00\x00\x00",) if stops else ())
    deltas = [stream.push(push).text for push in [*pushes, rest]]
    assert (
        "".join(deltas) + stream.finish() == smollm.decode(ids).partition("\x00\x00\x00\x00" if stops else "\ue000")[0]
    )
