"""The answer of one request on its way to a consumer: tokens go in as steps end, events come out when the consumer is ready.

A consumer that lags gets fewer, larger deltas: there is one pending delta a choice, so memory is bounded by the tokens asked for and
nobody waits for the reader. Text is made when it is taken, which is while the next step computes; only where a stop string may end a
choice is it made at once, since the scheduler must know.

Invariant: what is taken, concatenated, does not depend on when it was taken.
"""

from __future__ import annotations

import asyncio

from service.engine.batch import PromptLogprob, SampledToken
from service.engine.request import ChoiceAdvanced, RequestKey, RequestStarted
from service.errors import LooseleafError
from service.messages import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Started,
    TokenLogprob,
    TopToken,
    Usage,
)
from service.text import TextStream, Tokenizer


class RequestStream:
    """One request's pending events. The engine pushes and ends it; one consumer takes.

    `echo`: the prompt's text for `Started`, None unless asked for. `created`: when the request arrived, in the engine's time.
    """

    def __init__(
        self,
        request: GenerateRequest,
        key: RequestKey,
        prompt_token_ids: tuple[int, ...],
        tokenizer: Tokenizer,
        *,
        created: float,
        echo: str | None = None,
    ) -> None:
        self.request = request
        self.key = key
        self.prompt_token_ids = prompt_token_ids
        self.created = created
        self.first_token: float | None = None
        self.cached_tokens = 0
        self.unread_since: float | None = None
        self.is_eager = bool(request.sampling.stop)
        self._tokenizer = tokenizer
        self._echo = echo
        self._choices: dict[int, _Choice] = {}
        self._started: Started | None = None
        self._usage: Usage | None = None
        self._is_taken = False
        self._error: LooseleafError | None = None
        self._news = asyncio.Event()

    # ── The engine's side ────────────────────────────────────────────────────────────────────────

    def start(self, event: RequestStarted, now: float) -> None:
        """Note that the request was admitted."""
        self.cached_tokens = event.cached_tokens
        self._started = Started(
            request_id=self.request.request_id,
            prompt_token_ids=self.prompt_token_ids,
            cached_tokens=event.cached_tokens,
            prompt_text=self._echo,
            prompt_logprobs=self._prompt_logprobs(event.prompt_logprobs),
        )
        self._wake(now)

    def push(self, event: ChoiceAdvanced, now: float) -> bool:
        """Take a choice's new token; say whether its text has ended the choice although the core has not."""
        choice = self._choices.get(event.index)
        if choice is None:
            choice = _Choice(event.index, self._tokenizer, self.request.sampling, self.prompt_token_ids)
            self._choices[event.index] = choice
        if choice.finish_reason is not None:
            return False  # a stop string ended it: what the same step gave behind that is not part of the answer
        if event.token is not None:
            choice.unread.append(event.token)
            choice.num_tokens += 1
            if self.first_token is None:
                self.first_token = now
        choice.finish_reason = event.finish_reason
        choice.stop_reason = event.stop_reason
        if self.is_eager:
            choice.read()
        self._wake(now)
        return choice.finish_reason is not None and event.finish_reason is None

    def finish(self, now: float) -> None:
        """Note that every choice has its finish reason."""
        self._usage = Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.cached_tokens,
        )
        self._wake(now)

    def fail(self, error: LooseleafError) -> None:
        """End the stream with `error`; what was pending is dropped."""
        self._error = error
        self._news.set()

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """The finish reason of each choice that has one, by index."""
        ordered = sorted(self._choices.items())
        return [choice.finish_reason for _, choice in ordered if choice.finish_reason is not None]

    # ── The consumer's side ──────────────────────────────────────────────────────────────────────

    @property
    def is_over(self) -> bool:
        """Whether `Finished` has been taken."""
        return self._is_taken

    async def take(self) -> list[Event]:
        """Wait for news and return all of it, at least one event; raises the error that ended the request."""
        while True:
            await self._news.wait()
            self._news.clear()
            self.unread_since = None
            if self._error is not None:
                raise self._error
            if events := self._take():
                return events

    def _take(self) -> list[Event]:
        events: list[Event] = []
        if self._started is not None:
            events.append(self._started)
            self._started = None
        wants_logprobs = self.request.sampling.logprobs is not None
        for choice in self._choices.values():
            if choice.has_news:
                choice.read()
                events.append(choice.take(wants_logprobs))
        if self._usage is not None:
            events.append(Finished(usage=self._usage))
            self._is_taken = True
        return events

    def _wake(self, now: float) -> None:
        if self.unread_since is None:
            self.unread_since = now
        self._news.set()

    def _prompt_logprobs(self, logprobs: tuple[PromptLogprob, ...] | None) -> tuple[TokenLogprob, ...] | None:
        if logprobs is None:
            return None
        tokenizer, first = self._tokenizer, self.prompt_token_ids[0]
        nothing_before = TokenLogprob(
            token_id=first, text=tokenizer.token_text(first), raw=tokenizer.token_bytes(first), logprob=None
        )
        return (nothing_before, *(_token_logprob(tokenizer, entry) for entry in logprobs))


