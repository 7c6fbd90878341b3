"""Bring chat messages from the wire into the one shape that templates are given.

Checks shapes only; which roles may follow each other is the template's business.
Invariant: content is never lost silently: what is not text is refused with its path.

Text parts of one message are joined with a newline, for every role alike. `null` content (or none) is allowed where an assistant
calls tools, and templates see an empty text. `tool_calls[].function.arguments` arrive as JSON text and templates see the object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from service.errors import InvalidRequest
from service.text.surrogates import replace_lone_surrogates

PART_SEPARATOR = "\n"
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_DEPTH = 64
_MAX_BRACKETS = 100_000  # in the arguments of one call, which are JSON inside JSON


def normalise_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the messages as fresh, surrogate-free dicts with text contents; raises InvalidRequest naming the path."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return [_normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def clean_value(value: object, path: str, depth: int = 0) -> object:
    """Copy a JSON-like value with every string free of lone surrogates; raises InvalidRequest if it is nested too deeply."""
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if depth >= _MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        raise InvalidRequest(f"{path} is nested more than {_MAX_DEPTH} levels deep", param=path)
    if isinstance(value, Mapping):
        return {
            replace_lone_surrogates(str(key)): clean_value(entry, f"{path}.{key}", depth + 1)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean_value(entry, f"{path}[{index}]", depth + 1) for index, entry in enumerate(value)]
    return value


def _normalise_message(message: object, path: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} must be an object, not {_type(message)}", param=path)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"{path}.role must be a name such as 'user', at most 64 letters, digits, '_', '-' and '.'",
            param=f"{path}.role",
        )
    normalised: dict[str, object] = {"role": role, "content": ""}
    for key, value in message.items():
        if key not in ("role", "content", "tool_calls"):
            normalised[replace_lone_surrogates(str(key))] = clean_value(value, f"{path}.{key}")
    calls = _normalise_tool_calls(message.get("tool_calls"), f"{path}.tool_calls")
    if calls:
        normalised["tool_calls"] = calls
    normalised["content"] = _normalise_content(message.get("content"), role, bool(calls), f"{path}.content")
    return normalised


def _normalise_content(content: object, role: str, calls_tools: bool, path: str) -> str:
    if isinstance(content, str):
        return replace_lone_surrogates(content)
    if content is None:
        if role == "assistant" and calls_tools:
            return ""
        raise InvalidRequest(f"{path} is null; only an assistant message with tool_calls may leave it out", param=path)
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{path} must be text or a list of text parts, not {_type(content)}", param=path)
    if not content:
        raise InvalidRequest(f"{path} is an empty list; give text or at least one text part", param=path)
    return PART_SEPARATOR.join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{path} must be an object with a type, not {_type(part)}", param=path)
    if part.get("type") != "text":
        raise InvalidRequest(f"{path}.type is {part.get('type')!r}; only 'text' is supported", param=f"{path}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text must be text, not {_type(text)}", param=f"{path}.text")
    return replace_lone_surrogates(text)


def _normalise_tool_calls(calls: object, path: str) -> list[object]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{path} must be a list, not {_type(calls)}", param=path)
    return [_normalise_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _normalise_tool_call(call: object, path: str) -> dict[str, object]:
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"{path} must be an object, not {_type(call)}", param=path)
    cleaned = clean_value(call, path)
    assert isinstance(cleaned, dict)
    function = cleaned.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.function must be an object with a name", param=f"{path}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        where = f"{path}.function.arguments"
        if arguments.count("[") + arguments.count("{") > _MAX_BRACKETS:
            raise InvalidRequest(f"{where} opens more than {_MAX_BRACKETS} lists and objects", param=where)
        try:
            parsed = msgspec.json.decode(arguments, type=dict[str, object]) if arguments.strip() else {}
        except msgspec.DecodeError as cause:
            raise InvalidRequest(f"{where} is not a JSON object: {cause}", param=where) from cause
        function["arguments"] = clean_value(parsed, where)
    return cleaned


def _type(value: object) -> str:
    """Name a value's type in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
