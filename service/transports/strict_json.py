"""Reads JSON the way RFC 8259 wants it, and refuses what other parsers let pass.

Refused: a byte order mark, invalid UTF-8, NaN and Infinity, numbers beyond a double, trailing commas, bytes after the value, nesting
beyond the interpreter's limit, and an object that names a key twice (two parsers would disagree about which one counts). Half a surrogate
pair, which no UTF-8 text can hold, becomes U+FFFD. Invariant: whatever the bytes, the outcome is an object or an `InvalidRequest`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from service.errors import InvalidRequest

MAX_QUOTED_CHARACTERS = 64

# One escape of a JSON string: a whole surrogate pair, half of one, or any other (so that the u of an escaped backslash is not taken
# for the start of an escape).
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)",
    re.DOTALL,
)
_HALF_LENGTH = len(rb"\ud800")


def decode_object(body: bytes | str, *, what: str = "the body") -> dict[str, Any]:
    """Return the JSON object in `body`; raises `InvalidRequest` that says where the text is wrong."""
    raw = body.encode("utf-8", "replace") if isinstance(body, str) else body
    if b"\\ud" in raw or b"\\uD" in raw:
        raw = _ESCAPE.sub(_mend, raw)
    try:
        value = msgspec.json.decode(raw)
        if isinstance(value, dict):
            json.loads(raw, object_pairs_hook=_refuse_duplicates)
    except RecursionError as error:
        raise InvalidRequest(f"{what} is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object, got {_NAMES[type(value)]}")
    return value


def quoted(text: object) -> str:
    """Show a piece of the caller's input in a message, shortened and escaped."""
    shown = repr(text)
    return shown if len(shown) <= MAX_QUOTED_CHARACTERS else shown[:MAX_QUOTED_CHARACTERS] + "…"


_NAMES: dict[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
}
_NAMES[type(None)] = "null"


def _mend(match: re.Match[bytes]) -> bytes:
    escape = match.group()
    return rb"\ufffd" if len(escape) == _HALF_LENGTH else escape


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) == len(pairs):  # nearly always, and quick
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidRequest(f"the key {quoted(key)} is given twice", param=key[:MAX_QUOTED_CHARACTERS])
        seen.add(key)
