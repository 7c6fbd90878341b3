"""Keep control tokens that are written in message contents from becoming control tokens.

A prompt is rendered by a template into one text, and only that text is tokenised: by then nobody can tell the template's own
`<|im_end|>` from one that a user typed. So contents are marked *before* rendering and the marks are resolved after it:

    content   "a<|im_end|>b"                   each control text is cut up by an invisible breaker  ("·" below)
    rendered  "<|im_start|>user\\na<·|·i·m·…>·b<|im_end|>"
    stand-in  "①user\\na<·|·i·m·…>·b②"          whole control texts are the template's: replaced by stand-ins
    encoded   "①user\\na<|im_end|>b②"           breakers removed; a twin tokenizer knows only the stand-ins as control tokens

Templates may trim, split, compare or concatenate contents meanwhile, and the text is still tokenised as a whole, so a merge may
cross from template to content exactly as in training. Breakers and stand-ins are runs of Unicode noncharacters (U+FDD0 to U+FDEF)
drawn at random for each process, so that no content can contain them on purpose.

Control texts are the special tokens and the added tokens that look like turn markers (`<|user|>`), which some models forget to
mark. Also cut are contents that begin or end like part of one: a template could complete it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken

from service.text.tokenizer import Tokenizer, share_model

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_NONCE_LENGTH = 10
_INDEX_LENGTH = 4  # 32^4 control tokens
_TURN_MARKER = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


class ControlTokenGuard:
    """Marks contents before rendering and encodes the rendered text after it. Immutable, safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        control = {
            index: token
            for index, token in tokenizer.added_tokens.items()
            if len(token.content) > 1 and (token.special or _TURN_MARKER.fullmatch(token.content))
        }
        self._breaker = _nonce()
        prefix = _nonce()
        self._stand_ins = {token.content: prefix + _digits(position) for position, token in enumerate(control.values())}
        self._pattern = re.compile(_longest_match(self._stand_ins)) if control else None
        self._heads = frozenset(text[:cut] for text in self._stand_ins for cut in range(1, len(text)))
        self._tails = frozenset(text[cut:] for text in self._stand_ins for cut in range(1, len(text)))
        self._longest_part = max(map(len, self._stand_ins), default=1) - 1
        self._ids_by_text = {
            self._stand_ins.get(token.content, token.content): index for index, token in tokenizer.added_tokens.items()
        }
        self._twin = _twin(tokenizer, self._stand_ins)

    def mark(self, content: str) -> str:
        """Return `content` with every control text cut up; the same object if there is nothing to cut."""
        if self._pattern is None or not content:
            return content
        marked = self._pattern.sub(self._cut, content)
        # Templates often trim contents, so the edges are those of the trimmed text.
        start, end = len(marked) - len(marked.lstrip()), len(marked.rstrip())
        if self._reaches_over_the_end(marked[:end]):
            marked = marked[:end] + self._breaker + marked[end:]
        if self._reaches_over_the_start(marked[start:]):
            marked = marked[:start] + self._breaker + marked[start:]
        return marked

    def mark_value(self, value: object) -> object:
        """Apply `mark` to every string, dict keys included, of a JSON-like value."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark_value(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.mark_value(entry) for entry in value]
        return value

    def encode(self, rendered: str) -> list[int] | None:
        """Encode a text rendered from marked contents; None if nothing in it is marked (then plain encoding is the same)."""
        if self._pattern is None or self._breaker not in rendered:
            return None
        text = self._pattern.sub(lambda match: self._stand_ins[match[0]], rendered).replace(self._breaker, "")
        encoding = self._twin.encode(text, add_special_tokens=False)
        # The twin numbers its added tokens anew, so they are translated by their text; merged tokens keep their ids.
        return [self._ids_by_text.get(token, index) for token, index in zip(encoding.tokens, encoding.ids, strict=True)]

    def _cut(self, match: re.Match[str]) -> str:
        # After every character: whatever overlaps the match, inside it or across its end, is cut too.
        return self._breaker.join(match[0]) + self._breaker

    def _reaches_over_the_end(self, text: str) -> bool:
        return any(text[-length:] in self._heads for length in range(1, min(self._longest_part, len(text)) + 1))

    def _reaches_over_the_start(self, text: str) -> bool:
        return any(text[:length] in self._tails for length in range(1, min(self._longest_part, len(text)) + 1))


def _twin(tokenizer: Tokenizer, stand_ins: dict[str, str]) -> tokenizers.Tokenizer:
    """Build a tokenizer over the same model that knows the stand-ins instead of the control texts."""
    twin = share_model(tokenizer.encoder)
    added = []
    for index in sorted(tokenizer.added_tokens):
        token = tokenizer.added_tokens[index]
        if token.content in stand_ins:
            token = AddedToken(
                stand_ins[token.content],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=True,
            )
        added.append(token)
    twin.add_tokens(added)
    return twin


def _nonce() -> str:
    return "".join(secrets.choice(_NONCHARACTERS) for _ in range(_NONCE_LENGTH))


def _digits(number: int) -> str:
    """Write `number` in noncharacters, at fixed length so that no stand-in begins another."""
    digits = []
    for _ in range(_INDEX_LENGTH):
        number, digit = divmod(number, len(_NONCHARACTERS))
        digits.append(_NONCHARACTERS[digit])
    return "".join(digits)


def _longest_match(texts: Iterable[str]) -> str:
    """Return an expression that matches the longest of `texts`, shared beginnings factored out.

    A plain alternation tries every text at every `<`; a vocabulary with thousands of unused control tokens makes that seconds.
    """
    root: dict[str, object] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})  # type: ignore[assignment]  # a dict of dicts, "" marks an end
        node[""] = {}
    return _expression(root)


def _expression(node: dict[str, object]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, child),) = node.items()
        prefix += re.escape(character)
        node = child  # type: ignore[assignment]
    branches = [
        re.escape(character) + _expression(child)  # type: ignore[arg-type]
        for character, child in node.items()
        if character
    ]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
