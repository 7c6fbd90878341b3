"""What a comparison found, and the tables it is shown in.

Not measurement. Invariant: a run with an error in it enters no median and no ratio, and a ratio never mixes rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prompts import Workload
from report import Summary, number, table


@dataclass(frozen=True, slots=True)
class Case:
    """A workload at a concurrency."""

    workload: Workload
    concurrency: int

    @property
    def label(self) -> str:
        return f"{self.workload.name} c={self.concurrency}"


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One case on one peer in one round."""

    label: str
    summary: Summary
    cpu_s: float  # of the peer, all its processes
    others_cores: float  # cores that neither the peer nor this program kept busy, stolen time included

    @property
    def is_good(self) -> bool:
        return not self.summary.errors


@dataclass(slots=True)
class PeerRun:
    """One peer's turn in one round. `failure` says why there is nothing, or nothing more."""

    peer: str
    round_number: int
    first_token_s: float | None = None  # from the start of the program to the first token of a request
    peak_rss_bytes: int | None = None
    pss_bytes: int | None = None
    cases: list[CaseRun] = field(default_factory=list)
    failure: str | None = None

    def case(self, label: str) -> CaseRun | None:
        """Return the good run of a case, None where there is none."""
        return next((run for run in self.cases if run.label == label and run.is_good), None)


def case_table(label: str, peers: Sequence[str], runs: Sequence[PeerRun]) -> str:
    """Lay out one case: medians over the rounds, and what the first peer is ahead of each other one by."""
    header = ["peer", "rounds", "out tok/s", "min–max", "total tok/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95"]
    header += ["TPOT ms", "CPU s / 1000 tok", "others' cores", f"{peers[0]} ÷ peer", "min–max"]
    rows = []
    for peer in peers:
        good = [run for turn in runs if turn.peer == peer and (run := turn.case(label))]
        speeds = [run.summary.output_tokens_per_s for run in good]
        ratios = ratios_within_rounds(label, peers[0], peer, runs)
        rows.append(
            (
                peer,
                str(len(good)),
                number(median(speeds)),
                span(speeds, 1),
                number(median_of(good, lambda run: run.summary.total_tokens_per_s)),
                number(median_of(good, lambda run: run.summary.ttft_p50_ms)),
                number(median_of(good, lambda run: run.summary.ttft_p95_ms)),
                number(median_of(good, lambda run: run.summary.itl_p50_ms)),
                number(median_of(good, lambda run: run.summary.itl_p95_ms)),
                number(median_of(good, lambda run: run.summary.tpot_median_ms)),
                number(median_of(good, lambda run: 1000 * run.cpu_s / run.summary.output_tokens), 2),
                number(max((run.others_cores for run in good), default=None), 2),
                number(median(ratios), 2),
                span(ratios, 2),
            )
        )
    return table(header, rows)


def start_table(peers: Sequence[str], runs: Sequence[PeerRun]) -> str:
    """Lay out start and memory: medians over the rounds."""
    header = ("peer", "start to first token s", "min–max", "peak RSS MB", "PSS at the end MB")
    rows = []
    for peer in peers:
        turns = [turn for turn in runs if turn.peer == peer]
        first = [turn.first_token_s for turn in turns if turn.first_token_s is not None]
        rss = median([turn.peak_rss_bytes / 1e6 for turn in turns if turn.peak_rss_bytes is not None])
        pss = median([turn.pss_bytes / 1e6 for turn in turns if turn.pss_bytes is not None])
        rows.append((peer, number(median(first)), span(first, 1), number(rss, 0), number(pss, 0)))
    return table(header, rows)


def ratios_within_rounds(label: str, ours: str, theirs: str, runs: Sequence[PeerRun]) -> list[float]:
    """Return output tokens/s of `ours` over `theirs` for each round in which both have a good run."""
    speeds = {
        (turn.peer, turn.round_number): run.summary.output_tokens_per_s
        for turn in runs
        if (run := turn.case(label)) is not None
    }
    return [
        speeds[ours, round_number] / speed
        for (peer, round_number), speed in speeds.items()
        if peer == theirs and (ours, round_number) in speeds
    ]


def median(values: Sequence[float]) -> float | None:
    """Return the median, None of nothing."""
    return statistics.median(values) if values else None


def median_of(good: Sequence[CaseRun], value: Callable[[CaseRun], float | None]) -> float | None:
    """Return the median of one number over runs that have it."""
    return median([found for run in good if (found := value(run)) is not None])


def span(values: Sequence[float], digits: int) -> str:
    """Write the smallest and the largest value."""
    return f"{min(values):.{digits}f}–{max(values):.{digits}f}" if values else "–"
