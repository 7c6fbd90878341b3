"""Turns the fields of a decoded request into a `GenerateRequest`: the one place where a parameter gets its meaning.

HTTP, WebSocket and RPC all hand a plain dict to `take_requests`. Rules for every field on every wire: null means absent; a whole number
is written without a fraction (5.0 is refused where 5 is expected, as are "5" and true); a number with a fraction may be written as a whole
one; what is left over after all known fields were taken is unknown and refused by name. Bounds live in `SamplingParams`, not here.

Invariant: a bad value raises `InvalidRequest` whose `param` is the field's path, and never anything else.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta

from service.errors import InvalidRequest, UnknownModel
from service.messages import (
    MAX_CHOICES,
    MAX_COUNT,
    MAX_LOGPROBS,
    ChatMessage,
    GenerateRequest,
    SamplingParams,
)
from service.transports.strict_json import quoted

MAX_MESSAGES = 4096
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]

# Fields of the OpenAI API that change nothing at these values, and are refused at any other because this server cannot honour them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

T = TypeVar("T")


def take_requests(
    fields: dict[str, Any], request_id: str, *, is_chat: bool | None = None, max_prompts: int = 1
) -> list[GenerateRequest]:
    """Take every generation field out of `fields` (which has no nulls, see `without_nulls`) and refuse what is left.

    A chat has `messages`, a completion `prompt`; None lets the fields decide. A list of prompts gives one request each, at most
    `max_prompts`.
    """
    if is_chat is None:
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidRequest("exactly one of 'prompt' and 'messages' must be given", param="prompt")
        is_chat = "messages" in fields
    if (name := "messages" if is_chat else "prompt") not in fields:
        raise InvalidRequest(f"{name}: required, but missing", param=name)
    messages = take_messages(fields) if is_chat else None
    prompts = [None] if is_chat else take_prompts(fields, max_prompts)
    echo = False if is_chat else take(fields, "echo", bool, False)
    add_special_tokens = True if is_chat else take(fields, "add_special_tokens", bool, True)
    parse_special = True if is_chat else take(fields, "parse_special", bool, True)
    priority = take(fields, "priority", Priority, 0)
    sampling = take_sampling(fields, is_chat=is_chat, echo=echo)
    take(fields, "user", str, "")
    refuse_rest(fields)
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts × n={sampling.n} is above {MAX_CHOICES} choices a request", param="n"
        )
    return [
        GenerateRequest(
            request_id=request_id,
            prompt=prompt,
            messages=messages,
            sampling=sampling,
            add_special_tokens=add_special_tokens,
            parse_special=parse_special,
            echo_prompt=echo,
            priority=priority,
        )
        for prompt in prompts
    ]


def take_sampling(fields: dict[str, Any], *, is_chat: bool, echo: bool) -> SamplingParams:
    """Take the sampling fields; `logprobs` is a boolean with `top_logprobs` in a chat, a count in a completion."""
    values = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
    if (alias := fields.pop("max_completion_tokens", None)) is not None:
        if values.setdefault("max_tokens", alias) != alias:
            raise InvalidRequest("max_completion_tokens and max_tokens differ; give one", param="max_completion_tokens")
        convert({"max_completion_tokens": alias}, _Alias)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    if is_chat:
        values |= _chat_logprobs(values.pop("logprobs", False), fields.pop("top_logprobs", None))
    if echo and "logprobs" in values:
        values.setdefault("prompt_logprobs", values["logprobs"])
    sampling: SamplingParams = convert(values, SamplingParams)
    limit = "max_tokens" if alias is None else "max_completion_tokens"
    if sampling.max_tokens == 0 and not echo and sampling.prompt_logprobs is None:
        raise InvalidRequest(f"{limit}: 0 needs 'echo' or 'prompt_logprobs', else there is no answer", param=limit)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens: {sampling.min_tokens} is above max_tokens {sampling.max_tokens}", param="min_tokens"
        )
    return sampling


def take_messages(fields: dict[str, Any]) -> tuple[ChatMessage, ...]:
    """Take `messages`; content may be absent or null only where an assistant's message has tool calls."""
    items = fields.pop("messages")
    if not isinstance(items, list | tuple) or not items:
        raise InvalidRequest("messages: expected a list with at least one message", param="messages")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: {len(items)} is above {MAX_MESSAGES}", param="messages")
    messages = []
    for index, item in enumerate(items):
        path = f"messages[{index}]"
        message = convert(without_nulls(item) if isinstance(item, dict) else item, ChatMessage, path)
        if message.content is UNSET and not message.tool_calls:
            raise InvalidRequest(f"{path}.content: missing or null without tool calls", param=f"{path}.content")
        if message.content == ():
            raise InvalidRequest(f"{path}.content: a list needs at least one part", param=f"{path}.content")
        messages.append(message)
    return tuple(messages)


