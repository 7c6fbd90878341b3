"""Build a vocabulary from the `tokenizer.*` metadata of a GGUF file.

Reads plain data only; parsing the file is the model package's work. Two tokenizer models are known: `gpt2` (byte-level BPE with
explicit merges and a named pre-tokenizer) and `llama` (SentencePiece BPE: scores instead of merges, byte fallback).
Invariant: whatever is not known exactly is refused by name; nothing is guessed silently.

End of generation. GGUF stores one `eos_token_id` although chat models end in several ways (a turn: `<|im_end|>`, a document:
`<|endoftext|>`). The rule: the ids stored under eos, eot and eom, plus each control token whose text is in `END_OF_GENERATION`.
Names that are ordinary tokens elsewhere stay out of that list (`</s>` is an HTML tag in Gemma's vocabulary); where such a token
does end texts, the file stores it as eos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from service.errors import ModelLoadError
from service.text.pre_tokenizers import SPLITS, Split
from service.text.token_bytes import Decoding
from service.text.vocabulary import Vocabulary

END_OF_GENERATION = frozenset(
    (
        "<|im_end|>",  # ChatML: SmolLM2, Qwen
        "<|endoftext|>",  # GPT-2, SmolLM2, Qwen, Phi
        "<|eot_id|>",  # Llama 3: end of turn
        "<|eom_id|>",  # Llama 3: end of message before a tool call
        "<|end_of_text|>",  # Llama 3, Granite
        "<|end|>",  # Phi 3
        "<|eot|>",  # Llama 4
        "<|end_of_turn|>",
        "<end_of_turn>",  # Gemma
        "<|END_OF_TURN_TOKEN|>",  # Command R
        "<｜end▁of▁sentence｜>",  # DeepSeek
    )
)

# gguf's TokenType values
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_PREFIX = "tokenizer.ggml."
_T = TypeVar("_T")


def read_gguf_vocabulary(metadata: Mapping[str, object], *, pre: str | None = None) -> Vocabulary:
    """Build the vocabulary; `pre` replaces the file's pre-tokenizer name for files that lack it or name it wrongly.

    Raises ModelLoadError naming the key and the value when the tokenizer model, the pre-tokenizer or a list is not understood.
    """
    model = _optional(metadata, "model", str)
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int) if _PREFIX + "token_type" in metadata else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"{_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        encoder, decoding, adds_bos = _byte_level(metadata, tokens, pre)
    elif model == "llama":
        encoder, decoding, adds_bos = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelLoadError(f"{_PREFIX}model is {model!r}; known are 'gpt2' and 'llama'")

    encoder.add_special_tokens(_added(tokens, types, (_CONTROL, _UNKNOWN), special=True))
    encoder.add_tokens(_added(tokens, types, (_USER_DEFINED,), special=False))
    bos = _token_id(metadata, "bos_token_id", len(tokens))
    stored_adds_bos = _optional(metadata, "add_bos_token", bool)
    adds_bos = adds_bos if stored_adds_bos is None else stored_adds_bos
    return Vocabulary(
        encoder=encoder,
        decoding=decoding,
        num_ids=max((index + 1 for index, kind in enumerate(types) if kind != _UNUSED), default=0),
        bos_id=bos,
        eos_ids=_end_of_generation_ids(metadata, tokens, types),
        adds_bos=adds_bos and bos is not None,
        named_tokens=_named_tokens(metadata, tokens),
        chat_templates=_chat_templates(metadata),
        shrinks_text=encoder.normalizer is not None and model == "gpt2",
    )


def _byte_level(
    metadata: Mapping[str, object], tokens: list[str], pre: str | None
) -> tuple[tokenizers.Tokenizer, Decoding, bool]:
    split = _split(pre if pre is not None else _optional(metadata, "pre", str))
    merges = [_merge(line) for line in _list(metadata, "merges", str)]
    bpe = _checked_bpe(
        vocab=_unique(tokens),
        merges=merges,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=split.prefers_whole_words,
    )
    encoder = tokenizers.Tokenizer(bpe)
    normalizer = split.normalizer()
    if normalizer is not None:
        encoder.normalizer = normalizer
    encoder.pre_tokenizer = split.pre_tokenizer()
    encoder.decoder = decoders.ByteLevel()
    return encoder, Decoding(is_byte_level=True), split.adds_bos


def _sentencepiece(
    metadata: Mapping[str, object], tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, Decoding, bool]:
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{_PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = _token_id(metadata, "unknown_token_id", len(tokens))
    if unknown is None:
        unknown = next((index for index, kind in enumerate(types) if kind == _UNKNOWN), None)
    bpe = _checked_bpe(
        vocab=_unique(tokens),
        merges=_merges_from_scores(tokens, types, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    encoder = tokenizers.Tokenizer(bpe)
    adds_space = _optional(metadata, "add_space_prefix", bool) is not False
    to_metaspace = normalizers.Replace(" ", "▁")
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_metaspace]) if adds_space else to_metaspace
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    encoder.decoder = decoders.Sequence(steps)
    decoding = Decoding(
        is_byte_level=False, has_byte_tokens=True, strips_leading_space=adds_space, replacements=(("▁", " "),)
    )
    return encoder, decoding, True


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """List the merges that a SentencePiece BPE vocabulary implies.

    Any two pieces whose concatenation is a piece may merge; the better score of the result goes first, and among the splits of
    one result the pair that comes first in the vocabulary.
    """
    rank = {token: index for index, token in enumerate(tokens) if types[index] == _NORMAL}
    merges: list[tuple[str, str]] = []
    for whole in sorted(rank, key=lambda token: -scores[rank[token]]):
        pairs = [
            (rank[left], rank[right], left, right)
            for cut in range(1, len(whole))
            if (left := whole[:cut]) in rank and (right := whole[cut:]) in rank
        ]
        if len(pairs) > 1:
            pairs.sort()
        merges += [(left, right) for _, _, left, right in pairs]
    return merges


def _checked_bpe(**arguments: object) -> models.BPE:
    try:
        return models.BPE(**arguments)  # type: ignore[arg-type]  # keyword arguments are typed at the two call sites
    except Exception as cause:  # the library raises a bare Exception for merges of unknown tokens
        raise ModelLoadError(f"the vocabulary of the file does not fit its merges: {cause}") from cause


def _split(pre: str | None) -> Split:
    known = ", ".join(sorted(SPLITS))
    if pre is None or pre == "default":
        raise ModelLoadError(
            f"{_PREFIX}pre is {'absent' if pre is None else repr(pre)}: the file does not say how text is split, and a wrong split"
            f" gives wrong ids without any error; use a file that names one of: {known}"
        )
    split = SPLITS.get(pre)
    if split is None:
        raise ModelLoadError(f"{_PREFIX}pre is {pre!r}, a pre-tokenizer that is not known here; known are: {known}")
    return split


def _merge(line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not separator or not left or not right:
        raise ModelLoadError(f"{_PREFIX}merges holds {line!r}; expected two pieces with a space between")
    return left, right


def _unique(tokens: list[str]) -> dict[str, int]:
    """Map text to id; a repeated text keeps its first id, and the others get a name that no text can produce."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary[token if token not in vocabulary else f"\ufdd0{index}"] = index
    return vocabulary


