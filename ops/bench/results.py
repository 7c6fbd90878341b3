"""What a comparison found, and the tables of its cases.

Not measurement; tables.py puts these and others into a report. Invariant: a run with an error in it enters no median and no ratio, and a ratio never mixes rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from report import Summary, number, table

# Above this share of a core taken by others, a run says more about them than about the peer.
MAX_OTHERS_CORES = 0.15


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One case on one peer in one round."""

    label: str
    summary: Summary
    cpu_s: float  # of the peer, all its processes
    others_cores: float  # cores kept busy by none of the peer, this program and the busy process; stolen time included
    busy_cores: float | None = None  # what the busy process got, where the case runs beside one

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
    idle_cores: float | None = None  # cores that it keeps busy after the load, with nothing to do
    cases: list[CaseRun] = field(default_factory=list)
    failure: str | None = None

    def case(self, label: str) -> CaseRun | None:
        """Return the good run of a case, None where there is none."""
        return next((run for run in self.cases if run.label == label and run.is_good), None)


def case_table(label: str, peers: Sequence[str], runs: Sequence[PeerRun]) -> str:
    """Lay out one case: medians over the rounds, and what the first peer is ahead of each other one by."""
    header = ["peer", "rounds", "out tok/s", "min–max", "total tok/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95"]
    header += ["TPOT ms", "CPU s / 1000 tok", "others' cores", "cut", f"{peers[0]} ÷ peer", "min–max"]
    rows = []
    for peer in peers:
        good = good_runs(label, peer, runs)
        speeds = [run.summary.output_tokens_per_s for run in good]
        ratios = ratios_within_rounds(label, peers[0], peer, runs)
        rows.append(
            (
                peer,
                str(len(good)),
                number(median(speeds)),
                span(speeds, 1),
                number(median_of(good, lambda run: run.summary.total_tokens_per_s)),
                *latencies(good),
                number(median_of(good, cpu_s_per_1000_tokens), 2),
                number(max((run.others_cores for run in good), default=None), 2),
                str(sum(run.summary.num_cut for run in good)) if good else "–",
                number(median(ratios), 2),
                span(ratios, 2),
            )
        )
    return table(header, rows)


def chat_table(label: str, peers: Sequence[str], runs: Sequence[PeerRun]) -> str:
    """Lay out one rate of W4: what came within the limits, a second."""
    header = ["peer", "rounds", "goodput req/s", "min–max", "within limits %", "out tok/s", "TTFT p50 ms", "p95"]
    header += ["ITL p50 ms", "p95", "TPOT ms", "cached %", "cut", f"{peers[0]} ÷ peer"]
    rows = []
    for peer in peers:
        good = good_runs(label, peer, runs)
        rates = [goodput(run) for run in good]
        ratios = ratios_within_rounds(label, peers[0], peer, runs, goodput)
        share = median_of(good, lambda run: 100 * run.summary.num_within_limits / run.summary.num_requests)
        cached = median_of(
            good,
            lambda run: (
                100 * run.summary.cached_tokens / run.summary.prompt_tokens if run.summary.prompt_tokens else None
            ),
        )
        rows.append(
            (
                peer,
                str(len(good)),
                number(median(rates), 2),
                span(rates, 2),
                number(share, 0),
                number(median_of(good, lambda run: run.summary.output_tokens_per_s)),
                *latencies(good),
                number(cached or None, 0),  # most do not say
                str(sum(run.summary.num_cut for run in good)) if good else "–",
                number(median(ratios), 2),
            )
        )
    return table(header, rows)


def disturbed_table(pairs: Sequence[tuple[str, str]], peers: Sequence[str], runs: Sequence[PeerRun]) -> str:
    """Lay out what is left of the speed beside a busy process: `pairs` of the labels without and with it."""
    header = ["peer"]
    for calm, _ in pairs:
        header += [f"{calm}: alone", "beside", "left %", "min–max", "its cores"]
    rows = []
    for peer in peers:
        row = [peer]
        for calm, busy in pairs:
            both = [
                (before, beside)
                for turn in runs
                if turn.peer == peer and (before := turn.case(calm)) and (beside := turn.case(busy))
            ]
            shares = [
                100 * beside.summary.output_tokens_per_s / before.summary.output_tokens_per_s for before, beside in both
            ]
            row += [
                number(median([before.summary.output_tokens_per_s for before, _ in both])),
                number(median([beside.summary.output_tokens_per_s for _, beside in both])),
                number(median(shares), 0),
                span(shares, 0),
                number(median_of([beside for _, beside in both], lambda run: run.busy_cores), 2),
            ]
        rows.append(row)
    return table(header, rows)


def start_table(peers: Sequence[str], runs: Sequence[PeerRun]) -> str:
    """Lay out start, memory and what an idle peer costs: medians over the rounds."""
    header = ("peer", "start to first token s", "min–max", "peak RSS MB", "PSS at the end MB", "idle % of a core")
    rows = []
    for peer in peers:
        turns = [turn for turn in runs if turn.peer == peer]
        first = [turn.first_token_s for turn in turns if turn.first_token_s is not None]
        rss = median([turn.peak_rss_bytes / 1e6 for turn in turns if turn.peak_rss_bytes is not None])
        pss = median([turn.pss_bytes / 1e6 for turn in turns if turn.pss_bytes is not None])
        idle = median([100 * turn.idle_cores for turn in turns if turn.idle_cores is not None])
        rows.append((peer, number(median(first)), span(first, 1), number(rss, 0), number(pss, 0), number(idle)))
    return table(header, rows)


def good_runs(label: str, peer: str, runs: Sequence[PeerRun]) -> list[CaseRun]:
    """Return a peer's good runs of a case."""
    return [run for turn in runs if turn.peer == peer and (run := turn.case(label))]


def latencies(good: Sequence[CaseRun]) -> tuple[str, ...]:
    """Write the medians of TTFT p50 and p95, ITL p50 and p95, and TPOT."""
    return (
        number(median_of(good, lambda run: run.summary.ttft_p50_ms)),
        number(median_of(good, lambda run: run.summary.ttft_p95_ms)),
        number(median_of(good, lambda run: run.summary.itl_p50_ms)),
        number(median_of(good, lambda run: run.summary.itl_p95_ms)),
        number(median_of(good, lambda run: run.summary.tpot_median_ms)),
    )


def cpu_s_per_1000_tokens(run: CaseRun) -> float | None:
    """Return CPU seconds for each thousand new tokens, None without any."""
    return 1000 * run.cpu_s / run.summary.output_tokens if run.summary.output_tokens else None


def output_speed(run: CaseRun) -> float:
    """Return output tokens a second."""
    return run.summary.output_tokens_per_s


def goodput(run: CaseRun) -> float:
    """Return requests a second that kept the limits."""
    return run.summary.num_within_limits / run.summary.wall_s


def ratios_within_rounds(
    label: str,
    ours: str,
    theirs: str,
    runs: Sequence[PeerRun],
    value: Callable[[CaseRun], float] = output_speed,
) -> list[float]:
    """Return `value` of `ours` over `theirs` for each round in which both have a good run, and theirs is not 0."""
    found = {(turn.peer, turn.round_number): value(run) for turn in runs if (run := turn.case(label)) is not None}
    return [
        found[ours, round_number] / theirs_value
        for (peer, round_number), theirs_value in found.items()
        if peer == theirs and (ours, round_number) in found and theirs_value
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
