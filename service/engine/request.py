"""A request, its sequences, and what the core reports about them.

A `Request` has `n` choices; each is a `Sequence` of tokens with a block table. Until the prompt has been computed only the first one, the
leader, exists: it samples one token for every choice at once and is then forked. There is no prefill or decode phase:
`num_computed < num_tokens` is all that the scheduler needs.

Invariant: tokens are only ever appended. A preempted sequence loses its blocks, never a token, and goes on as one with a longer prompt.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NewType

from msgspec import Struct

from allocator import BlockPool, BlockTable, Owner
from service.engine.batch import UNKNOWN_TOKEN, PromptLogprob, SampledToken, SequenceId, StepEntry
from service.engine.speculation import Drafter
from service.errors import ContextTooLong, InvalidRequest, LooseleafError
from service.messages import FinishReason, SamplingParams

RequestKey = NewType("RequestKey", int)  # made by the core: a client's own id may occur twice and is never a key

Rank = tuple[int, int, int]  # priority, arrival, choice: the smaller runs first and is preempted last


class Request:
    """What one call of `EngineCore.add` asked for, and how far it has come."""

    __slots__ = (
        "arrival",
        "blocked_since",
        "cached_tokens",
        "is_started",
        "key",
        "max_total",
        "namespace",
        "num_open",
        "num_output_tokens",
        "num_passed",
        "num_preemptions",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "sampling",
        "seeds",
        "sequences",
        "stop_ids",
    )

    def __init__(
        self,
        *,
        key: RequestKey,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        seeds: tuple[int, ...],
        eos_ids: tuple[int, ...],
        priority: int,
        namespace: bytes,
        max_total: int,
    ) -> None:
        self.key = key
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.seeds = seeds  # one for each choice
        # The end-of-sequence ids stop unless they are ignored; the user's own stop ids always do.
        self.stop_ids = tuple(dict.fromkeys((() if sampling.ignore_eos else eos_ids) + sampling.stop_token_ids))
        self.priority = priority
        self.arrival = int(key)
        self.namespace = namespace
        self.max_total = max_total  # tokens of a choice, prompt included
        self.sequences: list[Sequence] = []  # those that exist, the leader first
        self.num_open = sampling.n  # choices without an end
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.cached_tokens: int | None = None  # None until first admitted
        self.is_started = False  # `RequestStarted` has been reported
        self.prompt_logprobs: list[PromptLogprob] = []  # entry i is about prompt token i + 1
        self.blocked_since: float | None = None  # when it first stood at the head of the queue without room
        self.num_passed = 0  # sequences admitted past it since

    @property
    def max_output(self) -> int:
        """Tokens a choice may have at most."""
        return self.max_total - len(self.prompt_token_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt tokens must still be computed, cached or not, because their logprobs are asked for."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1


class Sequence:
    """The tokens of one choice and the blocks that hold their KV."""

    __slots__ = (
        "drafter",
        "drafts",
        "hashes",
        "id",
        "index",
        "is_done",
        "is_whole",
        "num_computed",
        "num_foreseen",
        "num_in_flight",
        "num_preemptions",
        "num_published",
        "num_scheduled",
        "num_slots",
        "rank",
        "request",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, sequence_id: SequenceId, index: int, table: BlockTable) -> None:
        self.request = request
        self.id = sequence_id
        self.index = index
        self.rank: Rank = (request.priority, request.arrival, index)
        self.table = table  # has slots for all tokens the scheduler has provided for, computed or not
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_computed = 0  # tokens whose KV is in the table's blocks
        self.num_scheduled = 0  # those, and the tokens that steps in flight compute
        self.num_foreseen = 0  # samples of steps in flight that the next step may build on before they are known
        self.num_in_flight = 0  # steps that read or write its blocks and have not been applied
        self.hashes: list[bytes] = []  # of the full blocks of `tokens`, extended when needed
        self.num_published = 0  # blocks that are findable, or that lost to an equal one
        self.num_preemptions = 0
        self.num_slots = 1  # running sequences it stands for: a leader keeps room for the choices it will fork
        self.drafter: Drafter | None = None  # what its drafts come from, once it had occasion for some
        self.drafts: tuple[int, ...] = ()  # guesses behind the last token, in the step being made or in flight
        self.is_done = False
        self.is_whole = False  # done, and all that it computed is good for others

    @property
    def num_tokens(self) -> int:
        """Tokens known, computed or not."""
        return len(self.tokens)

    @property
    def num_expected(self) -> int:
        """Tokens known or foreseen."""
        return len(self.tokens) + self.num_foreseen

    @property
    def num_remaining(self) -> int:
        """Tokens, known or foreseen, that no step computes yet."""
        return len(self.tokens) + self.num_foreseen - self.num_scheduled

    @property
    def num_output(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    def fork(self, sequence_id: SequenceId, index: int) -> Sequence:
        """Return another choice over the same computed tokens; blocks are shared, not copied."""
        owner = Owner("sequence", str(sequence_id), self.request.namespace)
        child = Sequence(self.request, sequence_id, index, self.table.fork(owner))
        child.tokens = self.tokens.copy()
        child.num_computed = child.num_scheduled = self.num_computed
        child.hashes = self.hashes.copy()
        child.num_published = self.num_published
        return child

    def entry(self, num_tokens: int, block_size: int) -> StepEntry:
        """Describe the next `num_tokens` tokens to the runner; the last one is sampled from, and so are the drafts behind it.

        At most one of them, the last, is only foreseen; then there are no drafts.
        """
        request, sampling, prompt = self.request, self.request.sampling, self.request.prompt_token_ids
        start, end = self.num_scheduled, self.num_scheduled + num_tokens
        is_sampled = end == self.num_expected and request.max_output > 0
        awaits_token = end > self.num_tokens
        behind = (UNKNOWN_TOKEN,) if awaits_token else self.drafts
        if not is_sampled:
            seeds: tuple[int, ...] = ()
        elif self.num_slots > 1:
            seeds = request.seeds
        else:
            seeds = (request.seeds[self.index],)
        has_history = is_sampled and sampling.wants_penalties
        return StepEntry(
            sequence_id=self.id,
            token_ids=(*self.tokens[start:end], *behind),
            start=start,
            block_ids=tuple(self.table.block_ids[: -(-(end + len(self.drafts)) // block_size)]),
            sampling=sampling,
            seeds=seeds,
            num_drafts=len(self.drafts),
            num_output_tokens=self.num_expected - len(prompt),
            eos_ids=request.stop_ids,
            prompt_token_ids=prompt if has_history else None,
            output_token_ids=tuple(self.tokens[len(prompt) :]) if has_history else None,
            prompt_logprob_targets=prompt[start + 1 : end + 1] if request.lacks_prompt_logprobs else None,
            awaits_token=awaits_token,
        )

    def foresees(self, entry: StepEntry) -> bool:
        """Say whether the token after `entry`, one of its own, can be computed before it is known.

        Not where several choices will be forked from it, nor where it is the last one anyway, nor behind drafts.
        """
        return len(entry.seeds) == 1 and not entry.num_drafts and entry.seq_len + 1 < self.request.max_total

    def num_blocks_at_end(self, pool: BlockPool) -> int:
        """Blocks that this sequence, with the choices still to be forked, can hold at most.

        The last token of a choice is sampled and never computed, so it needs no slot.
        """
        prompt = len(self.request.prompt_token_ids)
        num_slots = max(prompt, self.request.max_total - 1)
        of_one = -(-num_slots // pool.block_size)
        if self.num_slots == 1:
            return of_one
        shared = prompt // pool.block_size
        return shared + self.num_slots * (of_one - shared)

    def max_growth(self, pool: BlockPool) -> int:
        """Blocks that it may still take, the copy of a shared last block included."""
        table = self.table
        is_tail_shared = table.num_tail_slots > 0 and not pool.is_writable(table.block_ids[-1])
        return max(0, self.num_blocks_at_end(pool) - len(table.block_ids)) + is_tail_shared


def require_fit(
    num_prompt: int, sampling: SamplingParams, *, max_model_len: int, pool_tokens: int, max_choices: int
) -> None:
    """Refuse what can never be served: raises `InvalidRequest` or `ContextTooLong` with the field and the limit.

    Nothing is allocated per choice before this has passed.
    """
    if num_prompt == 0:
        raise InvalidRequest("the prompt must have at least one token", param="prompt")
    capacity = min(max_model_len, pool_tokens)
    if num_prompt >= capacity:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and at most {capacity - 1} fit (context {max_model_len} tokens, "
            f"pool {pool_tokens} tokens, one of them for the answer)",
            param="prompt",
        )
    room = max_model_len - num_prompt
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise ContextTooLong(
            f"max_tokens is {sampling.max_tokens} and after a prompt of {num_prompt} tokens the context of "
            f"{max_model_len} has room for {room}",
            param="max_tokens",
        )
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens} and must be at most max_tokens, {max_tokens}", param="min_tokens"
        )
    if sampling.n > max_choices:
        raise InvalidRequest(f"n is {sampling.n} and at most {max_choices} sequences run at once", param="n")


def choice_seed(seed: int, index: int) -> int:
    """Derive the 63-bit seed of choice `index`; choice 0 of n = 3 draws like the only one of n = 1."""
    digest = hashlib.blake2b(struct.pack("<qI", seed, index), digest_size=8, person=b"choice").digest()
    return int.from_bytes(digest, "little") >> 1


class RequestStarted(Struct, frozen=True, kw_only=True):
    """The request was admitted; reported before its first token, and with its prompt logprobs where asked for."""

    key: RequestKey
    cached_tokens: int
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None


class ChoiceAdvanced(Struct, frozen=True, kw_only=True):
    """A choice has a new token, or its end, or both; `token` is None only when no token at all was asked for."""

    key: RequestKey
    sequence_id: SequenceId
    index: int
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


class RequestFinished(Struct, frozen=True, kw_only=True):
    """Every choice has ended well; the key means nothing from now on."""

    key: RequestKey
    num_output_tokens: int
    num_preemptions: int


class RequestFailed(Struct, frozen=True, kw_only=True):
    """The request ended badly; the key means nothing from now on."""

    key: RequestKey
    error: LooseleafError
    num_preemptions: int


CoreEvent = RequestStarted | ChoiceAdvanced | RequestFinished | RequestFailed