def _added(tokens: list[str], types: list[int], wanted: tuple[int, ...], *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=special)
        for token, kind in zip(tokens, types, strict=True)
        if kind in wanted and token
    ]


def _end_of_generation_ids(metadata: Mapping[str, object], tokens: list[str], types: list[int]) -> frozenset[int]:
    stored = (_token_id(metadata, f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom"))
    ids = {index for index in stored if index is not None}
    ids.update(
        index
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED) and tokens[index] in END_OF_GENERATION
    )
    return frozenset(ids)


def _named_tokens(metadata: Mapping[str, object], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    ids = {name: _token_id(metadata, f"{key}_token_id", len(tokens)) for name, key in names.items()}
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {"default": metadata[prefix]} if prefix in metadata else {}
    templates.update({key[len(prefix) + 1 :]: value for key, value in metadata.items() if key.startswith(prefix + ".")})
    wrong = [name for name, value in templates.items() if not isinstance(value, str)]
    if wrong:
        raise ModelLoadError(f"{prefix} {wrong[0]!r} is not text")
    return {name: value for name, value in templates.items() if isinstance(value, str)}


def _token_id(metadata: Mapping[str, object], name: str, num_tokens: int) -> int | None:
    value = _optional(metadata, name, int)
    if value is not None and not 0 <= value < num_tokens:
        raise ModelLoadError(f"{_PREFIX}{name} is {value}; the vocabulary has ids 0 to {num_tokens - 1}")
    return value


def _optional(metadata: Mapping[str, object], name: str, kind: type[_T]) -> _T | None:
    value = metadata.get(_PREFIX + name)
    if value is not None and not isinstance(value, kind):
        raise ModelLoadError(f"{_PREFIX}{name} is {value!r}; expected {kind.__name__}")
    return value


def _list(metadata: Mapping[str, object], name: str, kind: type[_T]) -> list[_T]:
    value = metadata.get(_PREFIX + name)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ModelLoadError(
            f"{_PREFIX}{name} is {'absent' if value is None else type(value).__name__}; expected a list"
        )
    entries = list(value)
    if not all(isinstance(entry, kind) for entry in entries):
        raise ModelLoadError(f"{_PREFIX}{name} holds entries that are not {kind.__name__}")
    return entries
