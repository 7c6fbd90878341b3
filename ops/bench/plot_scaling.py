"""Draw how output tokens a second grow with concurrency, with the roofline of each weight format, from a comparison's JSON.

python ops/bench/plot_scaling.py build/compare.json ops/bench/scaling.svg

One panel for each format: the ideal dashed, ours thick, the peers that read the same format thin. Both axes are logarithmic. Points are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from document import Document, read
from plot_allocator import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, page, text
from results import good_runs, median, output_speed
from roofline import FORMATS, ideal_tokens_per_s
from tables import median_roofline

PANELS = {"bf16": "bfloat16 weights", "int8": "int8 weights", "int4": "int4 weights"}
OURS = "#1f77b4"
THEIRS = ("#d9822b", "#2a9d6f", "#8a5fbf", "#b0475b", "#7d8798")
IDEAL = "#333"


class Line(NamedTuple):
    """One line: points of (concurrency, output tokens/s), ascending."""

    name: str
    points: Sequence[tuple[int, float]]
    colour: str
    is_thick: bool = False
    is_dashed: bool = False


def scaling_lines(document: Document, weights: str) -> list[Line]:
    """Return the ideal, where a roofline was measured, and the peers that read `weights`, ours first; peers without points are left out."""
    cases = sorted(
        (case for case in document.cases if case.workload.name == "w1" and case.rate is None and not case.is_disturbed),
        key=lambda case: case.concurrency,
    )
    lines = []
    if document.rooflines:
        roofline = median_roofline(document.rooflines)
        ideal = [
            (
                case.concurrency,
                ideal_tokens_per_s(
                    roofline, weights, case.concurrency, case.workload.prompt_tokens, case.workload.max_tokens
                ),
            )
            for case in cases
        ]
        lines.append(Line("ideal", ideal, IDEAL, is_dashed=True))
    colours = iter(THEIRS)
    for peer in document.peers:
        if FORMATS.get(peer) != weights:
            continue
        points = []
        for case in cases:
            speed = median([output_speed(run) for run in good_runs(case.label, peer, document.turns)])
            if speed:
                points.append((case.concurrency, speed))
        if points:
            is_ours = peer.startswith("looseleaf")
            is_thick = is_ours and not peer.endswith("-plain")
            lines.append(Line(peer, points, OURS if is_ours else next(colours), is_thick=is_thick))
    return lines


def draw_panel(title: str, lines: Sequence[Line], low: float, high: float, concurrencies: Sequence[int]) -> str:
    """Draw one format's lines between `low` and `high` tokens/s, each named at the right of the legend."""
    height, width = HEIGHT - TOP - BOTTOM, WIDTH - LEFT - RIGHT
    first, last = math.log(concurrencies[0]), math.log(concurrencies[-1])

    def place(concurrency: float, speed: float) -> tuple[float, float]:
        share = (math.log(concurrency) - first) / (last - first) if last > first else 0.5
        return LEFT + width * share, TOP + height * (1 - math.log(speed / low) / math.log(high / low))

    parts = [text(WIDTH / 2, 18, title, size=12, weight="bold")]
    for speed in ticks(low, high):
        _, y = place(concurrencies[0], speed)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y + 3, f"{speed:g}", size=9, anchor="end"))
    parts += [text(place(c, low)[0], TOP + height + 14, str(c), size=9) for c in concurrencies]
    parts.append(text(LEFT + width / 2, TOP + height + 30, "requests at once", size=10))
    for order, line in enumerate(lines):
        places = [place(*point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        stroke = f'stroke="{line.colour}" stroke-width="{3 if line.is_thick else 1.5}"{dashes}'
        parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        if not line.is_dashed:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>' for x, y in places]
        x, y = LEFT + order % 3 * width / 3, 32 + order // 3 * 12
        parts.append(f'<line x1="{x:.0f}" x2="{x + 14:.0f}" y1="{y - 3}" y2="{y - 3}" {stroke}/>')
        parts.append(text(x + 18, y, line.name, size=9, anchor="start"))
    return "".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between two values, both ends included."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]


def draw(document: Document) -> str:
    """Draw a panel for each format that anything was measured in, all on the same scale. Raises ValueError for nothing."""
    panels = {weights: scaling_lines(document, weights) for weights in PANELS}
    panels = {weights: lines for weights, lines in panels.items() if any(not line.is_dashed for line in lines)}
    points = [point for lines in panels.values() for line in lines for point in line.points]
    if not points:
        raise ValueError("no closed-loop case of w1 was measured")
    speeds = [speed for _, speed in points]
    low, high = 0.8 * min(speeds), 1.1 * max(speeds)
    concurrencies = sorted({concurrency for concurrency, _ in points})
    drawn = [
        draw_panel(f"{PANELS[weights]}: output tokens/s", lines, low, high, concurrencies)
        for weights, lines in panels.items()
    ]
    return page(drawn, len(drawn))


def main() -> int:
    """Draw one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("svg", type=Path)
    options = parser.parse_args()
    options.svg.write_text(draw(read(options.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
