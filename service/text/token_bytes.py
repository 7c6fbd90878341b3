"""What each token id contributes to the text, as bytes.

Not an encoder: this reads the *decoder* half of a tokenizer once, at load, into a plain table. With it, decoding is a join of
byte strings plus one UTF-8 pass, and incremental decoding cannot disagree with decoding the whole.
Invariant: a token's bytes do not depend on its neighbours; the only exception, SentencePiece's leading space, is a flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.errors import ModelLoadError

_BYTE_TOKEN_LENGTH = len("<0x0A>")


@dataclass(frozen=True, slots=True)
class Decoding:
    """How token texts become bytes.

    `is_byte_level`: characters stand for bytes as in GPT-2; otherwise texts are UTF-8 after `replacements`, and `<0x0A>` tokens
    are single bytes when `has_byte_tokens`. `strips_leading_space`: the whole text loses one leading space.
    """

    is_byte_level: bool
    has_byte_tokens: bool = False
    strips_leading_space: bool = False
    replacements: tuple[tuple[str, str], ...] = ()


def read_decoding(decoder: object, *, source: str) -> Decoding:
    """Read the `decoder` object of a tokenizer.json.

    Raises ModelLoadError naming the decoder type where the text of a token would depend on its neighbours (WordPiece, CTC) or
    is not defined (no decoder).
    """
    parts = list(_flatten(decoder))
    types = [str(part.get("type")) for part in parts]
    if not parts:
        raise ModelLoadError(f"{source}: the tokenizer has no decoder, so its token texts cannot be joined")
    replacements: list[tuple[str, str]] = []
    has_byte_tokens = strips = False
    for kind, part in zip(types, parts, strict=True):
        if kind in ("ByteLevel", "Fuse"):
            continue
        if kind == "ByteFallback":
            has_byte_tokens = True
        elif kind == "Metaspace":
            replacements.append((str(part.get("replacement", "▁")), " "))
            prepends = part.get("add_prefix_space", True) is not False
            strips = strips or (prepends and part.get("prepend_scheme", "always") != "never")
        elif kind == "Replace":
            pattern = part.get("pattern")
            literal = pattern.get("String") if isinstance(pattern, Mapping) else None
            if not isinstance(literal, str):
                raise ModelLoadError(f"{source}: decoder step Replace has a pattern that is not a plain string")
            replacements.append((literal, str(part.get("content", ""))))
        elif kind == "Strip":
            if (part.get("content"), part.get("start"), part.get("stop")) != (" ", 1, 0):
                raise ModelLoadError(
                    f"{source}: decoder step Strip is only known as one leading space, not {dict(part)}"
                )
            strips = True
        else:
            raise ModelLoadError(
                f"{source}: decoder {kind!r} is unknown; known are ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip"
            )
    return Decoding("ByteLevel" in types, has_byte_tokens, strips, tuple(replacements))


def build_token_bytes(tokens: Sequence[str | None], added_ids: frozenset[int], decoding: Decoding) -> list[bytes]:
    """Return the bytes of every id; ids without a token get none. `added_ids` are matched in raw text, so they are their own text."""
    if decoding.is_byte_level:
        return _byte_level_table(tokens, added_ids)
    table: list[bytes] = []
    for token in tokens:
        if token is None:
            table.append(b"")
            continue
        if decoding.has_byte_tokens and token.startswith("<0x") and len(token) == _BYTE_TOKEN_LENGTH:
            value = _byte_value(token)
            if value is not None:
                table.append(value)
                continue
        for old, new in decoding.replacements:
            token = token.replace(old, new)
        table.append(token.encode("utf-8"))
    return table


def byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's printable stand-in for each byte (Radford et al. 2019): itself where printable, else U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in frozenset(printable)]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(0x100 + position) for position, byte in enumerate(hidden)})
    return alphabet


def _byte_level_table(tokens: Sequence[str | None], added_ids: frozenset[int]) -> list[bytes]:
    to_latin1 = {ord(stand_in): byte for byte, stand_in in byte_level_alphabet().items()}
    table: list[bytes] = []
    for index, token in enumerate(tokens):
        if token is None:
            table.append(b"")
        elif index in added_ids:
            table.append(token.encode("utf-8"))
        else:
            try:
                table.append(token.translate(to_latin1).encode("latin-1"))
            except UnicodeEncodeError:  # not in the alphabet, such as an unmarked control token: its own text
                table.append(token.encode("utf-8"))
    return table


def _byte_value(token: str) -> bytes | None:
    try:
        return bytes.fromhex(token[3:5]) if token.endswith(">") else None
    except ValueError:
        return None


def _flatten(decoder: object) -> Iterable[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    inner = decoder.get("decoders")
    if isinstance(inner, Sequence):
        for part in inner:
            yield from _flatten(part)
