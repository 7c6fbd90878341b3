"""The engine without I/O: requests go in, steps come out, their results go in, events come out.

Time, randomness and execution belong to the caller, so any incident can be recorded and replayed. Where steps overlap (`flight.py`) two
are in flight at most, applied in order; requests may be added and aborted while they are (`roster.py`).

Invariants: every request ends in exactly one `RequestFinished` or `RequestFailed`, or by `abort`; blocks touched by a step in flight are
released only when it has been applied; a block is published only when the KV of its last slot has been computed.
"""

from __future__ import annotations

from itertools import count

from msgspec import Struct

from allocator import BlockPool, Incident, InvariantBroken, PrefixCache
from service.config import SchedulerConfig
from service.engine.batch import EntryOutput, StepBatch, StepEntry, StepOutput
from service.engine.request import CoreEvent
from service.engine.roster import Roster
from service.errors import LooseleafError, StepFailed
from service.messages import PoolUsage


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


class EngineCore(Roster):
    """A roster of requests, and the steps that serve them. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        *,
        max_model_len: int,
    ) -> None:
        """`prefix_cache` None switches prefix caching off. `max_model_len`: tokens of a choice, prompt included."""
        super().__init__(config, pool, prefix_cache, max_model_len=max_model_len)
        self._step_ids = count(1)
        self._num_steps = 0
        self._num_usable = pool.num_usable  # what every request was measured against
        self._num_incidents = 0  # those already reported by `audit`

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do and nothing under way."""
        return not self._requests and not self._flight

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

    def _note_time(self, batch: StepBatch, compute_s: float) -> None:
        """Tell the speculation what a step of only sampled tokens took; prefill chunks go through less of the model."""
        speculation = self._scheduler.speculation
        if speculation is not None and all(len(e.token_ids) == 1 + e.num_drafts for e in batch.entries):
            speculation.observe(batch.num_tokens, compute_s)


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
