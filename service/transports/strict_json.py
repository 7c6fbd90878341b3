"""Reads JSON the way RFC 8259 wants it, and refuses what other parsers let pass.

Refused: a byte order mark, invalid UTF-8, NaN and Infinity, numbers beyond a double, trailing commas, bytes after the value, nesting
beyond the interpreter's limit, and an object that names a key twice (two parsers would disagree about which one counts). Half a surrogate
pair, which no UTF-8 text can hold, becomes U+FFFD. Invariant: whatever the bytes, the outcome is an object or an `InvalidRequest`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from service.errors import InvalidRequest

MAX_QUOTED_CHARACTERS = 64

_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def decode_object(body: bytes | str, *, what: str = "the body") -> dict[str, Any]:
    """Return the JSON object in `body`; raises `InvalidRequest` that says where the text is wrong."""
    try:
        text = body if isinstance(body, str) else body.decode()
        value = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_float=_finite, parse_constant=_refuse_constant
        )
        if "\\ud" in text or "\\uD" in text:
            value = _mended(value)
    except RecursionError as error:
        raise InvalidRequest(f"{what} is nested too deeply") from error
    except ValueError as error:  # of the decoders, and Python's own for a number of thousands of digits
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


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"number out of range: {quoted(digits)}")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _mended(value: Any) -> Any:
    """Return `value` with U+FFFD for each half of a surrogate pair (the parser has joined the whole ones)."""
    if isinstance(value, str):
        return _HALF_A_PAIR.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return _without_duplicates([(_mended(key), _mended(item)) for key, item in value.items()])
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):  # nearly always, and quick
        return found
    key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    raise InvalidRequest(f"the key {quoted(key)} is given twice", param=_mended(key)[:MAX_QUOTED_CHARACTERS])
