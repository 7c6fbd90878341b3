"""A comparison as a JSON file: written after every case, read again to go on after an interruption, and merged with others.

Invariant: a file on disk is always whole (it is replaced, never overwritten), and reading it gives what was written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from cases import Case
from results import PeerRun
from roofline import Roofline

# Where these differ, figures belong to different machines and must not meet in one table.
SAME_MACHINE = ("cpu", "cores", "flags", "memory_gb")


class DocumentError(Exception):
    """A file cannot be read, or does not fit the others; the message names it and says why."""


@dataclass(slots=True)
class Document:
    """Everything that a comparison found."""

    machine: dict[str, Any]
    seed: int
    max_tokens: int | None
    extra: dict[str, str]
    cases: list[Case]
    peers: list[str]  # in the order of the tables, the first is ours
    rooflines: list[Roofline] = field(default_factory=list)
    turns: list[PeerRun] = field(default_factory=list)

    def turn(self, peer: str, round_number: int) -> PeerRun:
        """Return a peer's turn of a round, adding an empty one if there is none."""
        for turn in self.turns:
            if (turn.peer, turn.round_number) == (peer, round_number):
                return turn
        self.turns.append(PeerRun(peer, round_number))
        return self.turns[-1]


def write(document: Document, path: Path) -> None:
    """Replace the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(dataclasses.asdict(document), indent=1) + "\n")
    part.replace(path)


def read(path: Path) -> Document:
    """Read a file that `write` wrote. Raises DocumentError for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except (OSError, msgspec.MsgspecError) as error:
        raise DocumentError(f"{path}: {error}") from error


def check_resumable(old: Document, new: Document, path: Path) -> None:
    """Raise DocumentError unless `new` may go on with `old`: the same prompts on the same machine."""
    for name in ("seed", "max_tokens", "extra", "cases"):
        if getattr(old, name) != getattr(new, name):
            raise DocumentError(f"{path} was begun with another {name}: {getattr(old, name)}")
    _check_machine(old, new, path)


def merge(documents: Sequence[tuple[Path, Document]]) -> Document:
    """Put the runs of several files into one; where two have the same case of a peer and round, the later file's counts.

    Raises DocumentError when they are of different machines, or sent other prompts.
    """
    (_, first), *others = documents
    merged = dataclasses.replace(
        first,
        cases=list(first.cases),
        peers=list(first.peers),
        rooflines=list(first.rooflines),
        turns=[dataclasses.replace(turn, cases=list(turn.cases)) for turn in first.turns],
    )
    for path, other in others:
        if (other.seed, other.max_tokens) != (first.seed, first.max_tokens):
            raise DocumentError(
                f"{path} has other prompts: seed {other.seed}, new tokens {other.max_tokens or 'as usual'}"
            )
        _check_machine(first, other, path)
        labels = {case.label for case in merged.cases}
        merged.cases += [case for case in other.cases if case.label not in labels]
        merged.peers += [peer for peer in other.peers if peer not in merged.peers]
        merged.rooflines += other.rooflines
        merged.extra = {**merged.extra, **other.extra}
        for turn in other.turns:
            _merge_turn(merged.turn(turn.peer, turn.round_number), turn)
    return merged


def _merge_turn(into: PeerRun, turn: PeerRun) -> None:
    """Add a later file's turn to an earlier one's of the same peer and round."""
    again = {run.label for run in turn.cases}
    into.cases = [run for run in into.cases if run.label not in again] + turn.cases
    into.failure = turn.failure
    if into.first_token_s is None:
        into.first_token_s = turn.first_token_s
    into.peak_rss_bytes = max(filter(None, (into.peak_rss_bytes, turn.peak_rss_bytes)), default=None)
    into.pss_bytes = max(filter(None, (into.pss_bytes, turn.pss_bytes)), default=None)
    into.idle_cores = turn.idle_cores if turn.idle_cores is not None else into.idle_cores


def _check_machine(one: Document, other: Document, path: Path) -> None:
    for name in SAME_MACHINE:
        if one.machine.get(name) != other.machine.get(name):
            raise DocumentError(f"{path} is of another machine: {name} {other.machine.get(name)}")
