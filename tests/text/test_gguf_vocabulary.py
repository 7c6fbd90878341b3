"""A vocabulary from GGUF metadata gives the ids that the model's tokenizer.json gives, or is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from service.errors import ModelLoadError
from service.text import ChatTemplate, Tokenizer
from tests.text.builders import gguf_of_byte_level, gguf_of_sentencepiece, odd_lines, sentencepiece_encoder

# As the published tokenizer.json of each family writes its split.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")


def hugging_face(path: Path, pre: str) -> tokenizers.Tokenizer:
    """The tokenizer.json at `path` with the normaliser and split of another family."""
    encoder = tokenizers.Tokenizer.from_file(str(path))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in ("llama-bpe", "qwen2"):
        pattern = Regex(LLAMA3 if pre == "llama-bpe" else QWEN2)
        encoder.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
    if pre == "llama-bpe":
        described = json.loads(encoder.to_str())
        described["model"]["ignore_merges"] = True
        encoder = tokenizers.Tokenizer.from_str(json.dumps(described))
    if pre == "qwen2":
        encoder.normalizer = normalizers.NFC()
    return encoder


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_ids_equal_the_tokenizer_json(data: Path, pre: str) -> None:
    """MDL-06"""
    path = data / "golden" / "tiny-llama" / "tokenizer.json"
    reference = hugging_face(path, pre)
    tokenizer = Tokenizer.from_gguf_metadata(gguf_of_byte_level(path, pre, add_bos_token=False))
    for line in odd_lines(10_000, random.Random(1).randrange):
        assert tokenizer.encode(line) == reference.encode(line, add_special_tokens=False).ids, line


def test_smollm_ids_equal_the_tokenizer_json(data: Path, smollm: Tokenizer) -> None:
    """MDL-06"""
    path = data / "golden" / "smollm2-135m" / "tokenizer.json"
    tokenizer = Tokenizer.from_gguf_metadata(gguf_of_byte_level(path, "smollm"))
    for line in odd_lines(10_000, random.Random(2).randrange):
        assert tokenizer.encode(line) == smollm.encode(line), line


@pytest.mark.model
def test_the_real_file_gives_the_golden_ids_and_both_ends(smollm2: Path, smollm: Tokenizer) -> None:
    """MDL-04, MDL-06"""
    from service.model.gguf_header import read_gguf_header

    tokenizer = Tokenizer.from_gguf_metadata(read_gguf_header(smollm2).metadata)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.adds_bos) == ({0, 2}, 1, False)
    assert tokenizer.vocab_size == smollm.vocab_size == 49152
    assert tokenizer.chat_templates == smollm.chat_templates
    for line in odd_lines(3000, random.Random(3).randrange):
        assert tokenizer.encode(line) == smollm.encode(line), line
    assert [tokenizer.token_bytes(index) for index in range(49152)] == [
        smollm.token_bytes(index) for index in range(49152)
    ]


def test_sentencepiece_ids_from_scores_equal_those_from_merges() -> None:
    """MDL-06"""
    encoder = sentencepiece_encoder()
    tokenizer = Tokenizer.from_gguf_metadata(gguf_of_sentencepiece(encoder))
    for line in odd_lines(10_000, random.Random(4).randrange):
        assert tokenizer.encode(line, add_special_tokens=False) == encoder.encode(line, add_special_tokens=False).ids, (
            line
        )
    assert tokenizer.encode("Alice")[0] == 1


def test_sentencepiece_merges_follow_the_scores_not_the_order_of_the_list() -> None:
    """MDL-06"""
    encoder = sentencepiece_encoder()
    metadata = gguf_of_sentencepiece(encoder)
    tokens, scores, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    assert isinstance(types, list)
    # The first three are named by id; the rest goes in alphabetical order.
    order = [0, 1, 2, *sorted(range(3, len(tokens)), key=lambda index: tokens[index])]
    for name, entries in (("tokens", tokens), ("scores", scores), ("token_type", types)):
        metadata[f"tokenizer.ggml.{name}"] = [entries[index] for index in order]
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    for line in odd_lines(2000, random.Random(5).randrange):
        pieces = encoder.encode(line, add_special_tokens=False).tokens
        assert tokenizer.encoder.encode(line, add_special_tokens=False).tokens == pieces, line


def test_sentencepiece_without_a_space_prefix_adds_and_strips_none() -> None:
    """MDL-06: as Gemma's file says."""
    metadata = gguf_of_sentencepiece(sentencepiece_encoder(), add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    for text in ("Alice", " Alice", "  Alice"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("Alice") != tokenizer.encode(" Alice")


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["x", "=", "10000007", ";", " it", "'s", " IT", "'", "S"]),
        ("smollm", ["x", "=", "1", "0", "0", "0", "0", "0", "0", "7", ";", " it", "'s", " IT", "'", "S"]),
        ("llama-bpe", ["x", "=", "100", "000", "07", ";", " it", "'s", " IT", "'S"]),
        ("qwen2", ["x", "=", "1", "0", "0", "0", "0", "0", "0", "7", ";", " it", "'s", " IT", "'S"]),
        ("tekken", ["x", "=", "1", "0", "0", "0", "0", "0", "0", "7", ";", " it", "'s", " IT", "'S"]),
        ("gpt-4o", ["x", "=", "100", "000", "07", ";", " it's", " IT'S"]),
    ],
)
def test_each_family_splits_digits_and_contractions_its_own_way(data: Path, pre: str, expected: list[str]) -> None:
    """MDL-06: the wrong split gives valid ids and no error, so the pieces themselves are compared."""
    path = data / "golden" / "tiny-llama" / "tokenizer.json"
    encoder = Tokenizer.from_gguf_metadata(gguf_of_byte_level(path, pre)).encoder
    assert encoder.pre_tokenizer is not None
    pieces = [piece.replace("Ġ", " ") for piece, _ in encoder.pre_tokenizer.pre_tokenize_str("x=10000007; it's IT'S")]
    assert pieces == expected


