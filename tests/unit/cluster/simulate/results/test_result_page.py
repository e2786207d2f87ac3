"""The page's plots: curves, marks and points lie within the picture."""

from __future__ import annotations

import re

import pytest

from cluster.simulate.results.result_page import HEIGHT, WIDTH, Dot, Mark, plot

LINES = {"decode": [(0.0, 0.0), (5_000.0, 123_456.0), (10_000.0, 999.0)], "prefill": [(20.0, 3.0), (10_000.0, 7.0)]}


@pytest.mark.parametrize("log", [False, True])
def test_nothing_is_drawn_outside_the_picture(log: bool) -> None:
    svg = plot("A plot", "ms", LINES, marks=[Mark(9_999.0, "objective")], log=log)
    pairs = [pair for path in re.findall(r'points="([^"]*)"', svg) for pair in path.split()]
    points = [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]
    points += [(float(x), float(y)) for x, y in re.findall(r'<text[^>]* x="([-\d.]+)" y="([-\d.]+)"', svg)]
    assert len(points) > 10
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert svg.count("<title>objective</title>") == 1


def test_a_point_shows_its_own_text_and_an_empty_plot_is_left_out() -> None:
    svg = plot("A plot", "USD/h", {"": [(1.0, 2.0)]}, dots=[Dot(1.0, 2.0, "1 colocated", "good")])
    assert svg.count("<circle") == svg.count("<title>1 colocated</title>") == 1
    assert plot("A plot", "s", {"": []}) == ""
