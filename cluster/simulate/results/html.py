"""A run as one HTML file that needs nothing else: figures, timelines and distributions, drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from string import Template
from typing import NamedTuple

from rich.console import Console, RenderableType

from cluster.bench.report import Objective, RequestRecord
from cluster.simulate.results.report import Summary, summary_table
from cluster.simulate.run.fault_injector import Happened
from cluster.simulate.run.simulation import SimulationOutcome
from cluster.simulate.run.timeline import TimelineSample, WorkerSample
from protos.hints import counted
from protos.values import WorkerRole

HEIGHT, TOP, BOTTOM, RIGHT, GAP = 240, 44, 30, 16, 6
NUM_COLOURS = 5
DASH = 6
NUM_SLOTS = 60
MANY_FAULTS = 20
"""Longer lists are folded."""

_ROLES = tuple(WorkerRole)

Line = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A vertical line across a plot. `title` is shown while it is pointed at, `label` always."""

    at: float
    title: str
    label: str


class Size(NamedTuple):
    """The size of a plot. `letter` is the width of a digit in the widest usual font; the height of texts is in the
    page's style."""

    name: str
    width: int
    letter: float

    def text(self, text: str) -> float:
        return self.letter * len(text)


WIDE = Size("wide", 720, 7.0)
NARROW = Size("narrow", 350, 7.7)

_PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page(outcome: SimulationOutcome, summary: Summary, *, command: str, objective: Objective) -> str:
    """One page that needs nothing else."""
    samples, records = outcome.samples, outcome.records
    happened = sorted((fault for fault in summary.faults if not fault.passed_over), key=lambda fault: fault.at_s)
    marks = [Mark(fault.at_s, fault.what, str(number)) for number, fault in enumerate(happened, 1)]
    waiting = _by_role(samples, lambda sample: sample.num_waiting)
    waiting["gateways"] = [(one.at_s, float(one.num_queued)) for one in samples if one.role == samples[0].role]
    until = max((sample.at_s for sample in samples), default=0.0)

    def over_time(title: str, lines: Mapping[str, Line], *, whole: bool = False) -> str:
        return plot(title, "s", lines, whole=whole, until=until, marks=marks)

    plots = [
        over_time("Workers serving", _by_role(samples, lambda sample: sample.num_workers), whole=True),
        over_time("Sequences running", _by_role(samples, lambda sample: sample.num_running), whole=True),
        over_time("Requests waiting, on workers by pool and at the gateways", waiting, whole=True),
        over_time("KV blocks in use, %", _by_role(samples, lambda sample: 100 * sample.blocks_used)),
        over_time("Sequences running, by worker", _by_worker(outcome.worker_samples), whole=True),
        over_time("Time to first token, ms, of what was asked at the time", _over_time(records)),
        over_time("KV moved between workers, MB a second", {"": _moved(samples)}),
        over_time("USD spent on GPUs so far", {"": _spent(outcome)}),
    ]
    for title, name, bound_s in (
        ("Time to first token", "ttft_s", objective.ttft_s),
        ("Time per token", "tpot_s", objective.tpot_s),
        ("End to end", "e2e_s", None),
    ):
        bounds = [Mark(1000 * bound_s, "objective", "objective")] if bound_s is not None else []
        plots.append(plot(f"{title}: share of requests, %", "ms", _distribution(records, name), log=True, marks=bounds))
    faults = _listed(marks, [fault for fault in summary.faults if fault.passed_over])
    table = summary_table(replace(summary, faults=()))
    return document("a simulated run", table, command=command, note="", parts=[faults, *plots])


def document(title: str, table: RenderableType, *, command: str, note: str, parts: Sequence[str]) -> str:
    """A whole page: the command, its table as text, a note, and parts of HTML."""
    return _PAGE.substitute(
        title=f"Baton: {title}",
        command=escape(command),
        note=escape(note),
        figures=escape(_text(table)),
        parts="\n".join(parts),
    )


def _listed(marks: Sequence[Mark], passed_over: Sequence[Happened]) -> str:
    """The faults with their numbers in the plots, and the faults that did not happen."""
    if not marks and not passed_over:
        return ""
    each = [f"<li>{escape(mark.title)}, at {mark.at:,.2f} s</li>" for mark in marks]
    others = [f"<li>{escape(one.what)}, at {one.at_s:,.2f} s: {escape(one.why)}</li>" for one in passed_over]
    opened = "" if len(marks) + len(others) > MANY_FAULTS else " open"
    parts = [f"<details{opened}><summary>{counted(len(marks), 'fault')}, by number in the plots</summary><ol>", *each]
    parts += ["</ol>", *(["Passed over:<ul>", *others, "</ul>"] if others else []), "</details>"]
    return "\n".join(parts)


def _text(table: RenderableType) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _by_role(samples: Sequence[TimelineSample], value: Callable[[TimelineSample], float]) -> dict[str, Line]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        lines.setdefault(str(sample.role), []).append((sample.at_s, float(value(sample))))
    return dict(lines)


