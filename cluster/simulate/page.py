"""A run as one HTML file that needs nothing else: figures, timelines and distributions, drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from rich.console import Console

from cluster.bench.report import Record
from cluster.simulate.report import Summary, summary_table
from cluster.simulate.simulation import Outcome
from cluster.simulate.timeline import Sample

WIDTH, HEIGHT, MARGIN = 720, 220, 46
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed")

Line = Sequence[tuple[float, float]]

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 780px; margin: 2rem auto; color: #1f2937; padding: 0 1rem }}
pre {{ background: #f3f4f6; padding: 1rem; overflow-x: auto; font-size: 13px }}
h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .3rem }}
svg {{ width: 100%; height: auto; background: #fff; border: 1px solid #e5e7eb }}
text {{ font: 11px system-ui, sans-serif; fill: #6b7280 }}
</style>
<h1>{title}</h1>
<p><code>{command}</code></p>
<pre>{figures}</pre>
<p>{latency}</p>
{plots}
</html>
"""


def page(outcome: Outcome, summary: Summary, *, command: str, latency: str = "") -> str:
    """One page that needs nothing else. `latency` says where steps' times are from, if not from a roofline."""
    samples = outcome.samples
    marks = [(fault.at_s, fault.what) for fault in summary.faults if not fault.passed_over]
    plots = [
        _plot("Sequences running", "s", _by_role(samples, lambda sample: sample.num_running), marks=marks),
        _plot(
            "Requests waiting, on workers by pool and at the gateways",
            "s",
            {
                **_by_role(samples, lambda sample: sample.num_waiting),
                "gateways": [(one.at_s, float(one.num_queued)) for one in samples if one.role == samples[0].role],
            },
            marks=marks,
        ),
        _plot("KV blocks in use, %", "s", _by_role(samples, lambda sample: 100 * sample.blocks_used), marks=marks),
    ]
    for title, name in (("Time to first token", "ttft_s"), ("Time per token", "tpot_s"), ("End to end", "e2e_s")):
        plots.append(_plot(f"{title}: share of requests, %", "ms, log", _distribution(outcome.records, name), log=True))
    return _PAGE.format(
        title="Baton: a simulated run",
        command=escape(command),
        latency=escape(latency),
        figures=escape(_text(summary)),
        plots="\n".join(plots),
    )


def _text(summary: Summary) -> str:
    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(summary_table(summary))
    return captured.get()


def _by_role(samples: Sequence[Sample], value: Callable[[Sample], float]) -> dict[str, Line]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        lines.setdefault(str(sample.role), []).append((sample.at_s, float(value(sample))))
    return dict(lines)


def _distribution(records: Sequence[Record], name: str) -> dict[str, Line]:
    """Cumulative, in milliseconds and percent, at most a few hundred points."""
    values = sorted(value for record in records if not record.error and (value := getattr(record, name)) is not None)
    step = max(1, len(values) // 300)
    return {"": [(1000 * values[i], 100 * (i + 1) / len(values)) for i in range(0, len(values), step)]}


def _plot(
    title: str, unit: str, lines: Mapping[str, Line], *, log: bool = False, marks: Sequence[tuple[float, str]] = ()
) -> str:
    """`marks`: what happened, and where across."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    xs = [max(x, 1e-3) for x, _ in points] if log else [x for x, _ in points]
    low, high, top = min(xs), max(max(xs), min(xs) * 1.001, 1e-9), max(max(y for _, y in points), 1e-9)

    def across(x: float) -> float:
        share = _log_share(max(x, 1e-3), low, high) if log else (x - low) / (high - low or 1.0)
        return MARGIN + share * (WIDTH - MARGIN - 12)

    def up(y: float) -> float:
        return HEIGHT - 30 - y / top * (HEIGHT - 50)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for k in range(5):
        y, x = top * k / 4, _log_point(low, high, k / 4) if log else low + (high - low) * k / 4
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - 12}" y1="{up(y):.1f}" y2="{up(y):.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>')
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{_number(x)}</text>')
    parts.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 1}" text-anchor="end">{escape(unit)}</text>')
    parts += [_mark(across(at), told) for at, told in marks if low <= at <= high]
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if name:
            place = MARGIN + 8 + 110 * list(lines).index(name)
            parts.append(f'<text x="{place}" y="14" style="fill:{colour}">{escape(name)}</text>')
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</svg>"


def _mark(x: float, told: str) -> str:
    return (
        f'<g class="fault"><title>{escape(told)}</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{HEIGHT - 30}" stroke="#111827" stroke-dasharray="3 3"/>'
        f'<text transform="translate({x + 3:.1f} 24) rotate(90)">{escape(told)}</text></g>'
    )


def _log_share(x: float, low: float, high: float) -> float:
    return math.log(x / low) / (math.log(high / low) or 1.0)


def _log_point(low: float, high: float, share: float) -> float:
    return float(low * (high / low) ** share)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
