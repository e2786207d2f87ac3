"""A run or a sweep as one HTML file that needs nothing else: its table, and plots drawn as SVG."""

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

from cluster.bench.bench_report import Objective, RequestRecord
from cluster.simulate.results.summary import Summary, summary_table
from cluster.simulate.results.sweep import SweepTrial, front, sweep_table
from cluster.simulate.run.simulation import SimulationOutcome
from cluster.simulate.run.utilisation import TimelineSample
from protos.hints import counted, usd_figure
from protos.values import WorkerRole

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 240, 64, 36, 32, 30
NUM_COLOURS, NUM_SLOTS, NUM_POINTS = 5, 60, 300
_PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

Line = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A vertical line across a plot. `title` is shown while it is pointed at."""

    at: float
    title: str


class Dot(NamedTuple):
    """A point of a plot. `title` is shown while it is pointed at. `style` is a class of the page's style."""

    x: float
    y: float
    title: str
    style: str = "dot"


def plot(
    title: str,
    unit: str,
    lines: Mapping[str, Line],
    *,
    dots: Sequence[Dot] = (),
    marks: Sequence[Mark] = (),
    until: float = 0.0,
    log: bool = False,
) -> str:
    """Lines with a name each, and points. The axes begin at 0; across, a `log` axis begins at the first point."""
    points = [*(point for line in lines.values() for point in line), *((dot.x, dot.y) for dot in dots)]
    if not points:
        return ""
    xs = [x for x, _ in points] + [mark.at for mark in marks]
    low = max(min(xs), 1e-3) if log else 0.0
    high = max(*xs, until, low * 1.001, 1e-9)
    ups = _ticks(max(y for _, y in points))

    def across(x: float) -> float:
        share = math.log(max(x, low) / low) / math.log(high / low) if log else x / high
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / ups[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [f'<h2>{escape(title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in ups:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    acrosses = [low * (high / low) ** (k / 4) for k in range(5)] if log else [x for x in _ticks(high) if x <= high]
    parts += [
        f'<text x="{across(x):.1f}" y="{HEIGHT - 9}" text-anchor="middle">{_number(x)} {unit}</text>' for x in acrosses
    ]
    for number, (name, line) in enumerate(lines.items()):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="s{number % NUM_COLOURS}" points="{path}"/>')
        at = f'x="{LEFT + number % 8 * 82}" y="{12 + number // 8 * 12}"'
        parts.append(f'<text class="f{number % NUM_COLOURS}" {at}>{escape(name)}</text>')
    values = [Dot(x, y, f"{name} {_number(y)} at {_number(x)} {unit}") for name, line in lines.items() for x, y in line]
    parts += [
        f'<circle class="{dot.style}" cx="{across(dot.x):.1f}" cy="{up(dot.y):.1f}" r="4">'
        f"<title>{escape(dot.title)}</title></circle>"
        for dot in (*(values if not dots else ()), *dots)
    ]
    for mark in marks:
        ends = f'x1="{across(mark.at):.1f}" x2="{across(mark.at):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
        parts.append(f'<g class="mark"><title>{escape(mark.title)}</title><line {ends}/></g>')
    return "\n".join([*parts, "</svg>"])


def _ticks(high: float) -> list[float]:
    """Four to six round numbers from 0; the last is `high` or above."""
    rough = (high or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [k * step for k in range(math.ceil(high / step - 1e-9) + 1)] if high else [0.0, 1.0]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _document(title: str, table: RenderableType, *, command: str, note: str, parts: Sequence[str]) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as captured:
        console.print(table)
    figures, body = escape(captured.get()), "\n".join(parts)
    return _PAGE.substitute(
        title=f"Baton: {title}", command=escape(command), note=escape(note), figures=figures, parts=body
    )


def run_page(outcome: SimulationOutcome, summary: Summary, *, command: str, objective: Objective) -> str:
    samples, records = outcome.samples, outcome.records
    faults = sorted(summary.faults, key=lambda fault: fault.at_s)
    marks = [Mark(fault.at_s, f"{fault.what}, at {fault.at_s:,.2f} s") for fault in faults if not fault.passed_over]
    until = max((sample.at_s for sample in samples), default=0.0)

    def over_time(title: str, lines: Mapping[str, Line]) -> str:
        return plot(title, "s", lines, until=until, marks=marks)

    def by_pool(value: Callable[[TimelineSample], float]) -> dict[str, Line]:
        lines: dict[str, list[tuple[float, float]]] = {}
        for sample in samples:
            lines.setdefault(str(sample.role), []).append((sample.at_s, float(value(sample))))
        return dict(lines)

    first = [sample for sample in samples if sample.role == samples[0].role]
    moved = [
        (after.at_s, (after.num_moved_bytes - before.num_moved_bytes) / (after.at_s - before.at_s) / 1e6)
        for before, after in pairwise(first)
    ]
    waiting = by_pool(lambda sample: sample.num_waiting)
    waiting["gateways"] = [(sample.at_s, float(sample.num_queued)) for sample in first]
    plots = [
        over_time("Workers serving", by_pool(lambda sample: sample.num_workers)),
        over_time("Sequences running", by_pool(lambda sample: sample.num_running)),
        over_time("Requests waiting, on workers by pool and at the gateways", waiting),
        over_time("KV blocks in use, %", by_pool(lambda sample: 100 * sample.blocks_used)),
        over_time("Time to first token, ms, of what was asked at the time", _ttft_over_time(records)),
        over_time("KV moved between workers, MB a second", {"": moved}),
        over_time("USD spent on GPUs so far", {"": _spent(outcome)}),
    ]
    for title, name, bound_s in (
        ("Time to first token", "ttft_s", objective.ttft_s),
        ("Time per token", "tpot_s", objective.tpot_s),
        ("End to end", "e2e_s", None),
    ):
        bounds = [Mark(1000 * bound_s, "objective")] if bound_s is not None else []
        plots.append(plot(f"{title}: share of requests, %", "ms", _shares(records, name), log=True, marks=bounds))
    items = [
        f"<li>{escape(fault.what)}, at {fault.at_s:,.2f} s{escape(fault.why and f': {fault.why}')}" for fault in faults
    ]
    listed = [f"<details><summary>{counted(len(items), 'fault')}</summary><ol>", *items, "</ol></details>"]
    table = summary_table(replace(summary, faults=()))
    return _document("a simulated run", table, command=command, note="", parts=[*(listed if items else []), *plots])


def _spent(outcome: SimulationOutcome) -> Line:
    """The cost of all workers since the load began."""
    config = outcome.config
    usd_per_s = {role: config.gpus_of(role) * config.usd_per_gpu_hour / 3600 for role in WorkerRole}
    spent, before_s, line = 0.0, 0.0, list[tuple[float, float]]()
    for at_s, at_once in groupby(outcome.samples, key=lambda sample: sample.at_s):
        spent += (at_s - before_s) * sum(sample.num_workers * usd_per_s[sample.role] for sample in at_once)
        before_s = at_s
        line.append((at_s, spent))
    return line


def _shares(records: Sequence[RequestRecord], name: str) -> dict[str, Line]:
    """A cumulative distribution, in milliseconds and percent."""
    values = sorted(value for record in records if not record.error and (value := getattr(record, name)) is not None)
    step = max(1, len(values) // NUM_POINTS)
    return {"": [(1000 * values[i], 100 * (i + 1) / len(values)) for i in range(0, len(values), step)]}


def _ttft_over_time(records: Sequence[RequestRecord]) -> dict[str, Line]:
    """Median and maximum of the requests in each time slot."""
    slot_s = max((record.due_s or 0.0 for record in records), default=0.0) / NUM_SLOTS or 1.0
    slots: dict[int, list[float]] = {}
    for record in records:
        if record.ttft_s is not None:
            slots.setdefault(int((record.due_s or 0.0) / slot_s), []).append(1000 * record.ttft_s)
    by_time = [(slot * slot_s, sorted(ttfts)) for slot, ttfts in sorted(slots.items())]
    return {
        "median": [(at_s, ttfts[len(ttfts) // 2]) for at_s, ttfts in by_time],
        "longest": [(at_s, ttfts[-1]) for at_s, ttfts in by_time],
    }


def sweep_page(trials: Sequence[SweepTrial], verdict: str, *, command: str) -> str:
    """A plot for each target by USD an hour: the percentile, or the share of requests that meet the objective."""
    plots = []
    for place, target in enumerate(reached.target for reached in trials[0].reached):
        unit = "%" if target.objective is not None else "ms"
        title = f"{target}: {unit} by USD an hour (line: Pareto's front; green: all targets reached)"
        dots = [dot for trial in trials if (dot := _dot(trial, place)) is not None]
        line = [(dot.x, dot.y) for trial in front(trials) if (dot := _dot(trial, place)) is not None]
        plots.append(plot(title, "USD/h", {"": line}, dots=dots))
    return _document("a sweep", sweep_table(trials), command=command, note=verdict, parts=plots)


def _dot(trial: SweepTrial, place: int) -> Dot | None:
    """None if too few requests ended for the percentile to exist."""
    reached = trial.reached[place]
    is_share = reached.target.objective is not None
    height = 100 * reached.share if is_share else 1000 * reached.value_s
    if not math.isfinite(height):
        return None
    figure = "" if is_share else f", {reached.target.name} {reached.figure} ms"
    usd = usd_figure(trial.usd_per_hour)
    title = f"{trial.choice}: USD {usd} an hour, {reached.share:.1%} within{figure}"
    return Dot(trial.usd_per_hour, height, title, "good" if trial.is_good else "bad")
