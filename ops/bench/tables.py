"""A whole comparison as Markdown: a table for each case, and what ties them together.

Not measurement, and no arithmetic that results.py or roofline.py could do.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cases import Case
from document import Document
from machine import describe_machine
from ratios import GOODPUT, SPEED, TTFT, Measure, ratio_table
from report import TPOT_LIMIT_S, TTFT_LIMIT_S, number, table
from results import (
    MAX_OTHERS_CORES,
    case_table,
    chat_table,
    disturbed_table,
    good_runs,
    median,
    median_of,
    output_speed,
    start_table,
)
from roofline import FORMATS, Ceilings, Roofline, ideal_tokens_per_s, ideal_tpot_s, ideal_ttft_s


def report(document: Document) -> str:
    """Write all tables."""
    peers, turns = document.peers, document.turns
    parts = []
    calm = [case for case in document.cases if not case.is_disturbed]
    for case in calm:
        if case.rate is None:
            parts.append(f"### {case.label}\n\n{case_table(case.label, peers, turns)}")
        else:
            limits = f"Within the limits: first token after at most {TTFT_LIMIT_S:g} s, then at most {TPOT_LIMIT_S * 1000:g} ms a token in the mean."
            parts.append(f"### {case.label}\n\n{chat_table(case.label, peers, turns)}\n\n{limits}")
    if pairs := [(case.calm_label, case.label) for case in document.cases if case.is_disturbed]:
        parts.append(f"### Beside one busy process\n\n{disturbed_table(pairs, peers, turns)}")
    if lines := ratio_tables(calm, document):
        parts.append(f"### Ratios within a round, median (min–max)\n\n{lines}")
    if document.rooflines and (lines := roofline_tables(document)):
        parts.append(f"### Against the roofline\n\n{lines}")
    parts.append(f"### Start, memory, idle\n\n{start_table(peers, turns)}")
    if missing := [
        f"- {turn.peer}, round {turn.round_number + 1}: {first_line(turn.failure)}" for turn in turns if turn.failure
    ]:
        parts.append("### Not measured\n\n" + "\n".join(missing))
    versions = ", ".join(f"{name} {version}" for name, version in document.machine.get("versions", {}).items())
    return "\n\n".join([*parts, f"{describe_machine(document.machine)} {versions}"])


def ratio_tables(cases: Sequence[Case], document: Document) -> str:
    """Lay out how far each of our formats is ahead, case by case; for a long or shared prompt also of the time to the first token."""
    tables = [
        ratio_table(case.label, measure, document.peers, document.turns)
        for case in cases
        for measure in _measures_of(case)
    ]
    return "\n\n".join(filter(None, tables))


def _measures_of(case: Case) -> list[Measure]:
    if case.rate is not None:
        return [GOODPUT]
    return [SPEED, TTFT] if case.workload.name in {"w2", "w3"} else [SPEED]


def roofline_tables(document: Document) -> str:
    """Lay out which share of the ideal each peer's weights allow it reached; medians over the rounds."""
    roofline = median_roofline(document.rooflines)
    loads = [
        case
        for case in document.cases
        if case.rate is None and not case.is_disturbed and not case.workload.prefix_tokens
    ]
    rates = roofline.ceilings.read_bytes_per_s
    reads = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
    flops = roofline.ceilings.matmul_flops_per_s / 1e12
    measured = f"Read from memory, GB/s of a buffer as large as the weights: {reads}. Matrix products in bfloat16: {flops:.2f} TFLOP/s."
    return "\n\n".join([measured, *(f"{case.label}:\n\n{_roofline_table(case, document, roofline)}" for case in loads)])


def _roofline_table(case: Case, document: Document, roofline: Roofline) -> str:
    size = (case.workload.prompt_tokens, case.workload.max_tokens)
    header = [
        "peer",
        "weights",
        "ideal out tok/s",
        "reached %",
        "ideal TPOT ms",
        "reached %",
        "ideal TTFT ms",
        "reached %",
    ]
    rows = []
    for peer in document.peers:
        good = good_runs(case.label, peer, document.turns)
        if not good or peer not in FORMATS:
            continue
        weights = FORMATS[peer]
        ideal = ideal_tokens_per_s(roofline, weights, case.concurrency, *size)
        pace_ms = 1000 * ideal_tpot_s(roofline, weights, case.concurrency, *size)
        speed = median([output_speed(run) for run in good])
        tpot_ms = median_of(good, lambda run: run.summary.tpot_median_ms)
        first_ms = 1000 * ideal_ttft_s(roofline, size[0])
        ttft_ms = median_of(good, lambda run: run.summary.ttft_p50_ms) if case.concurrency == 1 else None
        rows.append(
            (
                peer,
                weights,
                number(ideal, 0),
                number(100 * speed / ideal if speed else None, 0),
                number(pace_ms),
                number(100 * pace_ms / tpot_ms if tpot_ms else None, 0),
                number(first_ms, 0),
                number(100 * first_ms / ttft_ms if ttft_ms else None, 0),  # alone: others' prompts are no waste
            )
        )
    return table(header, rows)


def median_roofline(rooflines: Sequence[Roofline]) -> Roofline:
    """Return the medians of all measurements. There must be one."""
    names = rooflines[0].ceilings.read_bytes_per_s
    return Roofline(
        rooflines[0].shape,
        Ceilings(
            {name: statistics.median(line.ceilings.read_bytes_per_s[name] for line in rooflines) for name in names},
            statistics.median(line.ceilings.matmul_flops_per_s for line in rooflines),
        ),
    )


def problems(document: Document) -> tuple[list[str], list[str]]:
    """Return a line for each failure, and one for each noisy run."""
    failures, noisy = [], []
    for turn in document.turns:
        where = f"{turn.peer}, round {turn.round_number + 1}"
        if turn.failure:
            failures.append(f"FAILED {where}: {turn.failure}")
        for run in turn.cases:
            failures += [
                f"FAILED {where}, {run.label}: {count} x {error}" for error, count in run.summary.errors.items()
            ]
            if run.others_cores > MAX_OTHERS_CORES:
                noisy.append(f"noisy: {where}, {run.label}: others {run.others_cores:.2f} cores")
    return failures, noisy


def first_line(text: str) -> str:
    """Return what a table can hold of a message: its first line, and the last one, where a log's end says why."""
    lines = text.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0].rstrip(':')} … {lines[-1].strip()}"
