"""The plots are well-formed and show every value."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from plot_allocator import Series, bars, lines, page

SVG = "{http://www.w3.org/2000/svg}"


def drawn(panel: str) -> ET.Element:
    return ET.fromstring(page([panel], 1))


def test_bars_are_as_high_as_their_values() -> None:
    root = drawn(bars("A < B", ["one\nfirst", "two"], [Series("x", [4.0, 2.0]), Series("y", [1.0, None])], str))
    heights = [rect.attrib["height"] for rect in root.iter(f"{SVG}rect")]
    bar_heights = [float(height) for height in heights if height not in {"100%", "10"}]  # the page, the legend
    assert sorted(bar_heights) == [47.5, 95.0, 190.0]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"A < B", "4.0", "2.0", "1.0", "first", "x", "y"} <= set(texts)


def test_lines_rise_with_their_values() -> None:
    root = drawn(lines("Hits", [0.01, 0.1, 1.0], [Series("lru", [0.0, 0.5, 1.0])], "pool", "hits"))
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == x3 - x2, "the axis is not logarithmic"
    assert y1 - y2 == y2 - y3 > 0
