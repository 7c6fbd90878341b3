"""From a `GenerateRequest` to prompt token ids, with every check that needs the tokenizer.

Long texts and all chats are encoded in a small worker pool, neither on the event loop nor on the step thread: a chat template is the model's
own code and may take its whole time limit for one word. What cannot fit is refused before it is tokenised.
Invariant: what passes here has ids the model knows and numbers the sampler can use.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import msgspec

from service.errors import ContextTooLong, Draining, InvalidRequest
from service.messages import ChatMessage, GenerateRequest, SamplingParams
from service.text import ChatTemplate, Tokenizer

INLINE_CHARS = 2048  # up to here encoding takes well under a millisecond, less than handing it to a thread is worth
NUM_WORKERS = 2


class PromptEncoder:
    """Render and tokenise prompts; `capacity` is the number of tokens a prompt must stay below."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, capacity: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._capacity = capacity
        self._pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="looseleaf-text")

    async def encode(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's ids. Raises `InvalidRequest` naming the field, `ContextTooLong`, or `Draining` after `close`."""
        _check_sampling(request.sampling, self._tokenizer.vocab_size)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
        if isinstance(request.prompt, tuple):
            self._check_ids(request.prompt)
            return request.prompt
        num_chars = _num_chars(request)
        # A character has at least one byte, so this bounds the tokens from below without reading the text.
        at_least = self._tokenizer.min_tokens(num_chars)
        if at_least >= self._capacity:
            raise ContextTooLong(
                f"the prompt has at least {at_least} tokens and at most {self._capacity - 1} fit",
                param="prompt" if request.messages is None else "messages",
            )
        if request.messages is None and num_chars <= INLINE_CHARS:
            return self._encode(request)
        return await self._encode_on_worker(request)

    def prompt_text(self, request: GenerateRequest, token_ids: tuple[int, ...]) -> str:
        """Return the prompt as text, for an echo: the caller's own text, or what the ids say."""
        if isinstance(request.prompt, str):
            return request.prompt
        return self._tokenizer.decode(token_ids, skip_special_tokens=request.sampling.skip_special_tokens)

    def close(self) -> None:
        """Give the worker threads up; what they still compute is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _encode_on_worker(self, request: GenerateRequest) -> tuple[int, ...]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Draining("the service is shutting down") from None  # `close` dropped the work, nobody left

    def _encode(self, request: GenerateRequest) -> tuple[int, ...]:
        if request.messages is None:
            assert isinstance(request.prompt, str)
            return tuple(
                self._tokenizer.encode(
                    request.prompt,
                    add_special_tokens=request.add_special_tokens,
                    parse_special=request.parse_special,
                )
            )
        if not request.messages:
            raise InvalidRequest("messages must have at least one entry", param="messages")
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use a prompt instead of messages", param="messages")
        return tuple(self._template.encode([_plain(message) for message in request.messages]))

    def _check_ids(self, token_ids: tuple[int, ...]) -> None:
        size = self._tokenizer.vocab_size
        if not 0 < len(token_ids) < self._capacity:
            return  # the core refuses it, as it does when a text turns out to have so many tokens
        if min(token_ids) >= 0 and max(token_ids) < size:
            return
        index, worst = next((i, token) for i, token in enumerate(token_ids) if not 0 <= token < size)
        raise InvalidRequest(f"token id {worst} is not between 0 and {size - 1}", param=f"prompt[{index}]")


def _plain(message: ChatMessage) -> dict[str, object]:
    plain = msgspec.to_builtins(message)
    assert isinstance(plain, dict)
    # A template tells an absent key from a null one: only what the client sent, and content, is passed on.
    return {key: value for key, value in plain.items() if value is not None or key == "content"}


def _num_chars(request: GenerateRequest) -> int:
    if request.messages is None:
        return len(request.prompt or "")
    total = 0
    for message in request.messages:
        if isinstance(message.content, str):
            total += len(message.content)
        elif isinstance(message.content, tuple):
            total += sum(len(part.text) for part in message.content)
    return total


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse what the types cannot: ids outside the vocabulary, and NaN, which passes every comparison."""
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequest(f"{name} must be a finite number", param=name)
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"logit_bias has token id {token_id}, which is not between 0 and {vocab_size - 1}", param="logit_bias"
            )
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token id {token_id} must be a finite number", param="logit_bias")
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids has {token_id}, which is not between 0 and {vocab_size - 1}", param="stop_token_ids"
            )
