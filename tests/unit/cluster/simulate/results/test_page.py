"""The page's plots, at both widths: nothing that is written lies outside the picture, over its neighbour or a curve."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from cluster.simulate.results.html import NARROW, WIDE, Line, Mark, Size, plot

OVER_TIME: Mapping[str, Line] = {
    "decode": [(0.0, 0.0), (5_000.0, 123_456.0), (10_000.0, 999.0)],
    "prefill": [(0.0, 3.0), (10_000.0, 7.0)],
    "gateways": [(0.0, 1.0), (10_000.0, 1.0)],
}
MARKS = [Mark(at, f"kill decode-{at:.0f}", str(number)) for number, at in enumerate(range(0, 10_001, 250), 1)]


def texts(svg: str, size: Size) -> list[tuple[float, float, float]]:
    """Left and right end, and height, of all that is written."""
    found = []
    for attributes, told in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        x, y = (float(re.findall(rf'\b{name}="([^"]*)"', attributes)[0]) for name in "xy")
        anchor = re.findall(r'text-anchor="(\w+)"', attributes)
        width = size.text(told)
        left = x - width * {"end": 1.0, "middle": 0.5, "start": 0.0}[anchor[0] if anchor else "start"]
        found.append((left, left + width, y))
    return found


def drawn(lines: Mapping[str, Line], size: Size, *, log: bool = False, marks: Sequence[Mark] = ()) -> str:
    both = plot("A plot", "ms", lines, log=log, marks=marks)
    (svg,) = re.findall(rf'<svg class="{size.name}".*?</svg>', both, re.DOTALL)
    return str(svg)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
@pytest.mark.parametrize("log", [False, True])
def test_nothing_that_is_written_is_cut_or_lies_over_something(size: Size, log: bool) -> None:
    marks = [Mark(9_999.0, "objective", "objective")] if log else MARKS
    lines = {"": [(20.0, 1.0), (10_000.0, 100.0)]} if log else OVER_TIME
    svg = drawn(lines, size, log=log, marks=marks)
    found = texts(svg, size)
    assert all(left >= 0 and right <= size.width for left, right, _ in found)
    for one in found:
        for other in found:
            assert one is other or one[2] != other[2] or one[1] <= other[0] or other[1] <= one[0], (one, other)
    highest = min(float(y) for path in re.findall(r'points="([^"]*)"', svg) for y in re.findall(r",(\S+)", path))
    assert all(y < highest for _, _, y in found if y < 40), "names and numbers of faults are above the curves"


def test_faults_that_are_near_one_another_all_have_lines_and_some_have_numbers() -> None:
    svg = drawn(OVER_TIME, NARROW, marks=MARKS)
    assert svg.count("<title>kill decode-") == len(MARKS)
    assert 5 < svg.count('<text class="mark"') < len(MARKS)


def dashed(*lines: Line) -> list[str]:
    """The gaps of each line, empty for a solid one."""
    svg = drawn({f"line {number}": line for number, line in enumerate(lines)}, WIDE)
    return [gaps for _, gaps in re.findall(r'<polyline class="s\d"( stroke-dasharray="([^"]*)")? points', svg)]


def test_a_line_that_lies_over_another_lets_it_show() -> None:
    level, rising = [(0.0, 1.0), (5.0, 1.0), (9.0, 1.0)], [(0.0, 1.0), (5.0, 1.0), (9.0, 4.0)]
    assert dashed(level, level) == ["", "6 6"], "equal"
    assert dashed(level, rising) == ["", "6 6"], "in part"
    assert dashed(level, level, rising) == ["", "6 6", "6 12"], "all three are seen"
    assert dashed(level, [(0.0, 2.0), (5.0, 2.0), (9.0, 2.0)]) == ["", ""]
    assert dashed(level, [(0.0, 4.0), (5.0, 1.0), (9.0, 3.0)]) == ["", ""], "a point in common hides nothing"
