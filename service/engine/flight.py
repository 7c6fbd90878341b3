"""The steps that the runner has and that have not been applied, and what they hold. Knows no policy and no runner.

With two at a time the second is made while the first is computed, before its samples are known:

    loop thread:  plan n+1 ─┐        apply n · plan n+2 ─┐        apply n+1 …
    step thread:  ══ n ═════╪══════╪══ n+1 ══════════════╪══════╪══ n+2 ══ …

A sequence that is being sampled is taken to go on, and its entry in the second step stands for a token not known yet. If it has ended
after all, that entry's output is dropped.

Invariant: every block that an entry in flight names is held until its step has landed: it stays where it was in the sequence's table, or is
the source of a copy that a later step makes. So no block is freed or reused while a step may write to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import zip_longest

from allocator import BlockPool, InvariantBroken
from service.engine.batch import StepBatch
from service.engine.request import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step that was launched, and the sequence of each of its entries."""

    batch: StepBatch
    sequences: tuple[Sequence, ...]


class Flight:
    """The steps in flight, oldest first, and the sequences that have ended and are still in one of them."""

    def __init__(self, pool: BlockPool, max_steps: int) -> None:
        self._pool = pool
        self._max_steps = max_steps
        self._steps: deque[Step] = deque()
        self._leaving: set[Sequence] = set()  # their blocks follow when their last step has landed

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether another step may be made now: behind drafts it is not known where the next one begins."""
        if len(self._steps) >= self._max_steps:
            return False
        return not any(entry.num_drafts for step in self._steps for entry in step.batch.entries)

    def oldest(self, step_id: int) -> Step | None:
        """Return the oldest step if it is this one."""
        return self._steps[0] if self._steps and self._steps[0].batch.step_id == step_id else None

    def find(self, step_id: int) -> Step | None:
        """Return this step, None unless it is in flight."""
        return next((step for step in self._steps if step.batch.step_id == step_id), None)

    def launch(self, batch: StepBatch, sequences: tuple[Sequence, ...]) -> None:
        """Note that the runner gets a step; its entries belong to `sequences`, one each."""
        for sequence, entry in zip(sequences, batch.entries, strict=True):
            sequence.num_in_flight += 1
            sequence.num_scheduled += len(entry.token_ids) - entry.num_drafts
            sequence.num_foreseen += sequence.foresees(entry)
        self._steps.append(Step(batch, sequences))

    def land(self, step: Step) -> None:
        """Note that the runner is done with a step, for better or worse; its copies have been made."""
        self._steps.remove(step)
        self._pool.finish_copies(step.batch.copies)
        for sequence, entry in zip(step.sequences, step.batch.entries, strict=True):
            sequence.num_in_flight -= 1
            sequence.num_foreseen -= sequence.foresees(entry)

    def recall(self, step_id: int) -> bool:
        """Forget the newest step, which the runner has not begun, as if it had not been made; False where that cannot be.

        Slots that it reserved stay reserved for the same tokens. Copies would have to be remembered, so a step with some stays.
        """
        if len(self._steps) < 2 or self._steps[-1].batch.step_id != step_id or self._steps[-1].batch.copies:
            return False
        step = self._steps.pop()
        for sequence, entry in zip(step.sequences, step.batch.entries, strict=True):
            sequence.num_in_flight -= 1
            sequence.num_scheduled -= len(entry.token_ids)
            sequence.num_foreseen -= sequence.foresees(entry)
        return True

    def let_go(self, sequence: Sequence) -> None:
        """Give the blocks of a sequence that has ended back, now or with the step that lands last."""
        if sequence.num_in_flight:
            self._leaving.add(sequence)
        else:
            self._leaving.discard(sequence)
            sequence.table.release()

    def without_steps(self) -> list[Sequence]:
        """List the sequences that have ended and are in no step any more."""
        return [sequence for sequence in self._leaving if not sequence.num_in_flight]

    def tables(self) -> list[list[int]]:
        """List what sequences that have ended still hold."""
        return [list(sequence.table.block_ids) for sequence in self._leaving]

    def check(self) -> None:
        """Raise `InvariantBroken` where a step in flight and its sequences disagree."""
        copied = {src for step in self._steps for src, _ in step.batch.copies}  # held until that step has landed
        for step in self._steps:
            for sequence, entry in zip(step.sequences, step.batch.entries, strict=True):
                held = sequence.table.block_ids[: len(entry.block_ids)]
                lost = [
                    block for block, now in zip_longest(entry.block_ids, held) if block != now and block not in copied
                ]
                if lost:
                    raise InvariantBroken(
                        f"sequence {sequence.id} gave back {lost} before step {step.batch.step_id} landed"
                    )
        if any(not sequence.num_in_flight or not sequence.is_done for sequence in self._leaving):
            raise InvariantBroken("a sequence keeps blocks for a step that is not in flight")
