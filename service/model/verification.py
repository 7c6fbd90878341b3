"""Verifies drafts: a decode that carries k guesses becomes k + 1 decodes of one token each, and their samples are cut where a guess failed.

The rows share one block table. All keys of a layer are stored before any row of it attends, so row j finds those of the guesses before
it, and its length hides those behind. Packing, attention and sampler see ordinary decodes and nothing else: what holds for a decode in
company, bit for bit, holds for a verified draft.

A sample is a function of (logits, seed, position), so no rejection sampling is needed: the token drawn at a position is the one that
would have been drawn without the guess, and the guess merely turns out to equal it or not (see ADR 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
