"""Turns answers into numbers, and numbers into tables.

Not measurement: everything here is arithmetic over finished `Answer`s. Failed requests count as errors and in nothing
else, so a row with errors is no result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load import Answer

# What a request must keep to count in goodput: a wait and a pace that a reader of a chat takes as immediate and fluent.
TTFT_LIMIT_S = 1.0
TPOT_LIMIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers; times in milliseconds, None where no request had such a time."""

    num_requests: int
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    num_chunks: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    tpot_median_ms: float | None
    num_cut: int  # requests that the time limit ended; their tokens until then are in the counts
    num_within_limits: int  # complete, and within TTFT_LIMIT_S and TPOT_LIMIT_S
    errors: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)


def summarise(answers: Sequence[Answer], wall_s: float) -> Summary:
    """Summarise one run that took `wall_s` seconds from its start to its last answer."""
    good = [answer for answer in answers if answer.error is None]
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    output_tokens = sum(answer.output_tokens for answer in good)
    ttft = [answer.first - answer.due for answer in good if answer.first is not None]
    gaps = [gap for answer in good for gap in answer.gaps]
    tpot = [pace for answer in good if (pace := time_per_token_s(answer)) is not None]
    return Summary(
        num_requests=len(answers),
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(answer.cached_tokens for answer in good),
        num_chunks=sum(answer.num_chunks for answer in good),
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        ttft_p50_ms=_milliseconds(ttft, 50),
        ttft_p95_ms=_milliseconds(ttft, 95),
        itl_p50_ms=_milliseconds(gaps, 50),
        itl_p95_ms=_milliseconds(gaps, 95),
        tpot_median_ms=_milliseconds(tpot, 50),
        num_cut=sum(answer.is_cut for answer in good),
        num_within_limits=sum(is_within_limits(answer) for answer in good),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )


def time_per_token_s(answer: Answer) -> float | None:
    """Return the mean seconds between two tokens of a request, None for fewer than two."""
    if answer.first is None or answer.last is None or answer.output_tokens < 2:
        return None
    return (answer.last - answer.first) / (answer.output_tokens - 1)


def is_within_limits(answer: Answer) -> bool:
    """Say whether a request came to its end, in time and at a pace, that make it count as goodput."""
    if answer.error is not None or answer.is_cut or answer.first is None:
        return False
    return answer.first - answer.due <= TTFT_LIMIT_S and (time_per_token_s(answer) or 0.0) <= TPOT_LIMIT_S


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 to 100), interpolated between neighbours as numpy does by default.

    Raises ValueError when there are no values.
    """
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table: the first column to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def layout(line: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        return "| " + " | ".join([line[0].ljust(len(first)), *others]) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths)) + "|"
    return "\n".join([layout(lines[0]), rule, *map(layout, lines[1:])])


def number(value: float | None, digits: int = 1) -> str:
    """Write a number for a table; a missing one is a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: Sequence[float], q: float) -> float | None:
    return percentile(seconds, q) * 1000 if seconds else None
