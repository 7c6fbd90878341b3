"""Verifies drafts: a decode that carries k guesses is sampled as k + 1 decodes of one token each, and the samples are cut where a guess failed.

The network computes such an entry as a chunk of its sequence, or as decodes that share one block table (all keys of a layer are stored
before any row of it attends, and each row's length hides those behind it). The sampler sees ordinary decodes and nothing else. So a
verified draft is as exact as a chunk is beside single steps, and a decode beside others.

A sample is a function of (logits, seed, position), so no rejection sampling is needed: the token drawn at a position is the one that
would have been drawn without the guess, and the guess merely turns out to equal it or not (see ADR 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from msgspec.structs import replace

from service.engine.batch import EntryOutput, StepEntry


def unfold(entries: Sequence[StepEntry]) -> Sequence[StepEntry]:
    """Return `entries` with one decode per row where an entry has drafts: the known token first, then each draft."""
    if not any(entry.num_drafts for entry in entries):
        return entries
    return [row for entry in entries for row in _rows(entry)]


def fold(entries: Sequence[StepEntry], outputs: Sequence[EntryOutput]) -> tuple[EntryOutput, ...]:
    """Return an output for each of `entries` from those of its rows, which are `outputs` in the order of `unfold`."""
    rows = iter(outputs)
    return tuple(_joined(entry, [next(rows) for _ in range(1 + entry.num_drafts)]) for entry in entries)


def row_starts(rows: Sequence[StepEntry]) -> list[int]:
    """Return the place of each row's first token among the tokens of the step, and their number at last; the same as for the entries."""
    return list(accumulate((len(row.token_ids) for row in rows), initial=0))


def _rows(entry: StepEntry) -> Iterator[StepEntry]:
    if not entry.num_drafts:
        yield entry
        return
    output = entry.output_token_ids
    for index, token_id in enumerate(entry.token_ids):
        yield replace(
            entry,
            token_ids=(token_id,),
            start=entry.start + index,
            num_drafts=0,
            num_output_tokens=entry.num_output_tokens + index,
            output_token_ids=None if output is None else output + entry.token_ids[1 : 1 + index],
        )


def _joined(entry: StepEntry, rows: Sequence[EntryOutput]) -> EntryOutput:
    first = rows[0]
    if len(rows) == 1 or first.error is not None:
        return first
    samples = list(first.samples)
    for draft, row in zip(entry.token_ids[1:], rows[1:], strict=True):
        # A fault behind a confirmed draft is not reported yet: the next step computes that token again and meets it.
        if samples[-1].token_id != draft or row.error is not None:
            break
        samples += row.samples
    return EntryOutput(sequence_id=entry.sequence_id, samples=tuple(samples))
