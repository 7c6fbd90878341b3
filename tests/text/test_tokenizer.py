"""Encoding and decoding against golden ids and against the library's own decoder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from service.text import Tokenizer
from tests.text.builders import gguf_of_byte_level, odd_lines


def test_every_golden_tokenizer_case_gives_the_golden_ids(smollm: Tokenizer, golden: dict[str, Any]) -> None:
    cases = golden["tokenizer"]["cases"]
    assert len(cases) == 50
    assert [smollm.encode(case["text"]) for case in cases] == [case["ids"] for case in cases]


def test_every_golden_prompt_gives_the_golden_ids(smollm: Tokenizer, golden: dict[str, Any]) -> None:
    for prompt in golden["prompts"]:
        if prompt["kind"] != "ids":
            assert smollm.encode(prompt.get("text", prompt.get("rendered"))) == prompt["ids"], prompt["name"]


def test_every_golden_continuation_streams_to_the_golden_text(smollm: Tokenizer, golden: dict[str, Any]) -> None:
    """TOK-01"""
    for prompt in golden["prompts"]:
        stream = smollm.new_stream(prompt["ids"], skip_special_tokens=False)
        text = "".join(stream.push([step["id"]]).text for step in prompt["steps"]) + stream.finish()
        assert text == prompt["continuation"], prompt["name"]


def test_decoding_equals_the_library_on_random_ids(smollm: Tokenizer, data: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(data / "golden" / "smollm2-135m" / "tokenizer.json"))
    draw = random.Random(3)
    for _ in range(2000):
        ids = [draw.randrange(smollm.vocab_size) for _ in range(draw.randrange(30))]
        for skips in (True, False):
            assert smollm.decode(ids, skip_special_tokens=skips) == reference.decode(ids, skip_special_tokens=skips)


def test_decoding_equals_the_library_on_sentencepiece_text(llama2: Tokenizer) -> None:
    """TOK-02"""
    for line in odd_lines(300, random.Random(4).randrange):
        ids = llama2.encode(line)
        assert llama2.decode(ids) == llama2.encoder.decode(ids)


def test_text_survives_the_round_trip(smollm: Tokenizer, llama2: Tokenizer) -> None:
    for line in odd_lines(300, random.Random(5).randrange):
        assert smollm.decode(smollm.encode(line), skip_special_tokens=False) == line
        ids = llama2.encode(line, parse_special=False)
        # The tokenizer itself writes "▁" for a space, so the two cannot be told apart.
        assert llama2.decode(ids) == line.replace("▁", " ")


def test_a_plain_prompt_gets_exactly_one_bos_where_the_model_wants_one(llama2: Tokenizer, smollm: Tokenizer) -> None:
    """TOK-03"""
    assert llama2.bos_id == 1
    assert llama2.encode("Alice").count(1) == 1
    assert llama2.encode("<s>Alice").count(1) == 1
    assert llama2.encode("Alice", add_special_tokens=False).count(1) == 0
    assert not smollm.adds_bos
    assert smollm.encode("Alice").count(1) == 0


@pytest.mark.parametrize("adds", [True, False])
def test_gguf_add_bos_token_decides(data: Path, adds: bool) -> None:
    """TOK-03"""
    path = data / "golden" / "tiny-llama" / "tokenizer.json"
    tokenizer = Tokenizer.from_gguf_metadata(gguf_of_byte_level(path, "gpt-2", add_bos_token=adds))
    assert tokenizer.encode("Alice").count(1) == int(adds)


def test_an_empty_text_is_no_token_or_bos_alone(smollm: Tokenizer, llama2: Tokenizer) -> None:
    """SMP-12"""
    assert smollm.encode("") == []
    assert llama2.encode("") == [1]


def test_special_tokens_in_text_are_parsed_only_on_request(smollm: Tokenizer, llama2: Tokenizer) -> None:
    """TOK-04"""
    for tokenizer in (smollm, llama2):
        for index in tokenizer.special_ids:
            text = f"a {tokenizer.token_text(index)} b"
            assert index in tokenizer.encode(text)
            literal = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            assert not tokenizer.special_ids.intersection(literal)
            assert tokenizer.decode(literal) == text


def test_token_bytes_join_to_the_text_and_show_special_tokens(smollm: Tokenizer) -> None:
    ids = smollm.encode("🙂 naïve<|im_end|>")
    assert b"".join(map(smollm.token_bytes, ids)).decode() == "🙂 naïve<|im_end|>"
    assert smollm.token_text(2) == "<|im_end|>"
    assert smollm.token_text(smollm.encode("🙂")[0]) == "\ufffd"
    assert smollm.token_bytes(10**9) == b""
    assert smollm.token_bytes(-1) == b""


def test_min_tokens_never_exceeds_the_real_count(smollm: Tokenizer, llama2: Tokenizer, data: Path) -> None:
    """API-09"""
    texts = [(data / "text" / name).read_text(encoding="utf-8")[:20_000] for name in ("alice.txt", "lunyu_zh.txt")]
    texts += [" " * 5000, "x" * 5000, "", *odd_lines(100, random.Random(6).randrange)]
    for tokenizer in (smollm, llama2):
        for text in texts:
            bound = tokenizer.min_tokens(len(text.encode()))
            assert bound <= len(tokenizer.encode(text, add_special_tokens=False))


def test_min_tokens_refuses_megabytes_without_encoding_them(smollm: Tokenizer) -> None:
    """API-09"""
    assert smollm.min_tokens(5_000_000) > 8192
    assert smollm.min_tokens(1) == 1
