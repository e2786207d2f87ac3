"""A run as one HTML file: its table, and plots over time drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from string import Template

from rich.console import Console

from cluster.bench.bench_report import RequestRecord
from cluster.bench.result_files import writing
from cluster.simulate.results.summary import Summary, summary_table
from cluster.simulate.run.simulation import SimulationOutcome
from cluster.simulate.run.utilisation import TimelineSample
from protos.hints import counted
from protos.values import WorkerRole

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 240, 64, 36, 32, 30
NUM_SLOTS = 60
_PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

Line = Sequence[tuple[float, float]]
Mark = tuple[float, str]
"""Seconds and a title: a vertical line across a plot."""


def plot(title: str, lines: Mapping[str, Line], *, marks: Sequence[Mark] = (), until: float = 0.0) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    ups, acrosses = _ticks(max(y for _, y in points)), _ticks(max(until, *(x for x, _ in [*points, *marks])))

    def across(x: float) -> float:
        return round(LEFT + x / acrosses[-1] * (WIDTH - LEFT - RIGHT), 1)

    def up(y: float) -> float:
        return round(HEIGHT - BOTTOM - y / ups[-1] * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<h2>{escape(title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in ups:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y)}" y2="{up(y)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 4}" text-anchor="end">{_number(y)}</text>')
    parts += [f'<text x="{across(x)}" y="{HEIGHT - 9}" text-anchor="middle">{_number(x)} s</text>' for x in acrosses]
    for number, (name, line) in enumerate(lines.items()):
        path = " ".join(f"{across(x)},{up(y)}" for x, y in line)
        parts.append(f'<polyline class="s{number}" points="{path}"/>')
        parts.append(f'<text class="f{number}" x="{LEFT + number * 82}" y="12">{escape(name)}</text>')
    for at_s, what in marks:
        ends = f'x1="{across(at_s)}" x2="{across(at_s)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
        parts.append(f'<g class="mark"><title>{escape(what)}</title><line {ends}/></g>')
    return "\n".join([*parts, "</svg>"])


def _ticks(high: float) -> list[float]:
    """Returns four to six round numbers from 0; the last is `high` or above."""
    rough = (high or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [k * step for k in range(math.ceil(high / step - 1e-9) + 1)] if high else [0.0, 1.0]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def write_page(path: Path, outcome: SimulationOutcome, summary: Summary, command: str) -> None:
    """Raises Misconfigured."""
    samples = outcome.samples
    faults = sorted(summary.faults, key=lambda fault: fault.at_s)
    marks = [(fault.at_s, f"{fault.what}, at {fault.at_s:,.2f} s") for fault in faults if not fault.passed_over]

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
    lines_of: dict[str, Mapping[str, Line]] = {
        "Workers serving": by_pool(lambda sample: sample.num_workers),
        "Sequences running": by_pool(lambda sample: sample.num_running),
        "Requests waiting, on workers by pool and at the gateways": waiting,
        "KV blocks in use, %": by_pool(lambda sample: 100 * sample.blocks_used),
        "Time to first token, ms, of requests sent at the time": _ttft_over_time(outcome.records),
        "KV moved between workers, MB a second": {"": moved},
        "USD spent on GPUs so far": {"": _spent(outcome)},
    }
    until = max((sample.at_s for sample in samples), default=0.0)
    plots = [plot(title, lines, marks=marks, until=until) for title, lines in lines_of.items()]
    items = [
        f"<li>{escape(fault.what)}, at {fault.at_s:,.2f} s{escape(fault.why and f': {fault.why}')}" for fault in faults
    ]
    listed = [f"<details><summary>{counted(len(items), 'fault')}</summary><ol>", *items, "</ol></details>"]
    console = Console(width=120, no_color=True)
    with console.capture() as captured:
        console.print(summary_table(replace(summary, faults=())))
    parts = "\n".join([*(listed if items else []), *plots])
    page = _PAGE.substitute(command=escape(command), figures=escape(captured.get()), parts=parts)
    with writing("html", path):
        path.write_text(page, encoding="utf-8")


def _spent(outcome: SimulationOutcome) -> Line:
    config = outcome.config
    usd_per_s = {role: config.gpus_of(role) * config.usd_per_gpu_hour / 3600 for role in WorkerRole}
    spent, before_s, line = 0.0, 0.0, list[tuple[float, float]]()
    for at_s, at_once in groupby(outcome.samples, key=lambda sample: sample.at_s):
        spent += (at_s - before_s) * sum(sample.num_workers * usd_per_s[sample.role] for sample in at_once)
        before_s = at_s
        line.append((at_s, spent))
    return line


def _ttft_over_time(records: Sequence[RequestRecord]) -> dict[str, Line]:
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
