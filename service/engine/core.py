"""The engine without I/O: requests go in, steps come out, their results go in, events come out.

Time, randomness and execution belong to the caller, so any incident can be recorded and replayed. Where steps overlap (`flight.py`) two
are in flight at most, applied in order; requests may be added and aborted while they are.

Invariants: every request ends in exactly one `RequestFinished` or `RequestFailed`, or by `abort`; blocks touched by a step in flight are
released only when it has been applied; a block is published only when the KV of its last slot has been computed.
"""

from __future__ import annotations

from itertools import count

from msgspec import Struct

from allocator import BlockPool, BlockTable, Incident, InvariantBroken, Owner, PrefixCache
from service.config import SchedulerConfig
from service.engine.batch import EntryOutput, SampledToken, SequenceId, StepBatch, StepEntry, StepOutput
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
from service.errors import LooseleafError, NonFiniteLogits, QueueFull, StepFailed
from service.messages import FinishReason, PoolUsage, SamplingParams


class BadStepOutput(ValueError):
    """A runner's output does not belong to the step in flight; nothing has been applied."""


class CoreStats(Struct, frozen=True, kw_only=True):
    """Counters since the start, and what the core holds now. `running` and `waiting` count sequences."""

    running: int
    waiting: int
    pool: PoolUsage
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class EngineCore:
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
        self._requests: dict[RequestKey, Request] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._keys = count(1)
        self._sequence_ids = count(1)
        self._step_ids = count(1)
        self._flight = Flight(pool, 2 if config.overlap else 1)
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_usable = pool.num_usable  # what every request was measured against
        self._num_incidents = 0  # those already reported by `audit`

    @property
    def capacity(self) -> int:
        """Tokens that one choice may have, prompt included: the context length, or the pool if that is smaller."""
        return min(self._max_model_len, self._pool.num_usable * self._pool.block_size)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do and nothing under way."""
        return not self._requests and not self._flight

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

    # ── Steps ────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> StepBatch | None:
        """Return the next step, or None when there is nothing to compute before another step has been applied. `now` in seconds."""
        if not self._requests or not self._flight.has_room:
            return None
        self._pool.advance(now)
        plan = self._scheduler.schedule(now, is_ahead=len(self._flight) > 0)
        if plan is None or not plan.grants:
            if self._flight:
                return None
            # A request that nothing can be done for would hang its client: better a loud end.
            raise InvariantBroken(f"{len(self._requests)} requests live and no token of them can be computed")
        batch = StepBatch(
            step_id=next(self._step_ids),
            entries=tuple(sequence.entry(num_tokens, self._pool.block_size) for sequence, num_tokens in plan.grants),
            copies=tuple(plan.copies),
        )
        self._flight.launch(batch, tuple(sequence for sequence, _ in plan.grants))
        return batch

    def recall(self, step_id: int) -> bool:
        """Take back a step that was made ahead and that no runner has begun, to make a better one; False where that cannot be."""
        if not self._flight.recall(step_id):
            return False
        for sequence in self._flight.without_steps():
            self._let_go(sequence)
        return True

    def apply(self, output: StepOutput) -> list[CoreEvent]:
        """Take the results of the oldest step in flight. Raises `BadStepOutput` when they are not its results."""
        step = self._flight.oldest(output.step_id)
        if step is None:
            raise BadStepOutput(f"step {output.step_id} is not the oldest in flight")
        entries, outputs = step.batch.entries, output.outputs
        if len(outputs) != len(entries):
            raise BadStepOutput(f"{len(outputs)} outputs for {len(entries)} entries")
        for entry, result in zip(entries, outputs, strict=True):
            _require_match(entry, result)
        self._flight.land(step)
        self._num_steps += 1
        for sequence, entry, result in zip(step.sequences, entries, outputs, strict=True):
            # What stands behind a step that failed, or behind impossible numbers, was not computed either.
            if result.error is None and sequence.num_computed == entry.start:
                sequence.num_computed = entry.seq_len - entry.num_drafts
                self._prefixes.publish(sequence)
            if sequence.is_done:
                self._let_go(sequence)
        events: list[CoreEvent] = []
        self._note_time(step.batch, output.compute_s)
        for sequence, entry, result in zip(step.sequences, entries, outputs, strict=True):
            if not sequence.is_done:
                events += self._apply_entry(sequence, entry, result)
        return events

    def fail_step(self, step_id: int, error: LooseleafError) -> list[CoreEvent]:
        """Fail every request of a step in flight with `error`; all others go on. Late calls for other steps do nothing."""
        step = self._flight.find(step_id)
        if step is None:
            return []
        self._flight.land(step)
        self._num_steps += 1
        for sequence in step.sequences:
            if sequence.is_done:
                self._let_go(sequence)
        return [event for sequence in step.sequences for event in self._fail(sequence.request, error)]

    def fail_all(self, error: LooseleafError) -> list[CoreEvent]:
        """Fail every request with `error`; a step in flight keeps its blocks until it is applied or failed."""
        return [event for request in list(self._requests.values()) for event in self._fail(request, error)]

    def shed(self) -> list[CoreEvent]:
        """Fail the waiting requests that fitted the pool when they came and do not since the quarantine has shrunk it.

        Call it before `schedule`; O(1) while the pool keeps its size, O(waiting) until it is idle once after that.
        """
        pool = self._pool
        if pool.num_usable == self._num_usable:
            return []
        if not self._requests:
            self._num_usable = pool.num_usable  # whatever comes now is measured against the smaller pool
            return []
        events: list[CoreEvent] = []
        for sequence in list(self._scheduler.waiting):
            needed = -(-sequence.num_tokens // pool.block_size)
            if needed > (most := pool.num_obtainable(sequence.table.account)):
                message = f"this request needs {needed} blocks and the pool has only {most} left in service"
                events += self._fail(sequence.request, StepFailed(message))
        return events

    # ── Looking inside ───────────────────────────────────────────────────────────────────────────

    def stats(self) -> CoreStats:
        """Return the counters; O(1)."""
        pool, speculation = self._pool, self._scheduler.speculation
        return CoreStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pool=PoolUsage(
                total=pool.num_usable,
                used=pool.num_used,
                cached=pool.num_free_findable,
                free=pool.num_free - pool.num_free_findable,
                shared=pool.num_shared,
                quarantined=len(pool.quarantined),
                block_size=pool.block_size,
            ),
            steps=self._num_steps,
            preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            cached_prompt_tokens=self._num_cached_tokens,
            generated_tokens=self._num_generated_tokens,
            draft_tokens=speculation.num_drafted if speculation else 0,
            accepted_draft_tokens=speculation.num_accepted if speculation else 0,
        )

    def audit(self) -> list[Incident]:
        """Verify the pool's books; what is wrong is put into quarantine, never raised. Returns the incidents since the last call.

        O(blocks + references): call it when there is nothing else to do.
        """
        self._pool.audit()
        num_new = self._pool.num_incidents - self._num_incidents
        self._num_incidents = self._pool.num_incidents
        return list(self._pool.incidents)[-num_new:] if num_new else []

    def check(self) -> None:
        """Verify the bookkeeping; raise `InvariantBroken`. When idle every block must be free, cached or not."""
        self._pool.check([*(sequence.table.block_ids for sequence in self._sequences.values()), *self._flight.tables()])
        self._flight.check()
        waiting, running = self._scheduler.waiting, self._scheduler.running
        if {sequence.id for sequence in (*waiting, *running)} != set(self._sequences):
            raise InvariantBroken("the queues and the living sequences differ")
        if any(s.table.block_ids or s.num_scheduled or s.num_published or s.num_in_flight for s in waiting):
            raise InvariantBroken("a waiting sequence holds blocks, or believes that it does")
        if self._scheduler.num_unstarted != sum(s.request.cached_tokens is None for s in waiting):
            raise InvariantBroken("the count of requests never admitted is wrong")
        if self.is_idle and (self._pool.num_used or self._sequences):
            raise InvariantBroken(f"{self._pool.num_used} blocks are held and no request is left")

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def _next_sequence_id(self) -> SequenceId:
        return SequenceId(next(self._sequence_ids))

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

    def _note_time(self, batch: StepBatch, compute_s: float) -> None:
        """Tell the speculation what a step of only sampled tokens took; prefill chunks go through less of the model."""
        speculation = self._scheduler.speculation
        if speculation is not None and all(len(e.token_ids) == 1 + e.num_drafts for e in batch.entries):
            speculation.observe(batch.num_tokens, compute_s)

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


def _ended(sequence: Sequence, index: int) -> ChoiceAdvanced:
    return ChoiceAdvanced(
        key=sequence.request.key, sequence_id=sequence.id, index=index, token=None, finish_reason="length"
    )


def _require_match(entry: StepEntry, result: EntryOutput) -> None:
    if result.sequence_id != entry.sequence_id:
        raise BadStepOutput(
            f"an output for sequence {result.sequence_id} stands where {entry.sequence_id} was asked for"
        )
    if result.error is not None:
        return
    if entry.num_drafts:
        _require_verified(entry, result)
    elif len(result.samples) != len(entry.seeds):
        raise BadStepOutput(f"{len(result.samples)} samples for {len(entry.seeds)} seeds")
    if len(result.prompt_logprobs) != len(entry.prompt_logprob_targets or ()):
        raise BadStepOutput(f"{len(result.prompt_logprobs)} prompt logprobs where others were asked for")


def _require_verified(entry: StepEntry, result: EntryOutput) -> None:
    drafts = entry.token_ids[-entry.num_drafts :]
    if not 1 <= len(result.samples) <= 1 + len(drafts):
        raise BadStepOutput(f"{len(result.samples)} samples for {len(drafts)} drafts")
    confirmed = tuple(sample.token_id for sample in result.samples[:-1])
    if confirmed != drafts[: len(confirmed)]:
        raise BadStepOutput(f"samples {confirmed} are said to confirm the drafts {drafts}")