def take_prompts(fields: dict[str, Any], max_prompts: int) -> list[str | tuple[int, ...] | None]:
    """Take `prompt`: text, token ids, or a list of either with at most `max_prompts` items."""
    value = fields.pop("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple) or not value:
        raise InvalidRequest("prompt: expected text, token ids, or a list of them that is not empty", param="prompt")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [convert(value, tuple[TokenId, ...], "prompt")]
    if len(value) > max_prompts:
        raise InvalidRequest(f"prompt: {len(value)} prompts are above the limit of {max_prompts}", param="prompt")
    if isinstance(value[0], str):
        return [convert(item, str, f"prompt[{index}]") for index, item in enumerate(value)]
    prompts: list[str | tuple[int, ...] | None] = []
    for index, item in enumerate(value):
        ids = convert(item, tuple[TokenId, ...], f"prompt[{index}]")
        if not ids:
            raise InvalidRequest(f"prompt[{index}]: an empty list of token ids", param=f"prompt[{index}]")
        prompts.append(ids)
    return prompts


def take_model(fields: dict[str, Any], served: str) -> None:
    """Take `model`, which may be absent; raises `UnknownModel` when it names another than `served`."""
    name = take(fields, "model", str, served)
    if name != served:
        raise UnknownModel(f"model {quoted(name)} is not served here; this server has {served!r}", param="model")


def take(fields: dict[str, Any], name: str, kind: Any, default: T) -> T:
    """Take one field of type `kind`, or `default` where it is absent."""
    if name not in fields:
        return default
    value: T = convert(fields.pop(name), kind, name)
    return value


def refuse_rest(fields: dict[str, Any]) -> None:
    """Raise for the first field nobody took, unless it is a known one at a value that changes nothing."""
    for name, value in fields.items():
        neutral = NEUTRAL.get(name)
        if neutral is None:
            raise InvalidRequest(f"unknown field {quoted(name)}", param=str(name)[:64])
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            only = " or ".join(repr(allowed) for allowed in neutral) or "no value"
            raise InvalidRequest(f"{name}: not offered by this server ({only} is accepted)", param=name)


def without_nulls(fields: dict[Any, Any]) -> dict[str, Any]:
    """Return `fields` less those that are null; raises if a key is not text."""
    for key in fields:
        if not isinstance(key, str):
            raise InvalidRequest(f"a field's name must be text, got {quoted(key)}")
    return {key: value for key, value in fields.items() if value is not None}


def convert(value: Any, kind: Any, path: str = "") -> Any:
    """Check `value` against `kind`; raises `InvalidRequest` with the path of the field at fault, below `path`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), path) from error


class _Alias(msgspec.Struct):
    max_completion_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)]


_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key` in `)?\$(?P<path>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<how>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _invalid(text: str, prefix: str) -> InvalidRequest:
    match = _AT.match(text)
    what, below = (match["what"], match["path"] or "") if match else (text, "")
    path = (prefix + below).removeprefix(".")
    if named := _NAMED.match(what):
        path = f"{path}.{named['name']}".removeprefix(".")
        what = "unknown field" if named["how"] == "contains unknown" else "required, but missing"
    what = what[:1].lower() + what[1:]
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


def _chat_logprobs(wanted: Any, count: Any) -> dict[str, Any]:
    if not isinstance(wanted, bool):
        raise InvalidRequest("logprobs: expected a boolean in a chat (the count is 'top_logprobs')", param="logprobs")
    if count is None:
        return {"logprobs": 0} if wanted else {}
    if not wanted:
        raise InvalidRequest("top_logprobs: needs 'logprobs': true", param="top_logprobs")
    convert({"top_logprobs": count}, _TopLogprobs)
    return {"logprobs": count}


class _TopLogprobs(msgspec.Struct):
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


def _logit_bias(value: Any) -> dict[int, float]:
    """Read token ids from an object's keys, which JSON can only write as text."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias: expected an object from token ids to numbers", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_number = isinstance(key, int) and not isinstance(key, bool)
        if not (is_number or (isinstance(key, str) and _TOKEN_ID.fullmatch(key))):
            raise InvalidRequest(f"logit_bias: key {quoted(key)} is not a token id", param=f"logit_bias.{key}"[:64])
        token_id = convert(int(key), TokenId, f"logit_bias.{key}")
        biases[token_id] = convert(bias, Bias, f"logit_bias.{key}")
    return biases
