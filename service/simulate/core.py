"""The engine's core run on counts: it schedules, holds blocks and ends requests as ever, but nothing is computed.

The scheduler, the allocator and the ends of requests are the service's own; only the batch that a runner would get, and the check of
what it returned, are left out. What it adds is `fast_forward`, many steps at once through which only counters change.

Invariant: `fast_forward(n)` leaves exactly the state that n calls of `step` and `settle` would.
"""

from __future__ import annotations

from typing import NamedTuple

from allocator import BlockPool, BlockTable, InvariantBroken, PrefixCache
from service.config import SchedulerConfig
from service.engine.batch import SampledToken
from service.engine.core import EngineCore
from service.engine.request import CoreEvent, RequestFinished, RequestKey, RequestStarted, Sequence
from service.engine.scheduler import Grant
from service.messages import SamplingParams
from service.simulate.cost import Work


class Settled(NamedTuple):
    """What the end of a step brought."""

    started: list[RequestStarted]
    first_tokens: list[RequestKey]  # of these requests
    finished: list[RequestFinished]


class CountingCore(EngineCore):
    """An `EngineCore` whose requests have lengths and block names in place of tokens."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, prefix_cache: PrefixCache | None, *, max_model_len: int
    ) -> None:
        super().__init__(config, pool, prefix_cache, max_model_len=max_model_len)
        self._scheduler.speculation = None  # lengths say nothing of what could be guessed
        self._grants: list[Grant] | None = None
        self._is_quiet = False

    def add_counted(
        self,
        num_prompt: int,
        num_output: int,
        *,
        fill: int,
        hashes: list[bytes],
        priority: int = 0,
        namespace: str = "",
    ) -> RequestKey:
        """Queue a request of so many tokens. Raises like `add`.

        `hashes` name the first blocks of its prompt. `fill` is the token that all others are: give each request its own, 32 bits
        unsigned, and none of them shares a block that is not named.
        """
        key = self.add(
            (fill,) * num_prompt,
            SamplingParams(max_tokens=num_output, ignore_eos=True),
            seed=0,
            priority=priority,
            namespace=namespace,
        )
        self._requests[key].sequences[0].hashes = hashes
        self._is_quiet = False
        return key

    def step(self, now: float) -> Work | None:
        """Schedule the next step and say what it does; None when there is nothing to do. Then call `settle`."""
        if not self._requests:
            return None
        scheduler = self._scheduler
        plan = scheduler.schedule(now)
        if plan is None or not plan.grants:
            raise InvariantBroken(f"{len(self._requests)} requests live and no token of them can be computed")
        self._pool.finish_copies(plan.copies)
        self._grants = plan.grants
        num_tokens = num_context = num_pairs = 0
        for sequence, count in plan.grants:
            end = sequence.num_computed + count
            num_tokens += count
            num_context += end
            num_pairs += end if count == 1 else count * end - count * (count - 1) // 2
        # If every running sequence decodes, the next step is like this one; see `num_quiet_steps`. Whoever awaits a block may come in.
        self._is_quiet = num_tokens == len(plan.grants) == len(scheduler.running) and not scheduler.num_awaiting
        return Work(num_tokens, num_context, num_pairs)

    def settle(self) -> Settled:
        """End the step: every token is computed, and every sequence that can be sampled from gets one more."""
        grants, self._grants = self._grants, None
        assert grants is not None, "there is no step to settle"
        self._num_steps += 1
        events: list[CoreEvent] = []
        first_tokens = []
        for sequence, count in grants:
            sequence.num_computed += count
            sequence.num_scheduled = sequence.num_computed
            self._prefixes.publish(sequence)
            request = sequence.request
            if not request.is_started:
                events.append(self._start(request))
            if sequence.num_computed == len(sequence.tokens):
                if request.num_output_tokens == 0 < request.max_output:
                    first_tokens.append(request.key)
                self._sample(sequence, events)
            else:
                self._is_quiet = False  # a prompt of which one token was computed
        return self._sort_out(events, first_tokens)

    def num_quiet_steps(self) -> int:
        """Count the steps that will only move counters; the last of them may end requests, no other does.

        After a step in which every running sequence decoded, the next ones are like it until a request comes, one ends, or blocks run
        out: whoever waits was refused, and during such steps the pool only gets fuller (a block taken lowers
        the free ones by 1 and the headroom asked for by at most 1), the slots stay taken, and the right to pass others only lapses.
        """
        running, waiting = self._scheduler.running, self._scheduler.waiting
        # Whoever is more urgent than a running sequence may take its place as soon as that has grown enough blocks.
        if not self._is_quiet or (waiting and waiting[0].request.priority < running[-1].request.priority):
            return 0
        num_steps = min(sequence.request.max_total - len(sequence.tokens) for sequence in running)
        pool, block_size = self._pool, self._pool.block_size
        if len(running) * -(-num_steps // block_size) <= pool.num_free:
            return num_steps
        tails = [sequence.table.num_tail_slots for sequence in running]
        low, high = 0, num_steps
        while low < high:  # the most steps whose new blocks are free
            middle = (low + high + 1) // 2
            if sum(-((tail - middle) // block_size) for tail in tails if tail < middle) <= pool.num_free:
                low = middle
            else:
                high = middle - 1
        return low

    def decode_work(self) -> Work:
        """Say what the first of the quiet steps does; each further one reads one position more per sequence."""
        running = self._scheduler.running
        num_context = sum([len(sequence.tokens) for sequence in running])
        return Work(len(running), num_context, num_context)

    def fast_forward(self, num_steps: int) -> Settled:
        """Do that many quiet steps at once; `num_steps` is at most `num_quiet_steps()`."""
        events: list[CoreEvent] = []
        running = list(self._scheduler.running)
        for sequence in running:  # all take their blocks before any gives some back
            growth = sequence.table.append(num_steps)
            assert not growth.copies, "a running sequence shares its last block"
        for sequence in running:
            if num_steps > 1:
                self._advance(sequence, num_steps - 1)
            sequence.num_computed += num_steps
            sequence.num_scheduled = sequence.num_computed
            self._prefixes.publish(sequence)
            self._sample(sequence, events)
        self._num_steps += num_steps
        return self._sort_out(events, [])

    @property
    def num_running(self) -> int:
        """Count the sequences that hold blocks."""
        return len(self._scheduler.running)

    def running_tables(self) -> list[BlockTable]:
        """The tables of all running sequences, for measuring what their blocks hold."""
        return [sequence.table for sequence in self._scheduler.running]

    def _sample(self, sequence: Sequence, events: list[CoreEvent]) -> None:
        """Give a computed sequence its next token, and its end where that is the last."""
        if len(sequence.tokens) + 1 < sequence.request.max_total:
            self._advance(sequence, 1)
        elif sequence.request.max_output:
            events += self._take_sample(sequence, SampledToken(token_id=sequence.tokens[-1]))
        else:
            events += self._close_choices(sequence, 1)

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Append tokens of which none is the last."""
        tokens = sequence.tokens
        tokens.extend([tokens[-1]] * num_tokens)
        sequence.request.num_output_tokens += num_tokens
        self._num_generated_tokens += num_tokens

    def _sort_out(self, events: list[CoreEvent], first_tokens: list[RequestKey]) -> Settled:
        settled = Settled([], first_tokens, [])
        for event in events:
            if isinstance(event, RequestStarted):
                settled.started.append(event)
            elif isinstance(event, RequestFinished):
                settled.finished.append(event)
                self._is_quiet = False
        return settled
