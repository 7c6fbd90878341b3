"""The bodies that OpenAI's API answers with, plus the fields that vLLM's users know. Encoding only: requests are read in `fields`.

Fields that are UNSET do not appear. Floats are finite by the engine's contract, and msgspec writes null for one that is not, so that the
output is strict JSON whatever happens.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from service.errors import LooseleafError
from service.messages import FinishReason, Usage


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """How the prompt was computed."""

    cached_tokens: int


class UsageBody(Struct, frozen=True, kw_only=True):
    """Token counts: each prompt once, every choice's completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usages: list[Usage]) -> UsageBody:
        """Add up the requests behind one response."""
        prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        completion_tokens = sum(usage.completion_tokens for usage in usages)
        cached_tokens = sum(usage.cached_tokens for usage in usages)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class ChatTopLogprob(Struct, frozen=True, kw_only=True):
    """One likely token; `bytes` are exact where `token` cannot be, inside a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True, kw_only=True):
    """The token taken and the likeliest ones at its place."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Logprobs of a choice or of one chunk of it."""

    content: list[ChatLogprob]


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """The four parallel lists of the older API. `text_offset` counts characters into the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatText(Struct, frozen=True, kw_only=True):
    """An assistant's message, whole or, in a chunk, the next piece of it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer of a chat: `message` in a response, `delta` in a chunk."""

    index: int
    message: ChatText | UnsetType = UNSET
    delta: ChatText | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One continuation of a prompt, whole or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


Choice = ChatChoice | CompletionChoice


class Body(Struct, frozen=True, kw_only=True):
    """A response or one chunk of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[ChatChoice] | list[CompletionChoice]
    usage: UsageBody | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Model(Struct, frozen=True, kw_only=True):
    """A served model."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "looseleaf"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """Every served model."""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What went wrong; `param` is the path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The shape of every error, as a response's body and as the last event of a stream."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: LooseleafError) -> ErrorBody:
        """Describe `error`; the message is safe to encode whatever text of the caller's it quotes."""
        kind = "invalid_request_error" if error.http_status < 500 else "server_error"
        message = error.message.encode("utf-8", "replace").decode()
        param = error.param.encode("utf-8", "replace").decode() if error.param is not None else None
        return cls(error=ErrorDetail(message=message, type=kind, param=param, code=error.code))


encode = msgspec.json.Encoder().encode
