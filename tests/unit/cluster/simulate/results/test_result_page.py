"""The page's plots lie within their pictures."""

from __future__ import annotations

import re

from cluster.simulate.results.result_page import HEIGHT, WIDTH, plot

LINES = {"decode": [(0.0, 0.0), (5_000.0, 123_456.0), (10_000.0, 999.0)], "prefill": [(20.0, 3.0), (10_000.0, 7.0)]}


def test_nothing_is_drawn_outside_the_picture() -> None:
    svg = plot("A plot", LINES, marks=[(9_999.0, "kill decode-0")])
    pairs = [pair for path in re.findall(r'points="([^"]*)"', svg) for pair in path.split()]
    points = [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]
    points += [(float(x), float(y)) for x, y in re.findall(r'<text[^>]* x="([-\d.]+)" y="([-\d.]+)"', svg)]
    assert len(points) > 10
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert svg.count("<title>kill decode-0</title>") == 1


def test_a_plot_without_points_is_left_out() -> None:
    assert plot("A plot", {"": []}) == ""