def _by_worker(samples: Sequence[WorkerSample]) -> dict[str, Line]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        lines.setdefault(sample.worker_id, []).append((sample.at_s, float(sample.num_running)))
    return dict(lines)


def _moved(samples: Sequence[TimelineSample]) -> Line:
    """Megabytes per second since the previous sample."""
    seen = [sample for sample in samples if sample.role == samples[0].role]
    return [
        (after.at_s, (after.num_moved_bytes - before.num_moved_bytes) / (after.at_s - before.at_s) / 1e6)
        for before, after in pairwise(seen)
    ]


def _spent(outcome: SimulationOutcome) -> Line:
    """The cost of all workers since the load began."""
    usd_per_s = {str(role): outcome.config.gpus_of(role) * outcome.config.usd_per_gpu_hour / 3600 for role in _ROLES}
    spent, before_s, line = 0.0, 0.0, list[tuple[float, float]]()
    for at_s, at_once in groupby(outcome.samples, key=lambda sample: sample.at_s):
        spent += (at_s - before_s) * sum(one.num_workers * usd_per_s[str(one.role)] for one in at_once)
        before_s = at_s
        line.append((at_s, spent))
    return line


def _distribution(records: Sequence[RequestRecord], name: str) -> dict[str, Line]:
    """A cumulative distribution, in milliseconds and percent, with at most a few hundred points."""
    values = sorted(value for record in records if not record.error and (value := getattr(record, name)) is not None)
    step = max(1, len(values) // 300)
    return {"": [(1000 * values[i], 100 * (i + 1) / len(values)) for i in range(0, len(values), step)]}


def _over_time(records: Sequence[RequestRecord]) -> dict[str, Line]:
    """Median and maximum of the requests in each time slot."""
    due = [(record.due_s or 0.0, record.ttft_s) for record in records]
    slot_s = max((due_s for due_s, _ in due), default=0.0) / NUM_SLOTS or 1.0
    slots: dict[int, list[float]] = {}
    for due_s, ttft_s in due:
        if ttft_s is not None:
            slots.setdefault(int(due_s / slot_s), []).append(1000 * ttft_s)
    median = [(slot * slot_s, sorted(ttfts)[len(ttfts) // 2]) for slot, ttfts in sorted(slots.items())]
    return {"median": median, "longest": [(slot * slot_s, max(ttfts)) for slot, ttfts in sorted(slots.items())]}


def plot(
    title: str,
    unit: str,
    lines: Mapping[str, Line],
    *,
    log: bool = False,
    whole: bool = False,
    until: float | None = None,
    marks: Sequence[Mark] = (),
) -> str:
    """A plot for both widths, of which the page shows one. `whole`: only whole numbers are labelled. `until`: the axis
    is from 0 to there."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    xs = [max(x, 1e-3) for x, _ in points] + [mark.at for mark in marks] if log else [x for x, _ in points]
    low, high = min(xs), max(max(xs), min(xs) * 1.001, 1e-9)
    if until is not None:
        low, high = 0.0, max(until, high)
    ups = _ticks(0.0, max(y for _, y in points) or 1.0, least=1.0 if whole else 0.0)
    acrosses = _log_ticks(low, high) if log else [x for x in _ticks(low, high) if x <= high]
    drawn = [
        _Drawing(size, ups, low=low, high=high, log=log).svg(title, unit, lines, acrosses, marks)
        for size in (WIDE, NARROW)
    ]
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(drawn)


class Dot(NamedTuple):
    """A point of a scatter plot. `title` is shown while it is pointed at. `style` is a class of the page's style."""

    x: float
    y: float
    title: str
    style: str


def scatter(title: str, unit: str, dots: Sequence[Dot], line: Line) -> str:
    """Points, and a line through some of them, for both widths. The axes begin at 0."""
    ups = _ticks(0.0, max((dot.y for dot in dots), default=0.0) or 1.0)
    high = max((dot.x for dot in dots), default=0.0) or 1.0
    acrosses = _ticks(0.0, high)
    drawn = [
        _Drawing(size, ups, low=0.0, high=acrosses[-1], log=False).dotted(title, unit, dots, line, acrosses)
        for size in (WIDE, NARROW)
    ]
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(drawn)


class _Drawing:
    """One plot in one size. A line that lies over another is dashed, so that both are visible. Above the plot are a row
    for the names of lines and a row for labels of marks, so that no text covers a curve. A label that would touch its
    neighbour is left out."""

    def __init__(self, size: Size, ups: Sequence[float], *, low: float, high: float, log: bool) -> None:
        self._size = size
        self._ups = ups
        self._low, self._high, self._log = low, high, log
        self._left = size.text(max((_number(y) for y in ups), key=len)) + 2 * GAP

    def svg(
        self, title: str, unit: str, lines: Mapping[str, Line], acrosses: Sequence[float], marks: Sequence[Mark]
    ) -> str:
        size, up, across = self._size, self._up, self._across
        parts = self._axes(title, unit, acrosses)
        name_at = self._left
        below: list[set[tuple[str, str]]] = []
        values: list[str] = []
        for k, (name, line) in enumerate(lines.items()):
            points = [f"{across(x):.1f},{up(y):.1f}" for x, y in line]
            pieces = set(pairwise(points))
            hidden = sum(not pieces.isdisjoint(other) for other in below)
            below.append(pieces)
            dashes = f' stroke-dasharray="{DASH} {DASH * hidden}"' if hidden else ""
            parts.append(f'<polyline class="s{k % NUM_COLOURS}"{dashes} points="{" ".join(points)}"/>')
            values += [
                f'<circle class="dot" cx="{across(x):.1f}" cy="{up(y):.1f}" r="4">'
                f"<title>{escape(f'{name}: ' if name else '')}{_number(y)} at {_number(x)} {unit}</title></circle>"
                for x, y in line
                if size is WIDE  # a touch screen cannot hover
            ]
            if name and name_at + size.text(name) <= size.width:
                parts.append(f'<text class="f{k % NUM_COLOURS}" x="{name_at:.1f}" y="14">{escape(name)}</text>')
                name_at += size.text(name) + 3 * GAP
        return "\n".join([*parts, *self._marks(marks), *values]) + "\n</svg>"

    def dotted(self, title: str, unit: str, dots: Sequence[Dot], line: Line, acrosses: Sequence[float]) -> str:
        up, across = self._up, self._across
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        circles = [
            f'<circle class="{dot.style}" cx="{across(dot.x):.1f}" cy="{up(dot.y):.1f}" r="4">'
            f"<title>{escape(dot.title)}</title></circle>"
            for dot in dots
        ]
        front = f'<polyline class="front" points="{points}"/>'
        return "\n".join([*self._axes(title, unit, acrosses), front, *circles]) + "\n</svg>"

    def _axes(self, title: str, unit: str, acrosses: Sequence[float]) -> list[str]:
        size, up, across = self._size, self._up, self._across
        parts = [f'<svg class="{size.name}" viewBox="0 0 {size.width} {HEIGHT}" role="img" ']
        parts[0] += f'aria-label="{escape(title)}">'
        for y in self._ups:
            ends = f'x1="{self._left:.0f}" x2="{size.width - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"'
            parts.append(f'<line class="grid" {ends}/>')
            at = f'x="{self._left - GAP:.0f}" y="{up(y) + 4:.1f}"'
            parts.append(f'<text {at} text-anchor="end">{_number(y)}</text>')
        labels = [(across(x), f"{_number(x)} {unit}") for x in acrosses]
        parts += [
            f'<text x="{x:.1f}" y="{HEIGHT - 9}" text-anchor="middle">{text}</text>' for x, text in self._apart(labels)
        ]
        return parts

    def _marks(self, marks: Sequence[Mark]) -> list[str]:
        seen = sorted((mark for mark in marks if self._low <= mark.at <= self._high), key=lambda mark: mark.at)
        parts = []
        for mark in seen:
            at = f"{self._across(mark.at):.1f}"
            ends = f'x1="{at}" x2="{at}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}"'
            parts.append(f'<g class="mark"><title>{escape(mark.title)}</title><line {ends}/></g>')
        for x, label in self._apart([(self._across(mark.at), mark.label) for mark in seen]):
            parts.append(f'<text class="mark" x="{x:.1f}" y="{TOP - 9}" text-anchor="middle">{escape(label)}</text>')
        return parts

    def _apart(self, labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
        """The labels with the positions of their centres, within the picture. Of labels that would touch, the first is
        kept."""
        kept, free = list[tuple[float, str]](), 0.0
        for x, text in labels:
            half = self._size.text(text) / 2
            x = min(x, self._size.width - half - 2)
            if x - half >= free:
                kept.append((x, text))
                free = x + half + GAP
        return kept

    def _across(self, x: float) -> float:
        low, high = self._low, self._high
        share = _log_share(max(x, 1e-3), low, high) if self._log else (x - low) / (high - low or 1.0)
        return self._left + share * (self._size.width - self._left - RIGHT)

    def _up(self, y: float) -> float:
        return HEIGHT - BOTTOM - y / self._ups[-1] * (HEIGHT - TOP - BOTTOM)


def _ticks(low: float, high: float, *, least: float = 0.0) -> list[float]:
    """Three to six round numbers, or fewer if they would be closer than `least`. The last is `high` or above."""
    rough = (high - low) / 4 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(least, next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.ceil(high / step - 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten. Both ends if these are too few, the powers alone if they are too many."""
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    found = [factor * power for power in powers for factor in (1, 2, 5) if low <= factor * power <= high]
    if len(found) < 2:
        return [low, high]
    return found if len(found) <= 8 else [one for one in powers if low <= one <= high]


def _log_share(x: float, low: float, high: float) -> float:
    return math.log(x / low) / (math.log(high / low) or 1.0)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
