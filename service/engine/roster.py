"""Who lives: requests and their choices, what each has got, and how each ends. Knows no order and no time.

The half of the engine's core that speaks of requests; `core.py` is the half that speaks of steps.
Invariant: a request ends once, in `RequestFinished`, in `RequestFailed`, or silently by `abort`; its blocks go with it, or with the last step
in flight that touches them.
"""

from __future__ import annotations

from itertools import count

from allocator import BlockPool, BlockTable, Owner, PrefixCache
from service.config import SchedulerConfig
from service.engine.batch import EntryOutput, SampledToken, SequenceId, StepEntry
from service.engine.flight import Flight
from service.engine.prefixes import Prefixes
from service.engine.request import (
    ChoiceAdvanced,
    CoreEvent,
    Request,
    RequestFailed,
    RequestFinished,
    RequestKey,
    RequestStarted,
    Sequence,
    choice_seed,
    require_fit,
)
from service.engine.scheduler import Scheduler
from service.errors import LooseleafError, NonFiniteLogits, QueueFull
from service.messages import FinishReason, SamplingParams


class Roster:
    """Own every request, sequence and block. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        *,
        max_model_len: int,
    ) -> None:
        """`prefix_cache` None switches prefix caching off. `max_model_len`: tokens of a choice, prompt included."""
        self._config = config
        self._pool = pool
        self._prefixes = Prefixes(pool, prefix_cache)
        self._max_model_len = max_model_len
        self._scheduler = Scheduler(config, pool, self._prefixes)
        self._flight = Flight(pool, 2 if config.overlap else 1)
        self._requests: dict[RequestKey, Request] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._keys = count(1)
        self._sequence_ids = count(1)
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0

    @property
    def capacity(self) -> int:
        """Tokens that one choice may have, prompt included: the context length, or the pool if that is smaller."""
        return min(self._max_model_len, self._pool.num_usable * self._pool.block_size)

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        seed: int,
        eos_ids: tuple[int, ...] = (),
        priority: int = 0,
        namespace: str = "",
    ) -> RequestKey:
        """Queue a request; `seed` is used where `sampling.seed` is None, `namespace` is the tenant's identity.

        Raises `InvalidRequest` (empty prompt, `min_tokens` above `max_tokens`, more choices than run at once), `ContextTooLong`
        (prompt, or prompt and `max_tokens`, do not fit) and `QueueFull`. A pool smaller than the context ends a choice with "length".
        """
        num_prompt = len(prompt_token_ids)
        sequence_id = self._next_sequence_id()
        tenant = self._prefixes.namespace(namespace)
        table = BlockTable(self._pool, Owner("sequence", str(sequence_id), tenant))
        pool_tokens = self._pool.num_obtainable(table.account) * self._pool.block_size
        require_fit(
            num_prompt,
            sampling,
            max_model_len=self._max_model_len,
            pool_tokens=pool_tokens,
            max_choices=self._scheduler.max_running,
        )
        if self._scheduler.num_unstarted >= self._config.max_waiting:
            raise QueueFull(f"{self._config.max_waiting} requests are waiting already; try again later")
        max_output = min(self._max_model_len, pool_tokens) - num_prompt
        if sampling.max_tokens is not None:
            max_output = min(max_output, sampling.max_tokens)
        base_seed = seed if sampling.seed is None else sampling.seed
        request = Request(
            key=RequestKey(next(self._keys)),
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seeds=tuple(choice_seed(base_seed, index) for index in range(sampling.n)),
            eos_ids=eos_ids,
            priority=priority,
            namespace=tenant,
            max_total=num_prompt + max_output,
        )
        leader = Sequence(request, sequence_id, 0, table)
        leader.num_slots = sampling.n if max_output else 1
        request.sequences.append(leader)
        self._requests[request.key] = request
        self._sequences[leader.id] = leader
        self._scheduler.enqueue(leader)
        return request.key

    def abort(self, key: RequestKey) -> bool:
        """End a request without an event, in any state; say whether it still lived. An unknown key is no error."""
        request = self._requests.pop(key, None)
        if request is None:
            return False
        for sequence in request.sequences:
            self._retire(sequence)
        return True

    def finish_sequence(self, sequence_id: SequenceId) -> list[CoreEvent]:
        """End a choice because its text did (a stop string); a token in flight for it will be dropped.

        Returns `RequestFinished` if it was the last one. A choice that has already ended, or is unknown, is no error.
        """
        sequence = self._sequences.get(sequence_id)
        return [] if sequence is None else self._close_choices(sequence, 1)

    def fail_all(self, error: LooseleafError) -> list[CoreEvent]:
        """Fail every request with `error`; a step in flight keeps its blocks until it is applied or failed."""
        return [event for request in list(self._requests.values()) for event in self._fail(request, error)]

    # ── What they get ────────────────────────────────────────────────────────────────────────────

    def _apply_entry(self, sequence: Sequence, entry: StepEntry, result: EntryOutput) -> list[CoreEvent]:
        request = sequence.request
        if result.error is not None:
            return self._fail(request, NonFiniteLogits(result.error))
        if entry.prompt_logprob_targets is not None:
            # After a preemption or a cache hit part of a block is computed again; its logprobs are known.
            known = len(request.prompt_logprobs) - entry.start
            request.prompt_logprobs.extend(result.prompt_logprobs[known:])
        events: list[CoreEvent] = []
        if not request.is_started and not request.lacks_prompt_logprobs:
            events.append(self._start(request))
        if entry.num_drafts:
            events += self._take_verified(sequence, entry.num_drafts, result.samples)
        elif entry.seeds:
            events += self._take_samples(sequence, result.samples)
        elif request.max_output == 0 and sequence.num_computed == sequence.num_tokens:
            ends = [_ended(sequence, index) for index in range(request.sampling.n)]
            events += [*ends, *self._close_choices(sequence, request.sampling.n)]
        return events

    def _start(self, request: Request) -> RequestStarted:
        request.is_started = True
        cached_tokens = request.cached_tokens or 0
        self._num_prompt_tokens += len(request.prompt_token_ids)
        self._num_cached_tokens += cached_tokens
        wants_logprobs = request.sampling.prompt_logprobs is not None
        return RequestStarted(
            key=request.key,
            cached_tokens=cached_tokens,
            prompt_logprobs=tuple(request.prompt_logprobs) if wants_logprobs else None,
        )

    def _take_samples(self, leader: Sequence, samples: tuple[SampledToken, ...]) -> list[CoreEvent]:
        """Append one token to each choice, forking those that do not exist yet first."""
        choices = [leader]
        if leader.num_slots > 1:
            leader.num_slots = 1
            # All children are forked before any of them, or the leader, gets its token.
            for index in range(1, len(samples)):
                child = leader.fork(self._next_sequence_id(), index)
                self._sequences[child.id] = child
                leader.request.sequences.append(child)
                self._scheduler.join(child)
                choices.append(child)
        return [
            event
            for choice, sample in zip(choices, samples, strict=True)
            for event in self._take_sample(choice, sample)
        ]

    def _take_verified(self, sequence: Sequence, num_drafts: int, samples: tuple[SampledToken, ...]) -> list[CoreEvent]:
        """Append the drafts that were confirmed and the token behind them; what was reserved for the others is given back.

        A choice may end in the middle: what was confirmed behind its end is dropped.
        """
        sequence.drafts = ()
        events: list[CoreEvent] = []
        for index, sample in enumerate(samples):
            if index:
                sequence.num_computed += 1  # the sample before this one was a draft, so its KV is there
                sequence.num_scheduled += 1
                self._prefixes.publish(sequence)
            events += self._take_sample(sequence, sample)
            if sequence.is_done:
                break
        else:
            sequence.table.truncate(sequence.num_computed)
        speculation = self._scheduler.speculation
        if speculation is not None and sequence.drafter is not None:
            speculation.learn(sequence.drafter, num_drafts, len(samples) - 1)
        return events

    def _take_sample(self, sequence: Sequence, sample: SampledToken) -> list[CoreEvent]:
        request = sequence.request
        token_id = sample.token_id
        may_stop = sequence.num_output >= request.sampling.min_tokens
        sequence.tokens.append(token_id)
        request.num_output_tokens += 1
        self._num_generated_tokens += 1
        finish_reason: FinishReason | None = None
        stop_reason: int | None = None
        if may_stop and token_id in request.stop_ids:
            finish_reason = "stop"
            if token_id in request.sampling.stop_token_ids:
                stop_reason = token_id
        elif sequence.num_tokens >= request.max_total:
            finish_reason = "length"
        advanced = ChoiceAdvanced(
            key=request.key,
            sequence_id=sequence.id,
            index=sequence.index,
            token=sample,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        return [advanced] if finish_reason is None else [advanced, *self._close_choices(sequence, 1)]

    # ── How they end ─────────────────────────────────────────────────────────────────────────────

    def _close_choices(self, sequence: Sequence, num_choices: int) -> list[CoreEvent]:
        """Retire a sequence that ended well, and its request with the last one."""
        request = sequence.request
        sequence.is_whole = True
        self._retire(sequence)
        request.num_open -= num_choices
        if request.num_open:
            return []
        del self._requests[request.key]
        return [
            RequestFinished(
                key=request.key,
                num_output_tokens=request.num_output_tokens,
                num_preemptions=request.num_preemptions,
            )
        ]

    def _fail(self, request: Request, error: LooseleafError) -> list[CoreEvent]:
        if not self.abort(request.key):
            return []
        return [RequestFailed(key=request.key, error=error, num_preemptions=request.num_preemptions)]

    def _retire(self, sequence: Sequence) -> None:
        """Take a sequence out of every queue; its blocks follow now, or when no step in flight touches them any more."""
        if sequence.is_done:
            return
        sequence.is_done = True
        del self._sequences[sequence.id]
        self._scheduler.remove(sequence)
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.is_whole and not sequence.num_in_flight:
            self._prefixes.publish_tail(sequence)
        self._flight.let_go(sequence)

    def _next_sequence_id(self) -> SequenceId:
        return SequenceId(next(self._sequence_ids))


def _ended(sequence: Sequence, index: int) -> ChoiceAdvanced:
    return ChoiceAdvanced(
        key=sequence.request.key, sequence_id=sequence.id, index=index, token=None, finish_reason="length"
    )
