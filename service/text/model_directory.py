"""Read a vocabulary from a Hugging Face model directory.

Files: `tokenizer.json` (required), `tokenizer_config.json`, `generation_config.json`, `config.json`, `chat_template.jinja`,
`chat_template.json` (all optional).

End of generation: the union of `eos_token_id` in generation_config.json and config.json (a number, a list or null each) and of
`eos_token` in tokenizer_config.json. Models name their end of turn in any one of the three.
Chat template: `chat_template.jinja`, else `chat_template.json`, else tokenizer_config.json (text, or a list of named templates).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import AddedToken

from service.errors import ModelLoadError
from service.text.token_bytes import read_decoding
from service.text.vocabulary import Vocabulary

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_MAX_IDS = 2**24  # far above any vocabulary; a table of all ids is made


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that the library does not tell."""

    decoder: dict[str, object] | None = None
    normalizer: dict[str, object] | None = None
    model: dict[str, object] = msgspec.field(default_factory=dict)


def read_directory(directory: Path) -> Vocabulary:
    """Read the vocabulary of the model in `directory`; raises ModelLoadError naming the file at fault."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{path} does not exist; a model directory needs a tokenizer.json (tokenizer.model is not read)"
        )
    try:
        data = path.read_bytes()
        encoder = tokenizers.Tokenizer.from_buffer(data)
        described = msgspec.json.decode(data, type=_TokenizerFile)
    except Exception as cause:  # the library raises a bare Exception
        raise ModelLoadError(f"{path} is not a tokenizer: {cause}") from cause
    config = _read_object(directory / "tokenizer_config.json")
    _add_missing_tokens(encoder, config.get("added_tokens_decoder"))
    # Truncation and padding are training leftovers: a prompt is never cut or filled behind the caller's back.
    encoder.no_truncation()
    encoder.no_padding()

    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    model_config = _read_object(directory / "config.json")
    generation = _read_object(directory / "generation_config.json")
    num_ids = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if num_ids > _MAX_IDS:
        raise ModelLoadError(f"{path} has the token id {num_ids - 1}; ids go up to {_MAX_IDS - 1}")
    bos = encoder.token_to_id(named["bos_token"]) if "bos_token" in named else None
    if bos is None:
        bos = next(iter(sorted(_eos_ids(model_config.get("bos_token_id"), "config.json: bos_token_id"))), None)
    eos = _eos_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id")
    eos |= _eos_ids(model_config.get("eos_token_id"), "config.json: eos_token_id")
    nested = model_config.get("text_config")
    if isinstance(nested, Mapping):
        eos |= _eos_ids(nested.get("eos_token_id"), "config.json: text_config.eos_token_id")
    if "eos_token" in named and (from_text := encoder.token_to_id(named["eos_token"])) is not None:
        eos |= {from_text}
    return Vocabulary(
        encoder=encoder,
        decoding=read_decoding(described.decoder, source=str(path)),
        num_ids=num_ids,
        bos_id=bos,
        eos_ids=eos,
        adds_bos=bos is not None and _adds_bos(encoder, config.get("add_bos_token"), bos),
        named_tokens=named,
        chat_templates=_chat_templates(directory, config),
        fuses_unknown=bool(described.model.get("fuse_unk")) and not described.model.get("byte_fallback"),
        shrinks_text=not _keeps_length(described.normalizer),
    )


def _keeps_length(normalizer: Mapping[str, object] | None) -> bool:
    """Tell whether a normaliser only writes spaces as `▁`, as Llama's does; any other may shorten the text."""
    if normalizer is None:
        return True
    steps = normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [normalizer]
    return isinstance(steps, list) and all(
        step.get("type") == "Prepend"
        or (step.get("type") == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": " "}, "▁"))
        for step in steps
    )


def _adds_bos(encoder: tokenizers.Tokenizer, configured: object, bos: int) -> bool:
    """Tell whether a plain prompt starts with bos: as `add_bos_token` says, else as the post-processor does."""
    if isinstance(configured, bool):
        return configured
    return encoder.encode("", add_special_tokens=True).ids[:1] == [bos]


def _add_missing_tokens(encoder: tokenizers.Tokenizer, listed: object) -> None:
    """Add the tokens that only tokenizer_config.json lists, in id order, and check that they got the ids listed."""
    if not isinstance(listed, Mapping):
        return
    known = encoder.get_added_tokens_decoder()
    wrong = [key for key in listed if not (isinstance(key, str) and key.isascii() and key.isdigit())]
    if wrong:
        raise ModelLoadError(
            f"tokenizer_config.json: added_tokens_decoder has the key {wrong[0]!r}; expected a token id"
        )
    for key in sorted(listed, key=int):
        index, entry = int(key), listed[key]
        text = _token_text(entry)
        if index in known or text is None:
            continue
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        encoder.add_tokens([AddedToken(text, **flags)])
        if encoder.token_to_id(text) != index:
            raise ModelLoadError(
                f"tokenizer_config.json: added_tokens_decoder gives {text!r} the id {index}, tokenizer.json leads to "
                f"{encoder.token_to_id(text)}"
            )


def _eos_ids(value: object, where: str) -> frozenset[int]:
    entries = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [entry for entry in entries if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0]
    if wrong:
        raise ModelLoadError(f"{where} holds {wrong[0]!r}; expected a token id, a list of them, or null")
    return frozenset(entries)


def _chat_templates(directory: Path, config: Mapping[str, object]) -> dict[str, str]:
    separate = directory / "chat_template.jinja"
    if separate.is_file():
        try:
            return {"default": separate.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as cause:
            raise ModelLoadError(f"{separate} cannot be read: {cause}") from cause
    listed = _read_object(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if listed is None:
        return {}
    if isinstance(listed, str):
        return {"default": listed}
    try:
        named = msgspec.convert(listed, list[_NamedTemplate])
    except msgspec.ValidationError as cause:
        raise ModelLoadError(
            f"{directory}: chat_template is neither text nor a list of named templates: {cause}"
        ) from cause
    return {entry.name: entry.template for entry in named}


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def _token_text(entry: object) -> str | None:
    """Read a token written as text or as an object with `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as cause:
        raise ModelLoadError(f"{path} cannot be read: {cause}") from cause
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise ModelLoadError(f"{path} is not a JSON object: {cause}") from cause
