"""Decides which tokens are computed next. Knows counts and blocks, never tensors, text or time (time is an argument).

Invariant: the tokens of a step never exceed the budget, and every admitted sequence can run to its end alone. The budget is `token_budget`
where a stream waits for its next token, and `prefill_budget` where none does: a larger step serves prompts sooner, and holds nobody up but
those who arrive while it runs.

Policy, in the order in which `schedule` applies it. "Before" is by rank: priority (lower first), then arrival, then choice.

1. *Urgency.* If the first waiting sequence is more urgent than the last running one and has no room (slots or blocks), the last ones of
   lesser priority are preempted, provided that this really makes room.
2. *Decodes.* Every running sequence gets a slot for its next token. Where the pool is empty the last running one is preempted by
   recompute, so an older sequence is never preempted for a younger one of its priority. The number of running sequences never exceeds
   the budget, so that all decodes fit into one step.
3. *Prefill.* The rest of the budget goes to prompts. While several wait, those longer than `long_prefill_share` of it share that part,
   first come first served, and the short ones take the other part, so that a short prompt never waits for the whole of a long one.
   What is left over goes to the long ones again: the cap costs nothing. Once either part holds `saturating_tokens`, which keep the
   processor busy, it takes no further prompt, unless that is a long one and before those under way: more at once would not be computed
   sooner, and the first would wait for the last.
4. *Admission* takes the blocks for all tokens a sequence has, in one step with its cache hits, if the pool then still has headroom:
   4^k blocks of growth for it and for each running sequence, where k counts its preemptions (never more than they can use). So each
   preemption makes the next less likely, and after log4(blocks of a sequence) of them it comes back only when all can run to their
   end: equal requests cannot preempt each other for ever. A sequence alone needs no headroom.
5. *Awaiting.* A waiting sequence whose first uncached block is being computed by a running one before it is held back until that
   block is there: what many prompts begin with is computed once. It never waits for one that comes after it, nor for one that was
   preempted, aborted or failed, so what it waits for gets its tokens before it would itself. Until then it counts as without room.
6. *Passing.* When the first waiting sequence lacks room, smaller ones behind it may pass: freely until PASS_LIMIT have passed or it has
   waited PASS_AGE_S; after that only those that fit beside it in the pool at their largest, so that they cannot delay it beyond the end
   of the sequences that run before it.
7. *Speculation.* What is then left of the budget and of the pool's free blocks may go to drafts: guessed tokens behind a decode's own,
   whose slots are given back when the guess was wrong. They never preempt, delay or outbid anything else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from typing import NamedTuple

from allocator import AllocatorError, BlockPool, Match, OutOfBlocks, QuotaExceeded, RefCountError, StaleBlock
from service.config import SchedulerConfig
from service.engine.prefixes import Prefixes
from service.engine.request import Rank, Sequence
from service.engine.speculation import Speculation

PASS_LIMIT = 16  # sequences
PASS_AGE_S = 2.0  # seconds
SCAN_LIMIT = 32  # waiting sequences that cannot be admitted yet and that one step looks at
HEADROOM_BASE = 4  # blocks; to the power of the number of preemptions


class Grant(NamedTuple):
    """The next `num_tokens` tokens of a sequence are computed in this step."""

    sequence: Sequence
    num_tokens: int


class Plan(NamedTuple):
    """What a step does: grants (decodes first) and the block copies that precede its writes."""

    grants: list[Grant]
    copies: list[tuple[int, int]]


class Scheduler:
    """Two ordered lists, of the sequences that hold blocks and of those that wait for some."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, prefixes: Prefixes) -> None:
        self._budget = config.token_budget
        self._prefill_budget = max(config.token_budget, config.prefill_budget or 0)
        self._long_share = config.long_prefill_share
        self._saturation = config.saturating_tokens or self._prefill_budget
        self._pool = pool
        self._prefixes = prefixes
        self.max_running = min(config.max_num_seqs, config.token_budget)
        self.running: list[Sequence] = []  # both sorted by rank
        self.waiting: list[Sequence] = []
        self.speculation = Speculation(config) if config.speculation == "ngram" else None
        self.num_unstarted = 0  # waiting sequences of requests that were never admitted
        self.num_preemptions = 0
        self._is_preemption_due = False  # a running sequence was refused a block while a step was in flight
        self.num_awaiting = 0  # waiting sequences that the last step held back for blocks being computed

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence without blocks wait for its turn."""
        insort(self.waiting, sequence, key=_rank)
        self.num_unstarted += sequence.request.cached_tokens is None

    def join(self, sequence: Sequence) -> None:
        """Let a freshly forked choice, whose room its leader had reserved, run."""
        insort(self.running, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is; its blocks are the caller's business."""
        if _discard(self.waiting, sequence):
            self.num_unstarted -= sequence.request.cached_tokens is None
        else:
            _discard(self.running, sequence)

    def schedule(self, now: float, *, is_ahead: bool = False) -> Plan | None:
        """Choose the tokens of the next step and reserve their slots.

        `is_ahead`: another step is in flight, so its blocks cannot be taken away and its samples are not known. None then says that
        the next step needs one or the other, and that nothing has changed.
        """
        if is_ahead and (self._is_preemption_due or self._would_draft()):
            return None
        self._is_preemption_due = False
        if not self._make_room_for_urgent(may_preempt=not is_ahead):
            return None
        plan = self._reserve_decodes(may_preempt=not is_ahead)
        # Also a stream that was refused a block and misses this step waits for its end.
        is_waited_for = any(sequence.num_remaining == 1 for sequence in self.running)
        budget = self._budget if is_waited_for else self._prefill_budget
        plan.grants.extend(self._prefill(budget - len(plan.grants), now, plan.copies))
        if self.speculation is not None and not is_ahead:
            self._add_drafts(self.speculation, plan.grants, plan.copies)
        return plan

    # ── Running sequences ────────────────────────────────────────────────────────────────────────

    def _reserve_decodes(self, may_preempt: bool) -> Plan:
        """Give each running sequence slots for the tokens that it has got, and grant those that lack one token that one."""
        grants: list[Grant] = []
        copies: list[tuple[int, int]] = []
        position = 0
        while position < len(self.running):  # preemption shortens the list from its end, or here
            sequence = self.running[position]
            missing = sequence.num_expected - sequence.table.num_tokens
            try:
                if missing > 0:
                    copies += sequence.table.append(missing).copies
            except (OutOfBlocks, RefCountError, StaleBlock) as refusal:
                if may_preempt:
                    self._preempt(self._victim(sequence, refusal))
                else:
                    self._is_preemption_due = (
                        True  # it misses this step; the next one waits until blocks may be taken away
                    )
                    position += 1
            else:
                if sequence.num_remaining == 1:
                    grants.append(Grant(sequence, 1))
                position += 1
        return Plan(grants, copies)

    def _victim(self, sequence: Sequence, refusal: AllocatorError) -> Sequence:
        """Choose whom to preempt when `sequence` was refused a block: no one before it."""
        if isinstance(refusal, QuotaExceeded):
            # Blocks are free, but not for this tenant: only its own sequences can make room.
            namespace = sequence.request.namespace
            return next(s for s in reversed(self.running) if s.request.namespace == namespace)
        if isinstance(refusal, OutOfBlocks):
            return self.running[-1]
        # The books deny it a block it believes to hold. Giving all back settles the dispute (what is disputed goes into
        # quarantine), and recomputing costs it time and nobody else anything.
        return sequence

    def _preempt(self, victim: Sequence) -> None:
        """Take all blocks away, tail first; the prefix cache gives most of them back unless they are needed."""
        self.running.remove(victim)
        victim.table.release()
        victim.num_computed = victim.num_scheduled = 0
        victim.num_published = 0
        victim.num_preemptions += 1
        victim.request.num_preemptions += 1
        self.num_preemptions += 1
        self.enqueue(victim)

    def _make_room_for_urgent(self, may_preempt: bool) -> bool:
        """Preempt for the first waiting sequence where that helps it; say False where it would help and is not allowed."""
        if not self.waiting or not self.running:
            return True
        head = self.waiting[0]
        lesser = [s for s in self.running if s.request.priority > head.request.priority]
        if not lesser or self._prefixes.is_awaiting(head, self._prefixes.computing(self.running)):
            return True  # what is computed for it now is worth more than the room it would need without
        if self._has_room(head, self._prefixes.match(head, "whole")) or not self._would_have_room(head, lesser):
            return True
        while may_preempt and lesser and not self._has_room(head, self._prefixes.match(head, "whole")):
            self._preempt(lesser.pop())
        return may_preempt

    def _would_have_room(self, head: Sequence, lesser: list[Sequence]) -> bool:
        """Say whether preempting all of `lesser` lets `head` in; preempting some for nothing would be a waste."""
        staying = [s for s in self.running if s.request.priority <= head.request.priority]
        if head.num_slots + sum(s.num_slots for s in staying) > self.max_running:
            return False
        pool = self._pool
        held = Counter(block for s in lesser for block in s.table.block_ids)
        reclaimed = sum(pool.ref_count(block) == count for block, count in held.items())
        kept_hits = sum(pool.ref_count(block) > held[block] for block in self._prefixes.match(head, "whole").block_ids)
        needed = -(-head.num_tokens // pool.block_size) - kept_hits
        return needed + self._headroom(head, staying) <= pool.num_free + reclaimed

    # ── Prefill and admission ────────────────────────────────────────────────────────────────────

    def _prefill(self, left: int, now: float, copies: list[tuple[int, int]]) -> list[Grant]:
        """Share `left` tokens among running and waiting sequences with more than one token to compute; adds to `copies`."""
        prefills = [sequence for sequence in self.running if sequence.num_remaining > 1]
        is_contended = len(prefills) + len(self.waiting) > 1
        # Under contention a token is always left for another one.
        cap = max(1, min(int(self._long_share * left), left - (self._long_share < 1.0))) if is_contended else left
        long_left = cap
        num_short = 0  # tokens of prompts up to `cap`
        first_long: Rank | None = None  # of the longer ones that have tokens
        chunks: dict[Sequence, int] = {}

        def grant(sequence: Sequence) -> None:
            nonlocal left, long_left, num_short, first_long
            chunk = min(sequence.num_remaining, left)
            if sequence.num_remaining > cap:
                chunk = min(chunk, max(1, long_left))
                long_left -= chunk
                first_long = sequence.rank if first_long is None else min(first_long, sequence.rank)
            else:
                num_short += chunk
            if chunk:
                chunks[sequence] = chunk
                left -= chunk

        for sequence in sorted(prefills, key=lambda s: s.num_remaining <= cap):  # long ones first, else by rank
            grant(sequence)
        blocked: Sequence | None = None
        num_passed_by = self.num_awaiting = 0
        position = 0
        computing = self._prefixes.computing(self.running)
        while left and num_short < self._saturation and position < len(self.waiting) and num_passed_by < SCAN_LIMIT:
            if self._slots_used() >= self.max_running:
                break
            sequence = self.waiting[position]
            is_awaiting = self._prefixes.is_awaiting(sequence, computing)
            if not is_awaiting and (blocked is None or self._may_pass(sequence, blocked, now)):
                match = self._prefixes.match(sequence, "partial")
                is_behind_long = (
                    first_long is not None and sequence.rank > first_long and cap - long_left >= self._saturation
                )
                if is_behind_long and sequence.num_tokens - match.num_tokens > cap:
                    num_passed_by += 1
                    position += 1
                    continue
                if self._admit(position, match, copies):
                    grant(sequence)
                    computing.append(sequence)
                    if blocked is not None:
                        blocked.request.num_passed += 1
                    continue
            if blocked is None:
                blocked = sequence
                if sequence.request.blocked_since is None:
                    sequence.request.blocked_since = now
            self.num_awaiting += is_awaiting
            num_passed_by += 1
            position += 1
        for sequence, chunk in chunks.items():
            extra = min(sequence.num_remaining - chunk, left)
            chunks[sequence] += extra
            left -= extra
        # A prompt with one token to compute (all others cached) is a decode in all but name.
        return [Grant(sequence, chunk) for sequence, chunk in chunks.items()]

    def _admit(self, position: int, match: Match, copies: list[tuple[int, int]]) -> bool:
        """Give the waiting sequence at `position`, whose cached blocks are `match`, all it needs and let it run, or change nothing."""
        sequence = self.waiting[position]
        if match.partial is not None and not self._has_room(sequence, match):
            match = match.whole_blocks()  # a partial hit holds a block more until it has been copied
        if not self._has_room(sequence, match):
            return False
        copies += sequence.table.adopt(match, sequence.num_tokens - match.num_tokens).copies
        sequence.num_computed = sequence.num_scheduled = match.num_tokens
        sequence.num_published = len(match.block_ids)
        request = sequence.request
        if request.cached_tokens is None:
            request.cached_tokens = match.num_tokens
            self.num_unstarted -= 1
        request.blocked_since = None
        request.num_passed = 0
        del self.waiting[position]
        insort(self.running, sequence, key=_rank)
        return True

    def _has_room(self, sequence: Sequence, match: Match) -> bool:
        if self._slots_used() + sequence.num_slots > self.max_running:
            return False
        needed = sequence.table.blocks_needed(sequence.num_tokens - match.num_tokens, match)
        free = self._pool.num_available(sequence.table.account)
        return needed <= free and needed + self._headroom(sequence, self.running) <= free

    def _headroom(self, sequence: Sequence, running: list[Sequence]) -> int:
        """Blocks that stay free beyond those `sequence` starts with, so that it is not preempted at once (again)."""
        if not running:
            return 0
        pool = self._pool
        each = int(HEADROOM_BASE**sequence.num_preemptions)
        own = sequence.num_blocks_at_end(pool) - -(-sequence.num_tokens // pool.block_size)
        return min(each * sequence.num_slots, own) + sum(min(each * s.num_slots, s.max_growth(pool)) for s in running)

    def _may_pass(self, sequence: Sequence, head: Sequence, now: float) -> bool:
        """Say whether `sequence` may be admitted although `head`, which comes before it, has no room yet."""
        waited_s = now - (now if head.request.blocked_since is None else head.request.blocked_since)
        if head.request.num_passed < PASS_LIMIT and waited_s < PASS_AGE_S:
            return True
        pool = self._pool
        beside = [s for s in self.running if s.rank > head.rank]
        beside.append(sequence)
        slots = head.num_slots + sum(s.num_slots for s in beside)
        blocks = -(-head.num_tokens // pool.block_size) + sum(s.num_blocks_at_end(pool) for s in beside)
        each = int(HEADROOM_BASE**head.num_preemptions)
        blocks += min(each * head.num_slots, head.num_blocks_at_end(pool) - -(-head.num_tokens // pool.block_size))
        return slots <= self.max_running and blocks <= pool.num_usable

    # ── Speculation ──────────────────────────────────────────────────────────────────────────────

    def _add_drafts(self, speculation: Speculation, grants: list[Grant], copies: list[tuple[int, int]]) -> None:
        """Give decodes drafts, and the drafts slots, from what is left of the budget and the pool."""
        left = self._budget - sum(grant.num_tokens for grant in grants)
        price = speculation.price(len(self.running))
        for sequence, _ in grants:
            if left <= 0 or price >= 1.0:
                return
            request = sequence.request
            # A leader that is about to be forked has several next tokens.
            if sequence.num_remaining != 1 or sequence.num_slots > 1 or request.lacks_prompt_logprobs:
                continue
            if sequence.drafter is None:
                sequence.drafter = speculation.new_drafter(len(request.prompt_token_ids))
            # The last token of a choice is never computed.
            room = min(left, request.max_total - sequence.num_tokens - 1)
            drafts = speculation.propose(sequence.drafter, sequence.tokens, room, price)
            if drafts:
                sequence.drafts = drafts[: self._reserve_drafts(sequence, len(drafts), copies)]
                left -= len(sequence.drafts)

    def _reserve_drafts(self, sequence: Sequence, wanted: int, copies: list[tuple[int, int]]) -> int:
        """Reserve up to `wanted` slots behind those of a sequence's known tokens; returns how many there are."""
        table = sequence.table
        for count in (wanted, min(wanted, table.num_tail_slots)):
            try:
                copies += table.append(count).copies
            except (OutOfBlocks, RefCountError, StaleBlock):
                continue
            return count
        return 0

    def _would_draft(self) -> bool:
        """Say whether the next step waits for the tokens being sampled, because drafts behind them are likely to pay."""
        if self.speculation is None:
            return False
        drafters = [sequence.drafter for sequence in self.running if sequence.num_output or sequence.num_foreseen]
        return self.speculation.should_wait(len(self.running), drafters)

    # ── Counts ───────────────────────────────────────────────────────────────────────────────────

    def _slots_used(self) -> int:
        return sum(sequence.num_slots for sequence in self.running)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _discard(ordered: list[Sequence], sequence: Sequence) -> bool:
    position = bisect_left(ordered, sequence.rank, key=_rank)
    if position == len(ordered) or ordered[position] is not sequence:
        return False
    del ordered[position]
    return True
