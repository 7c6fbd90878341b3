"""How far ahead each of our formats is of each peer, and of the best of them.

Invariant: as everywhere, a ratio compares runs of one round; the best peer of a round is the best of that round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from report import number, table
from results import CaseRun, PeerRun, goodput, median, output_speed, span
from roofline import FORMATS

OURS = "looseleaf"  # what our rows' names begin with


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a run, None where it has none, and whether more of it is better."""

    name: str
    value: Callable[[CaseRun], float | None]
    more_is_better: bool = True

    def ahead(self, ours: float, theirs: Sequence[float]) -> float:
        """Return how many times better `ours` is than the best of `theirs`."""
        return ours / max(theirs) if self.more_is_better else min(theirs) / ours


SPEED = Measure("out tok/s", output_speed)
TTFT = Measure("TTFT p50", lambda run: run.summary.ttft_p50_ms, more_is_better=False)
GOODPUT = Measure("goodput", goodput)


def ratio_table(label: str, measure: Measure, peers: Sequence[str], runs: Sequence[PeerRun]) -> str | None:
    """Lay out the ratios of a case; None when there is nothing to compare.

    A row for each peer, then for the best peer with 16-bit weights and the best of all; a column for each of ours.
    """
    ours = [peer for peer in peers if peer.startswith(OURS)]
    theirs = [peer for peer in peers if not peer.startswith(OURS)]
    rivals = {peer: [peer] for peer in theirs}
    rivals["best bf16 peer"] = [peer for peer in theirs if FORMATS.get(peer) == "bf16"]
    rivals["best peer"] = theirs
    rows = []
    for name, those in rivals.items():
        found = [ahead_by_round(label, measure, mine, those, runs) for mine in ours]
        if any(found):
            cells = [f"{number(median(ratios), 2)} ({span(ratios, 2)})" if ratios else "–" for ratios in found]
            rows.append([name, *cells])
    if not rows:
        return None
    return table([f"{label}, {measure.name}: ahead of", *(f"{mine} ×" for mine in ours)], rows)


def ahead_by_round(
    label: str, measure: Measure, mine: str, theirs: Sequence[str], runs: Sequence[PeerRun]
) -> list[float]:
    """Return for each round how far `mine` is ahead of the best of `theirs`; rounds that lack either are left out.

    What is 0 has no ratio: nobody is so many times ahead of nothing.
    """
    rounds: dict[int, dict[str, float]] = {}
    for turn in runs:
        run = turn.case(label)
        if run is not None and (value := measure.value(run)):
            rounds.setdefault(turn.round_number, {})[turn.peer] = value
    return [
        measure.ahead(values[mine], those)
        for values in rounds.values()
        if mine in values and (those := [values[peer] for peer in theirs if peer in values])
    ]