@pytest.mark.parametrize(
    ("pre", "is_one_token"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_a_word_without_merges_is_one_token_only_where_the_family_looks_it_up(
    data: Path, pre: str, is_one_token: bool
) -> None:
    """MDL-06"""
    metadata = gguf_of_byte_level(data / "golden" / "tiny-llama" / "tokenizer.json", pre, add_bos_token=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokens.append("Ġxyzzy")
    types.append(1)
    assert (Tokenizer.from_gguf_metadata(metadata).encode(" xyzzy") == [320]) == is_one_token


@pytest.mark.parametrize("pre", [None, "default", "brand-new-bpe"])
def test_an_unknown_pre_tokenizer_is_refused_by_name(data: Path, pre: str | None) -> None:
    """MDL-06"""
    metadata = gguf_of_byte_level(data / "golden" / "tiny-llama" / "tokenizer.json", pre)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre is " + (f"'{pre}'" if pre else "absent")):
        Tokenizer.from_gguf_metadata(metadata)
    assert Tokenizer.from_gguf_metadata(metadata, pre="gpt-2").encode("a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is absent"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens holds entries that are not str"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'"),
        ({"merges": ["never seen"]}, "does not fit its merges"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries"),
        ({"eos_token_id": 4000}, "tokenizer.ggml.eos_token_id is 4000"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes'"),
    ],
)
def test_damaged_metadata_is_refused_with_the_key(data: Path, change: dict[str, object], message: str) -> None:
    path = data / "golden" / "tiny-llama" / "tokenizer.json"
    with pytest.raises(ModelLoadError) as refused:
        Tokenizer.from_gguf_metadata(gguf_of_byte_level(path, "gpt-2", **change))
    assert message in str(refused.value)


def test_every_known_end_of_generation_token_ends_a_text(data: Path) -> None:
    """MDL-04: the file stores one eos, `<|eos|>` = 2; `<|im_end|>` = 4 ends a turn."""
    path = data / "golden" / "tiny-llama" / "tokenizer.json"
    assert Tokenizer.from_gguf_metadata(gguf_of_byte_level(path, "gpt-2")).eos_ids == {2, 4}
    assert Tokenizer.from_gguf_metadata(gguf_of_byte_level(path, "gpt-2", eot_token_id=3)).eos_ids == {2, 3, 4}
    plain = gguf_of_byte_level(path, "gpt-2")
    plain["tokenizer.ggml.token_type"] = [1] * 320
    assert Tokenizer.from_gguf_metadata(plain).eos_ids == {2}


def test_padding_at_the_end_of_the_list_is_not_part_of_the_vocabulary(data: Path) -> None:
    """MDL-07: the model's output may be wider than what the tokenizer knows."""
    metadata = gguf_of_byte_level(data / "golden" / "tiny-llama" / "tokenizer.json", "gpt-2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokens += [f"[PAD{index}]" for index in range(5)]
    types += [5] * 5
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.vocab_size == 320
    assert tokenizer.decode([319, 320, 324]) == tokenizer.decode([319])


def test_the_template_in_the_metadata_is_the_model_s_and_named_ones_stand_beside_it(data: Path) -> None:
    """TOK-06: and a file without one has none."""
    path = data / "golden" / "tiny-llama" / "tokenizer.json"
    metadata = gguf_of_byte_level(path, "gpt-2")
    assert not Tokenizer.from_gguf_metadata(metadata).chat_templates
    metadata["tokenizer.chat_template"] = "plain"
    metadata["tokenizer.chat_template.tool_use"] = "with tools"
    template = ChatTemplate.load(Tokenizer.from_gguf_metadata(metadata))
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "plain"
    assert template.render(messages, tools=[{"type": "function"}]) == "with tools"
