"""A report as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.bench.bench_report import Percentiles, Report

LATE_S = 0.01
"""Requests sent later than this (p99) show that the load client is the bottleneck."""


def report_table(report: Report) -> RenderableType:
    parts: list[RenderableType] = [_rates(report), _times(report)]
    if report.late_s is not None and report.late_s.p99 > LATE_S:
        parts.append(
            Text(
                f"The load client sent 1 % of the requests {_ms(report.late_s.p99)} ms or more after their time: this "
                "machine is too busy for this rate, so the load was lower than --rate.",
                "yellow",
            )
        )
    return Group(*parts)


def _rates(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    failed = ", ".join(f"{num} {code}" for code, num in report.errors.items())
    rows = [
        ("requests completed", f"{report.num_completed:,} of {report.num_requests:,}"),
        ("failed", failed),
        ("duration", f"{report.duration_s:,.2f} s"),
        ("requests", f"{report.requests_per_s:,.2f} /s"),
        ("output tokens", f"{report.output_tokens_per_s:,.1f} /s"),
        ("total tokens", f"{report.total_tokens_per_s:,.1f} /s"),
        ("goodput", "" if report.goodput is None else f"{report.goodput:,.2f} /s ({report.good_share or 0:.1%})"),
        ("prompt tokens cached", "" if report.cached_share is None else f"{report.cached_share:.1%}"),
    ]
    for name, value in rows:
        if value:
            table.add_row(name, Text(value, "red" if name == "failed" else ""))
    return table


def _times(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for name, spread in (
        ("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("ITL", report.itl_s), ("E2E", report.e2e_s),
    ):  # fmt: skip
        if spread is not None:
            table.add_row(name, *_row(spread))
    return table


def _row(spread: Percentiles) -> tuple[str, ...]:
    return tuple(_ms(value) for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"
