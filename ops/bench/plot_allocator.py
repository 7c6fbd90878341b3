"""Draw what `claims.py` and `prefix_reuse.py` measured, as SVG that a browser and a repository page show.

python ops/bench/plot_allocator.py build/claims.json ops/bench/claims.svg
python ops/bench/plot_allocator.py build/prefix_reuse.json ops/bench/prefix_reuse.svg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, HEIGHT = 460, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 58, 52
COLOURS = ("#b0b7c3", "#7d8798", "#1f77b4", "#d9822b")  # baselines grey, paged blue
FONT = 'font-family="system-ui, sans-serif"'


class Series(NamedTuple):
    """One value for each group; None is not drawn."""

    name: str
    values: Sequence[float | None]


def bars(title: str, groups: Sequence[str], series: Sequence[Series], show: Callable[[float], str]) -> str:
    """Draw groups of bars, with their values on top; a group's name may have three lines."""
    top = max(value for line in series for value in line.values if value is not None)
    height = HEIGHT - TOP - BOTTOM
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    width = slot * 0.82 / len(series)
    parts = [_title(title), _legend([line.name for line in series])]
    for position, group in enumerate(groups):
        left = LEFT + position * slot + slot * 0.09
        for order, line in enumerate(series):
            value = line.values[position]
            if value is None:
                continue
            size = height * value / top
            x, y = left + order * width, TOP + height - size
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{size:.1f}" fill="{COLOURS[order]}"/>'
            )
            parts.append(text(x + width / 2, y - 3, show(value), size=8))
        for row, words in enumerate(group.split("\n")):
            parts.append(text(left + slot * 0.41, TOP + height + 14 + 11 * row, words, size=9))
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{TOP + height}" y2="{TOP + height}" stroke="#333"/>')
    return "".join(parts)


def lines(title: str, xs: Sequence[float], series: Sequence[Series], x_name: str, y_name: str) -> str:
    """Draw lines from 0 to 1 over a logarithmic axis."""
    height, width = HEIGHT - TOP - BOTTOM, WIDTH - LEFT - RIGHT
    low, high = math.log(xs[0]), math.log(xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + width * (math.log(x) - low) / (high - low), TOP + height * (1 - y)

    parts = [_title(title), _legend([line.name for line in series])]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(xs[0], share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y + 3, f"{share:.0%}", size=9, anchor="end"))
    parts += [text(place(x, 0)[0], TOP + height + 14, f"{x:.0%}", size=9) for x in xs]
    parts.append(text(LEFT + width / 2, TOP + height + 30, x_name, size=10))
    parts.append(text(LEFT, TOP - 8, y_name, size=9, anchor="start"))
    for order, line in enumerate(series):
        points = [place(x, y) for x, y in zip(xs, line.values, strict=True) if y is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[order]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS[order]}"/>' for x, y in points]
    return "".join(parts)


def page(panels: Sequence[str], columns: int) -> str:
    """Put panels side by side and below each other."""
    rows = -(-len(panels) // columns)
    placed = [
        f'<g transform="translate({index % columns * WIDTH},{index // columns * HEIGHT})">{panel}</g>'
        for index, panel in enumerate(panels)
    ]
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT}" viewBox="0 0 {columns * WIDTH} {rows * HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}><rect width="100%" height="100%" fill="white"/>{"".join(placed)}</svg>\n'


def draw_claims(document: dict[str, Any]) -> str:
    """Draw waste, sessions, requests a second and the bytes of a long context."""
    rows = document["rows"]
    groups = [_group(row) for row in rows]
    sides = ("best fit", "buddy", "paged")
    panels = [
        bars(
            "KV memory held without a token, % (block 16)",
            groups,
            [
                Series(side, [100 * row["waste"]["paged 16" if side == "paged" else side] for row in rows])
                for side in sides
            ],
            lambda value: f"{value:.0f}" if value >= 10 else f"{value:.1f}",
        ),
        bars(
            "Sessions held where best fit holds 12",
            groups,
            [Series(side, [row["sessions"]["12 reservations"][side] for row in rows]) for side in sides],
            lambda value: f"{value:.0f}",
        ),
    ]
    for device in rows[0]["throughput"]:
        measured = [row["throughput"][device] for row in rows]
        panels.append(
            bars(
                f"Requests/s, backlog, {device} (simulated)",
                groups,
                [Series(side, [m[side]["requests_per_s"] if m[side] else None for m in measured]) for side in sides],
                lambda value: f"{value:.1f}" if value >= 10 else f"{value:.2f}",
            )
        )
    contexts = [row for row in document["contexts"] if row["tokens"] != 32_768]
    device = "Llama-3.1-8B, H100 80 GB"
    panels.append(
        bars(
            "A context of 32,768 tokens, GB of KV (Llama-3.1-8B, 16 bits)",
            [_group(row) for row in contexts],
            [
                Series(side, [row[device][f"{side.replace(' ', '_')}_bytes"] / 1e9 for row in contexts])
                for side in sides
            ],
            lambda value: f"{value:.1f}",
        )
    )
    return page(panels, 2)


def _group(row: dict[str, Any]) -> str:
    """Name a trace and a reservation below each other."""
    trace = row["trace"].replace("summarization", "summ.").replace("conversation", "conv.")
    return f"{trace}\n{row['reservation']}\n{row['tokens']:,}"


def draw_reuse(document: dict[str, Any]) -> str:
    """Draw hits against pool size."""
    rows = document["rows"]
    panels = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        mine = [row for row in rows if row["trace"] == trace]
        names = ("lru set", "lru", "cost", "belady")
        panels.append(
            lines(
                f"{trace.replace('_', ' ').capitalize()}: {mine[0]['unique']:,} different blocks",
                [row["share"] for row in mine],
                [Series(name, [row[name] / row["unbounded"] for row in mine]) for name in names],
                "pool, share of the different blocks",
                "hits, share of an unbounded cache's",
            )
        )
    return page(panels, 2)


def main() -> int:
    """Draw one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("svg", type=Path)
    options = parser.parse_args()
    document = json.loads(options.results.read_text())
    options.svg.write_text(draw_claims(document) if "contexts" in document else draw_reuse(document))
    return 0


def _title(words: str) -> str:
    return text(WIDTH / 2, 18, words, size=12, weight="bold")


def _legend(names: Sequence[str]) -> str:
    parts = []
    step = (WIDTH - LEFT - RIGHT) / max(3, len(names))
    for order, name in enumerate(names):
        x = LEFT + order * step
        parts.append(f'<rect x="{x:.1f}" y="28" width="10" height="10" fill="{COLOURS[order]}"/>')
        parts.append(text(x + 14, 37, name, size=10, anchor="start"))
    return "".join(parts)


def text(x: float, y: float, words: str, *, size: int, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main())
