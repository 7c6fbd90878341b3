"""What a request and its answer are, whatever wire they travel on.

Every transport decodes its bytes into a `GenerateRequest` and encodes the `Event`s of the answer, so a parameter means the same over
HTTP, WebSocket and RPC. The bounds stand in the types: the wire decoder is the validator. Nothing here knows a tensor, a block or a socket.

Invariant: an answer is one `Started`, then any number of `Delta`s, and ends in exactly one `Finished` or one raised `LooseleafError`
(on a wire: one `Failed`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Literal, Protocol

from msgspec import UNSET, Meta, Struct, UnsetType

from service.errors import LooseleafError, error_classes

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_TEMPERATURE = 2.0

MAX_COUNT = 2**31 - 1  # of tokens and of token ids: what every tensor and counter further in can hold

FinishReason = Literal["stop", "length"]


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a choice ends; the bounds that need no tokenizer stand in the types.

    `temperature` 0 is greedy. `top_k` 0 and -1 both mean off. `seed` None draws one per request. `logprobs` None is off, k reports the
    chosen token and the k likeliest. `prompt_logprobs` likewise for the prompt's tokens. Penalties act on raw logits: presence and
    frequency on generated tokens, repetition on prompt and generated ones.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Meta(ge=0.0, le=MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = 0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=MAX_STOP_STRINGS)
    ] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_COUNT)], ...], Meta(max_length=256)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def wants_penalties(self) -> bool:
        """Whether the sampler needs the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class TextPart(Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """One piece of a message's content."""

    text: str


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. Parts are joined without a separator; null content is allowed for an assistant with tool calls."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | tuple[TextPart, ...] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: tuple[dict[str, object], ...] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One request for a generation: exactly one of `prompt` (text or token ids) and `messages` is given.

    `request_id` is the caller's own name for it: echoed and logged, never used as a key. A token-id prompt is never altered. A text
    prompt gets the tokenizer's BOS if `add_special_tokens`, and control-token strings in it become control tokens if `parse_special`
    (as Hugging Face tokenizers do). `echo_prompt` asks for `Started.prompt_text`. Lower `priority` runs first. `namespace` is the tenant
    that a trusted front end vouches for: cached blocks are found within it only.
    """

    request_id: str
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    add_special_tokens: bool = True
    parse_special: bool = True
    echo_prompt: bool = False
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    namespace: str = ""


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token with its natural-log probability over the raw logits (padding ids excluded) and the likeliest alternatives.

    `logprob` is None for the first prompt token, which nothing precedes. Impossible values are the floor -9999.0, never -inf.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TopToken, ...] = ()


class TopToken(Struct, frozen=True, kw_only=True):
    """One alternative of a `TokenLogprob`."""

    token_id: int
    text: str
    raw: bytes
    logprob: float


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of one request: the prompt once, every choice's completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Started(Struct, frozen=True, kw_only=True, tag_field="type", tag="started"):
    """The first event of every admitted request, sent before its first token."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int = 0
    prompt_text: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class Delta(Struct, frozen=True, kw_only=True, tag_field="type", tag="delta"):
    """New text of choice `index`; the last one of a choice carries `finish_reason`.

    `token_ids` are the tokens sampled since the last delta of this choice (their text may still be held back inside an incomplete
    character or a possible stop string). `stop_reason` is the stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def merge_deltas(deltas: Iterable[Delta]) -> Delta:
    """Join deltas of one choice, in order and at least one, into the one that says the same."""
    pieces = list(deltas)
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return Delta(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(logprobs) if any(piece.logprobs is not None for piece in pieces) else None,
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )


class Finished(Struct, frozen=True, kw_only=True, tag_field="type", tag="finished"):
    """The one good end of a request, after every choice had its `finish_reason`."""

    usage: Usage


class Failed(Struct, frozen=True, kw_only=True, tag_field="type", tag="failed"):
    """The one bad end of a request as it travels on a wire; in a process it is a raised `LooseleafError`."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False

    @classmethod
    def from_error(cls, error: LooseleafError) -> Failed:
        """Describe `error` for a wire."""
        return cls(code=error.code, message=error.message, param=error.param, retryable=error.retryable)

    def to_error(self) -> LooseleafError:
        """Return the exception that this message describes."""
        return error_classes().get(self.code, LooseleafError)(self.message, param=self.param)


Event = Started | Delta | Finished


class PoolUsage(Struct, frozen=True, kw_only=True):
    """The block pool at one moment, in blocks. used + cached + free = total; shared is a part of used, quarantined of none."""

    total: int
    used: int
    cached: int
    free: int
    shared: int
    quarantined: int = 0
    block_size: int


class EngineStats(Struct, frozen=True, kw_only=True):
    """A cheap snapshot of the engine, for the page, metrics and `stats` on every transport."""

    model: str
    backend: str
    dtype: str
    device: str
    max_model_len: int
    running: int
    waiting: int
    pool: PoolUsage
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    draft_tokens: int = 0  # guessed by speculation and computed
    accepted_draft_tokens: int = 0  # of those, right


class Health(Struct, frozen=True, kw_only=True):
    """`is_alive`: the engine can make progress. `is_ready`: it takes new requests (warm and not draining)."""

    is_alive: bool
    is_ready: bool
    reason: str = ""


class EngineClient(Protocol):
    """What a transport may ask of an engine, in this process or in another."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        """Run `request`; closing the iterator early aborts it and gives its blocks back.

        Raises `LooseleafError` at the first step of the iteration when the request is refused, later when it fails.
        """
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot without waiting for a step."""
        ...

    def health(self) -> Health:
        """Say whether the engine makes progress and takes requests."""
        ...
