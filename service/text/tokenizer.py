"""Strings to token ids and back, for one model.

Not the chat template and not streaming (`ChatTemplate`, `TextStream` use this). Encoding is the `tokenizers` library's; decoding is
a table of bytes per token, so that a text is the same whether it is decoded at once or token by token.
Invariant: immutable after construction and safe to share between threads.

Special tokens written in text. `parse_special=True` (raw completions) turns them into control ids, as Hugging Face tokenizers do;
with `parse_special=False` (chat contents) they are ordinary characters. Added tokens that the model does not mark as special
(such as `<tool_call>`) are vocabulary, not control, and are recognised either way.

`clean_up_tokenization_spaces` of tokenizer_config.json is not applied: it edits text across token borders, so that a stream could
not equal the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from service.text.detokenizer import TextStream
from service.text.gguf_vocabulary import read_gguf_vocabulary
from service.text.model_directory import read_directory
from service.text.surrogates import replace_lone_surrogates
from service.text.token_bytes import build_token_bytes
from service.text.vocabulary import Vocabulary

# Unicode normalisation shortens UTF-8 at most this much: a mathematical letter (4 bytes) becomes a plain one (1 byte) under NFKC.
_MAX_SHRINKING = 4


class Tokenizer:
    """One model's tokenizer.

    `vocab_size`: ids below it stand for something; the model's output may be wider. `bos_id`, `adds_bos`: the token that starts
    a text, and whether plain prompts get it. `eos_ids`: all ids that end generation. `special_ids`: control tokens, absent from
    visible text. `named_tokens`, `chat_templates`: as in the model's files. `encoder`: the library's tokenizer, not to be changed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        encoder = vocabulary.encoder
        self.vocab_size = vocabulary.num_ids
        self.bos_id = vocabulary.bos_id
        self.adds_bos = vocabulary.adds_bos
        self.eos_ids = vocabulary.eos_ids
        self.named_tokens: Mapping[str, str] = dict(vocabulary.named_tokens)
        self.chat_templates: Mapping[str, str] = dict(vocabulary.chat_templates)
        self.strips_leading_space = vocabulary.decoding.strips_leading_space
        added = encoder.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, tokenizers.AddedToken] = added
        self.special_ids = frozenset(index for index, token in added.items() if token.special)

        self.encoder = encoder
        self._literal = without_special_parsing(encoder)
        tokens: list[str | None] = [None] * self.vocab_size
        for text, index in encoder.get_vocab(with_added_tokens=True).items():
            if index < self.vocab_size:
                tokens[index] = text
        self._all_bytes = build_token_bytes(tokens, frozenset(added), vocabulary.decoding)
        self._visible_bytes = list(self._all_bytes)
        for index in self.special_ids:
            if index < self.vocab_size:
                self._visible_bytes[index] = b""
        self._max_bytes_per_token = _max_bytes_per_token(self._all_bytes, vocabulary)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load from a Hugging Face directory; see `model_directory` for files and precedence. Raises ModelLoadError."""
        return cls(read_directory(Path(path)))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object], *, pre: str | None = None) -> Tokenizer:
        """Build from GGUF metadata; `pre` overrides `tokenizer.ggml.pre`. Raises ModelLoadError naming what is not understood."""
        return cls(read_gguf_vocabulary(metadata, pre=pre))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Encode `text`; lone surrogates count as U+FFFD.

        `add_special_tokens` prepends bos if `adds_bos`, unless the text already starts with it. An eos that some configurations
        append is not added: a prompt is a text to be continued. May take seconds for megabytes; releases the GIL.
        """
        encoder = self.encoder if parse_special else self._literal
        ids: list[int] = encoder.encode(replace_lone_surrogates(text), add_special_tokens=False).ids
        if add_special_tokens and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `ids`; ids outside the vocabulary have no text, bytes that are not UTF-8 become U+FFFD. Never raises."""
        table = self.token_bytes_table(skip_special_tokens=skip_special_tokens)
        size = len(table)
        data = b"".join([table[index] for index in ids if 0 <= index < size])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, a special token's own text included; empty outside the vocabulary."""
        return self._all_bytes[token_id] if 0 <= token_id < len(self._all_bytes) else b""

    def token_text(self, token_id: int) -> str:
        """Return one token for display; part of a character shows as U+FFFD (see `token_bytes`)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes_table(self, *, skip_special_tokens: bool) -> Sequence[bytes]:
        """Return the bytes of each id, empty for special tokens if they are skipped; shared, not to be changed."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    def new_stream(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> TextStream:
        """Start the text of one sequence; see `TextStream`."""
        return TextStream(
            self, prompt_ids, skip_special_tokens=skip_special_tokens, stop=stop, include_stop=include_stop
        )

    def min_tokens(self, num_bytes: int) -> int:
        """Return how many tokens a text of `num_bytes` UTF-8 bytes has at least: a check that costs nothing before encoding.

        0 where no bound exists. White space that a token marked `lstrip` or `rstrip` swallows is not considered.
        """
        if self._max_bytes_per_token is None:
            return 0
        return -(-num_bytes // self._max_bytes_per_token)


def without_special_parsing(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that gives the same ids, except that special tokens in the text are ordinary characters.

    The flag belongs to a whole tokenizer object and toggling it would race between threads, hence a second one. It shares the
    model (the large part) with the first.
    """
    added = encoder.get_added_tokens_decoder()
    literal = share_model(encoder)
    literal.add_tokens([added[index] for index in sorted(added)])
    if literal.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps: only a full copy keeps them
        literal = tokenizers.Tokenizer.from_str(encoder.to_str())
    literal.encode_special_tokens = True
    return literal


def share_model(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a new tokenizer over the same model, normaliser and pre-tokenizer, with no added tokens."""
    twin = tokenizers.Tokenizer(encoder.model)
    if encoder.normalizer is not None:
        twin.normalizer = encoder.normalizer
    if encoder.pre_tokenizer is not None:
        twin.pre_tokenizer = encoder.pre_tokenizer
    return twin


def _max_bytes_per_token(table: Sequence[bytes], vocabulary: Vocabulary) -> int | None:
    if vocabulary.fuses_unknown or not table:
        return None
    longest = max(1, max(map(len, table)))
    return longest * _MAX_SHRINKING if vocabulary.shrinks_text else longest
