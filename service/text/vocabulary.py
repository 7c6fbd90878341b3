"""What a model's files say about its text, whichever format they have: the value that a `Tokenizer` is built from.

Not a tokenizer: readers (`model_directory`, `gguf_vocabulary`) produce it, `Tokenizer` consumes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers

from service.text.token_bytes import Decoding


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One model's vocabulary.

    `encoder`: splits and merges; its added tokens carry the `special` flag. `num_ids`: one more than the highest id that stands
    for something. `adds_bos`: whether a plain prompt starts with `bos_id`. `eos_ids`: every id that ends a text or a turn.
    `named_tokens`: `bos_token`, `eos_token`, … as chat templates know them. `chat_templates`: by name, `default` first choice.
    `fuses_unknown`: unknown text of any length may become a single token.
    `shrinks_text`: normalisation may shorten the text before it is split.
    """

    encoder: tokenizers.Tokenizer
    decoding: Decoding
    num_ids: int
    bos_id: int | None
    eos_ids: frozenset[int]
    adds_bos: bool
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    fuses_unknown: bool = False
    shrinks_text: bool = False