class _Choice:
    """One choice: its text, and what has not been taken yet."""

    __slots__ = (
        "_before_stops",
        "_sampling",
        "_stream",
        "_tokenizer",
        "finish_reason",
        "index",
        "is_taken",
        "num_tokens",
        "read_tokens",
        "stop_reason",
        "text",
        "unread",
    )

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams, prompt: tuple[int, ...]) -> None:
        self.index = index
        self.num_tokens = 0
        self.unread: list[SampledToken] = []  # not turned into text yet
        self.read_tokens: list[SampledToken] = []  # of the next delta
        self.text = ""  # of the next delta
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.is_taken = False  # the delta with the finish reason is out
        self._tokenizer = tokenizer
        self._sampling = sampling
        # Stop strings count only behind the first min_tokens tokens. Until then the ids are kept, as the context of the text after.
        self._before_stops = list(prompt) if sampling.stop and sampling.min_tokens else None
        self._stream = self._new_stream(prompt, has_stops=self._before_stops is None)

    @property
    def has_news(self) -> bool:
        return bool(self.unread or self.read_tokens) or (self.finish_reason is not None and not self.is_taken)

    def read(self) -> None:
        """Turn the unread tokens into text; may find that a stop string has ended the choice."""
        if not self.unread and (self.finish_reason is None or self.is_taken):
            return
        ids = [token.token_id for token in self.unread]
        if ids and self.finish_reason == "stop" and not self._shows_stop_token():
            ids.pop()  # the token that ended the choice is not part of its text
        self.text += self._stream.push(ids).text
        self.read_tokens += self.unread
        self.unread = []
        if self._before_stops is not None:  # such a choice is read token by token
            self._before_stops += ids
            if self.num_tokens >= self._sampling.min_tokens and self.finish_reason is None:
                self._stream = self._new_stream(self._before_stops, has_stops=True)
                self._before_stops = None
        if self._stream.stopped_by is None and self.finish_reason is not None:
            self.text += self._stream.finish()
        if self._stream.stopped_by is not None:
            self.finish_reason = "stop"
            self.stop_reason = self._stream.stopped_by

    def take(self, wants_logprobs: bool) -> Delta:
        """Return everything read as one delta."""
        tokens, self.read_tokens = self.read_tokens, []
        text, self.text = self.text, ""
        self.is_taken = self.finish_reason is not None
        return Delta(
            index=self.index,
            text=text,
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=tuple(_token_logprob(self._tokenizer, token) for token in tokens) if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _shows_stop_token(self) -> bool:
        return self.stop_reason is not None and self._sampling.include_stop_str_in_output

    def _new_stream(self, context: tuple[int, ...] | list[int], *, has_stops: bool) -> TextStream:
        return self._tokenizer.new_stream(
            context,
            skip_special_tokens=self._sampling.skip_special_tokens,
            stop=self._sampling.stop if has_stops else (),
            include_stop=self._sampling.include_stop_str_in_output,
        )


def _token_logprob(tokenizer: Tokenizer, token: SampledToken | PromptLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=token.token_id,
        text=tokenizer.token_text(token.token_id),
        raw=tokenizer.token_bytes(token.token_id),
        logprob=token.logprob,
        top=tuple(
            TopToken(
                token_id=token_id,
                text=tokenizer.token_text(token_id),
                raw=tokenizer.token_bytes(token_id),
                logprob=logprob,
            )
            for token_id, logprob in token.top
        ),
    )
