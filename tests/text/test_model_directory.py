"""What a Hugging Face directory says about text, wherever it says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.errors import ConfigError, InvalidRequest, ModelLoadError
from service.text import ChatTemplate, Tokenizer
from tests.text.builders import CHATML, sentencepiece_encoder, write_directory

MESSAGES = [{"role": "user", "content": "hi"}]


def directory(path: Path, **files: object) -> Path:
    return write_directory(path, sentencepiece_encoder(), **files)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, {2}),
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"generation_config": {"eos_token_id": [5, 9]}}, {5, 9}),
        ({"config": {"text_config": {"eos_token_id": [6]}}}, {6}),
        (
            {
                "tokenizer_config": {"eos_token": {"content": "</s>"}},
                "config": {"eos_token_id": [3, 4]},
                "generation_config": {"eos_token_id": 5},
            },
            {2, 3, 4, 5},
        ),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, set()),
        ({}, set()),
    ],
)
def test_every_source_of_eos_counts(tmp_path: Path, files: dict[str, object], expected: set[int]) -> None:
    """MDL-04"""
    assert Tokenizer.from_directory(directory(tmp_path, **files)).eos_ids == expected


@pytest.mark.parametrize("wrong", ["2", [1, "x"], -3, True, 1.5])
def test_an_eos_that_is_no_id_is_refused_with_file_and_field(tmp_path: Path, wrong: object) -> None:
    """MDL-04"""
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id"):
        Tokenizer.from_directory(directory(tmp_path, generation_config={"eos_token_id": wrong}))


def test_the_tiny_checkpoints_stop_on_both_of_their_ids(data: Path) -> None:
    """MDL-04"""
    for name in ("tiny-llama", "tiny-qwen2", "tiny-gemma3"):
        assert Tokenizer.from_directory(data / "golden" / name).eos_ids == {2, 4}


@pytest.mark.parametrize(
    ("config", "adds"),
    [
        ({"bos_token": "<s>"}, True),  # the post-processor's word
        ({"bos_token": "<s>", "add_bos_token": False}, False),
        ({"bos_token": "<s>", "add_bos_token": True}, True),
        ({}, False),
    ],
)
def test_add_bos_token_decides_and_else_the_post_processor(
    tmp_path: Path, config: dict[str, object], adds: bool
) -> None:
    """TOK-03"""
    tokenizer = Tokenizer.from_directory(directory(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("Alice").count(1) == int(adds)


def test_the_template_is_found_where_it_is_and_a_separate_file_goes_first(tmp_path: Path) -> None:
    """TOK-06: --chat-template, then chat_template.jinja, chat_template.json, tokenizer_config.json."""
    model = directory(tmp_path / "m", tokenizer_config={"chat_template": "config"})

    def rendered(override: Path | None = None) -> str:
        return ChatTemplate.load(Tokenizer.from_directory(model), override=override).render(MESSAGES)

    assert rendered() == "config"
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "json"}), encoding="utf-8")
    assert rendered() == "json"
    (model / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert rendered() == "jinja"
    override = tmp_path / "mine.jinja"
    override.write_text("mine", encoding="utf-8")
    assert rendered(override) == "mine"


def test_named_templates_are_chosen_by_whether_there_are_tools(tmp_path: Path) -> None:
    """TOK-06"""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    model = directory(tmp_path, tokenizer_config={"chat_template": named})
    template = ChatTemplate.load(Tokenizer.from_directory(model))
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"type": "function"}]) == "with tools"


def test_a_model_without_a_template_refuses_chat_and_says_what_to_do(tmp_path: Path) -> None:
    """TOK-06"""
    tokenizer = Tokenizer.from_directory(directory(tmp_path))
    template = ChatTemplate.load(tokenizer)
    assert not template.is_available
    with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template.*/v1/completions"):
        template.encode(MESSAGES)
    assert tokenizer.encode("plain text still works")


def test_a_missing_or_broken_template_file_stops_the_start(tmp_path: Path) -> None:
    """TOK-05, TOK-06"""
    tokenizer = Tokenizer.from_directory(directory(tmp_path / "m"))
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        ChatTemplate.load(tokenizer, override=tmp_path / "nowhere.jinja")
    broken = tmp_path / "broken.jinja"
    broken.write_text("one\n{% for %}", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate.load(tokenizer, override=broken)


@pytest.mark.parametrize("template", [7, ["x"], [{"name": "default"}]])
def test_a_template_of_the_wrong_type_is_refused(tmp_path: Path, template: object) -> None:
    with pytest.raises(ModelLoadError, match="chat_template"):
        Tokenizer.from_directory(directory(tmp_path, tokenizer_config={"chat_template": template}))


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    model = directory(tmp_path / "m")
    (model / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json is not a JSON object"):
        Tokenizer.from_directory(model)


@pytest.mark.parametrize("key", ["x", "-1", "1.5", ""])
def test_an_added_token_without_an_id_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelLoadError, match="added_tokens_decoder has the key"):
        Tokenizer.from_directory(
            directory(tmp_path, tokenizer_config={"added_tokens_decoder": {key: {"content": "<a>"}}})
        )


def test_an_absurd_token_id_is_refused_before_a_table_is_made(tmp_path: Path) -> None:
    """MDL-08: nothing is allocated by unchecked numbers."""
    model = directory(tmp_path)
    described = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["vocab"]["far away"] = 2**31
    (model / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json has the token id 2147483648"):
        Tokenizer.from_directory(model)


def test_tokens_that_only_the_config_lists_are_added_under_their_ids(tmp_path: Path) -> None:
    encoder = sentencepiece_encoder()
    size = encoder.get_vocab_size()
    listed = {str(size): {"content": "<|user|>", "special": True}}
    model = write_directory(tmp_path, encoder, tokenizer_config={"added_tokens_decoder": listed})
    tokenizer = Tokenizer.from_directory(model)
    assert tokenizer.encode("<|user|>") == [size]
    assert size in tokenizer.special_ids
    shifted = {str(size + 3): {"content": "<|user|>", "special": True}}
    model = write_directory(tmp_path, encoder, tokenizer_config={"added_tokens_decoder": shifted})
    with pytest.raises(ModelLoadError, match="added_tokens_decoder"):
        Tokenizer.from_directory(model)


def test_a_decoder_whose_tokens_depend_on_neighbours_is_refused_by_name(tmp_path: Path) -> None:
    model = directory(tmp_path)
    described = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    for decoder, message in (
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        (None, "no decoder"),
    ):
        described["decoder"] = decoder
        (model / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
        with pytest.raises(ModelLoadError, match=message):
            Tokenizer.from_directory(model)


def test_a_metaspace_decoder_reads_like_the_library(tmp_path: Path) -> None:
    """TOK-02: the other spelling of Llama's tokenizer, as Mistral's files have it."""
    model = directory(tmp_path)
    described = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    described |= {"decoder": space, "pre_tokenizer": space, "normalizer": None}
    (model / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = Tokenizer.from_directory(model)
    for text in ("Alice was", " Alice was", "reading"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.encoder.decode(ids)


def test_the_chat_template_of_a_directory_renders(data: Path) -> None:
    tokenizer = Tokenizer.from_directory(data / "golden" / "tiny-llama")
    assert tokenizer.chat_templates == {"default": CHATML}
    assert ChatTemplate.load(tokenizer).render(MESSAGES) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
