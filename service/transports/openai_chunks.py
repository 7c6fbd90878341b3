"""Renders an engine's events as OpenAI choices, in pieces for a stream or whole. Knows text and numbers, never sockets.

A stream and a whole response go through the same code: a whole choice is the merger of its deltas, rendered once.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from service.messages import Delta, GenerateRequest, Started, TokenLogprob
from service.transports.openai_types import (
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatText,
    ChatTopLogprob,
    CompletionChoice,
    CompletionLogprobs,
)


class Wants(Struct, frozen=True, kw_only=True):
    """What the caller asked to see besides text."""

    token_ids: bool
    echo: bool


class ChatChoices:
    """Choices of `/v1/chat/completions`."""

    whole_object: Literal["chat.completion"] = "chat.completion"
    chunk_object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, requests: list[GenerateRequest], wants: Wants) -> None:
        self._n = requests[0].sampling.n
        self._wants = wants

    def opening(self, _number: int, _started: Started) -> list[ChatChoice]:
        """Announce every choice with its role."""
        return [ChatChoice(index=i, delta=ChatText(role="assistant", content="")) for i in range(self._n)]

    def piece(self, _number: int, delta: Delta) -> ChatChoice | None:
        """Render `delta`, or None when it holds nothing to see yet."""
        if _is_invisible(delta, self._wants):
            return None
        text = ChatText(content=delta.text) if delta.text or delta.finish_reason is None else ChatText()
        return self._choice(delta, delta_text=text)

    def whole(self, _number: int, _started: Started, delta: Delta) -> ChatChoice:
        """Render a finished choice from the merger of its deltas."""
        return self._choice(delta, message=ChatText(role="assistant", content=delta.text))

    def _choice(
        self, delta: Delta, message: ChatText | UnsetType = UNSET, delta_text: ChatText | UnsetType = UNSET
    ) -> ChatChoice:
        return ChatChoice(
            index=delta.index,
            message=message,
            delta=delta_text,
            logprobs=_chat_logprobs(delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self._wants.token_ids else UNSET,
        )


class CompletionChoices:
    """Choices of `/v1/completions`, numbered through all prompts: prompt i has the indices i·n … i·n + n - 1."""

    whole_object: Literal["text_completion"] = "text_completion"
    chunk_object: Literal["text_completion"] = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, requests: list[GenerateRequest], wants: Wants) -> None:
        self._n = requests[0].sampling.n
        self._num_top = requests[0].sampling.logprobs
        self._wants = wants
        self._offsets: dict[int, int] = {}  # by choice: characters of the text whose logprobs were rendered

    def opening(self, number: int, started: Started) -> list[CompletionChoice]:
        """Render the echoed prompt of every choice of request `number`, if it was asked for."""
        if not self._wants.echo and not self._wants.token_ids:
            return []
        return [self._prompt(self._index(number, i), started) for i in range(self._n)]

    def piece(self, number: int, delta: Delta) -> CompletionChoice | None:
        """Render `delta`, or None when it holds nothing to see yet."""
        if _is_invisible(delta, self._wants):
            return None
        index = self._index(number, delta.index)
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=self._logprobs(index, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self._wants.token_ids else UNSET,
        )

    def whole(self, number: int, started: Started, delta: Delta) -> CompletionChoice:
        """Render a finished choice from the merger of its deltas, after the prompt if that was to be echoed."""
        index = self._index(number, delta.index)
        before = started.prompt_text or "" if self._wants.echo else ""
        entries: tuple[TokenLogprob, ...] | None = delta.logprobs
        if self._wants.echo and self._num_top is not None:
            entries = (started.prompt_logprobs or ()) + (delta.logprobs or ())
        return CompletionChoice(
            index=index,
            text=before + delta.text,
            logprobs=self._logprobs(index, entries),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            prompt_token_ids=started.prompt_token_ids if self._wants.token_ids else UNSET,
            token_ids=delta.token_ids if self._wants.token_ids else UNSET,
        )

    def _index(self, number: int, choice: int) -> int:
        return number * self._n + choice

    def _prompt(self, index: int, started: Started) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=started.prompt_text or "" if self._wants.echo else "",
            logprobs=self._logprobs(index, started.prompt_logprobs) if self._wants.echo else None,
            prompt_token_ids=started.prompt_token_ids if self._wants.token_ids else UNSET,
            token_ids=() if self._wants.token_ids else UNSET,
        )

    def _logprobs(self, index: int, entries: tuple[TokenLogprob, ...] | None) -> CompletionLogprobs | None:
        if entries is None or self._num_top is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets = []
        for entry in entries:
            # A token that begins inside a character belongs to that character, which was counted with its first byte.
            is_inside = bool(entry.raw) and _is_continuation(entry.raw[0])
            offsets.append(max(0, offset - 1) if is_inside else offset)
            offset += sum(not _is_continuation(byte) for byte in entry.raw)
        self._offsets[index] = offset
        return CompletionLogprobs(
            tokens=[_name(entry.text, entry.raw) for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[_top(entry) for entry in entries],
            text_offset=offsets,
        )


def _is_invisible(delta: Delta, wants: Wants) -> bool:
    return not (delta.text or delta.finish_reason or delta.logprobs or (wants.token_ids and delta.token_ids))


def _chat_logprobs(entries: tuple[TokenLogprob, ...] | None) -> ChatLogprobs | None:
    if entries is None:
        return None
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=entry.text,
                logprob=entry.logprob,
                bytes=list(entry.raw),
                top_logprobs=[
                    ChatTopLogprob(token=top.text, logprob=top.logprob, bytes=list(top.raw)) for top in entry.top
                ],
            )
            for entry in entries
        ]
    )


def _top(entry: TokenLogprob) -> dict[str, float] | None:
    """List the likeliest tokens by name, and the one taken even if it is not among them."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for top in entry.top:
        found.setdefault(_name(top.text, top.raw), top.logprob)  # sorted: of two with one text the likelier stays
    found.setdefault(_name(entry.text, entry.raw), entry.logprob)
    return found


def _name(text: str, raw: bytes) -> str:
    """Name a token so that two different ones inside a character do not both become U+FFFD."""
    if "\ufffd" not in text:
        return text
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80
