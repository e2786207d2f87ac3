"""`baton usage` and `baton costs`: the sums of a gateway's ledger."""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl, open_client, request_json
from cluster.cli.terminal_tables import Sheet
from protos.errors import Misconfigured
from protos.hints import usd_figure
from router.observe.ledger.ledger_report import GROUPS

_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
Row = Mapping[str, Any]
Column = tuple[str, str, str]  # its title, its key in a row, its format

By = Annotated[str, typer.Option(help=f"Groups, comma-separated: {', '.join(GROUPS)}.")]
Since = Annotated[str, typer.Option(help="How far back, as 90m, 24h, 7d or 4w; or a date, as 2026-01-31 (UTC).")]
Until = Annotated[str, typer.Option(help="The end of the time, as --since; a date is its first second. Default: now.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


def usage(
    by: By = "tenant",
    since: Since = "24h",
    until: Until = "",
    as_csv: AsCsv = False,
    url: GatewayUrl = DEFAULT_URL,
    api_key: AdminKey = "",
) -> None:
    """Show who used how many tokens."""
    report = _report(by, since, until, url, api_key)
    _print(report["by"], _TOKENS, report["rows"], as_csv=as_csv)
    if not as_csv:
        typer.echo(_computed(report))


def costs(
    by: By = "tenant",
    since: Since = "24h",
    until: Until = "",
    as_csv: AsCsv = False,
    url: GatewayUrl = DEFAULT_URL,
    api_key: AdminKey = "",
) -> None:
    """Show what is charged, beside what it costs; the idle rest is a row of its own."""
    report = _report(by, since, until, url, api_key)
    names = report["by"]
    rows = [*report["rows"]]
    if report["device_hour_usd"]:
        group = dict.fromkeys(names, "") | {names[0]: "(idle)"} if names else {}
        rows.append({"group": group, "cost_usd": report["idle_usd"]})
    _print(names, _MONEY, rows, as_csv=as_csv)
    for one in report.get("budgets", ()) if not as_csv else ():
        typer.echo(_budget(one))
    if not as_csv and report["device_hour_usd"]:
        hours = report["fleet_device_s"] / 3600.0
        told = f"{hours:,.1f}" if hours >= 1 else f"{hours:.3f}"
        typer.echo(f"{told} device hours at {report['device_hour_usd']:g} USD: {usd_figure(report['fleet_usd'])} USD")


def _computed(report: Row) -> str:
    """Returns the line about tokens that workers computed."""
    output, missing = report["worker_output_tokens"], report["unrecorded_output_tokens"]
    line = f"workers computed {report['worker_prompt_tokens']:,} prompt tokens and {output:,} output tokens"
    if missing <= 0:
        return line
    return f"{line}: {missing:,} of these ({missing / output:.1%}) are in no row"


def _budget(budget: Row) -> str:
    limits = [
        f"{kind} {usd_figure(budget[f'{kind}_usd'])}" for kind in ("soft", "hard") if budget[f"{kind}_usd"] is not None
    ]
    until = datetime.fromtimestamp(budget["until_s"], UTC).strftime("%Y-%m-%d")
    return f"{budget['tenant']} has spent {usd_figure(budget['spent_usd'])} USD of {', '.join(limits)} until {until}"


_TOKENS: Sequence[Column] = (
    ("requests", "requests", ""),
    ("computed", "input_tokens", ""),
    ("cached", "cached_tokens", ""),
    ("output", "output_tokens", ""),
    ("reasoning", "reasoning_tokens", ""),
)
_MONEY: Sequence[Column] = (
    ("requests", "requests", ""),
    ("charged USD", "charged_usd", ".6f"),
    ("cost USD", "cost_usd", ".6f"),
    ("cache saved", "cache_saved_usd", ".6f"),
    ("drafts saved", "speculation_saved_usd", ".6f"),
    ("prefill s", "prefill_device_s", ".1f"),
    ("decode s", "decode_device_s", ".1f"),
)
_SPARE = ("prefill s", "decode s", "drafts saved", "cache saved")  # left out where the terminal is too narrow


def _report(by: str, since: str, until: str, url: str, api_key: str) -> dict[str, Any]:
    if unknown := [name for name in filter(None, by.split(",")) if name not in GROUPS]:
        raise Misconfigured(f"--by {unknown[0][:40]}: give some of {', '.join(GROUPS)}", param="by")
    now = time.time()
    asked, end = time_s("since", since, now), time_s("until", until, now) if until else None
    if end is not None and end <= asked:
        raise Misconfigured(f"--until {until} is not after --since {since}: give a later time", param="until")
    ending = "" if end is None else f"&until={end}"
    with open_client(url, api_key) as client:
        found = request_json(client, f"/admin/costs?since={asked}{ending}&by={by}")
    if (begun := found.get("since", asked)) != asked:
        times = [datetime.fromtimestamp(one, UTC) for one in (begun, found["rows_from"])]
        typer.echo(f"since {times[0]:%Y-%m-%d %H:%M} UTC: before {times[1]:%Y-%m-%d} whole hours are kept", err=True)
    return dict(found)


def time_s(option: str, given: str, now: float) -> int:
    """Seconds since 1970. Raises Misconfigured."""
    if found := re.fullmatch(r"(\d{1,6})([mhdw])", given):
        return int(now) - int(found[1]) * _SECONDS[found[2]]
    try:
        return int(datetime.strptime(given, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise Misconfigured(
            f"--{option} {given}: give minutes, hours, days or weeks, as 90m, 24h, 7d or 4w; or a date, as 2026-01-31",
            param=option,
        ) from None


def _print(names: Sequence[str], columns: Sequence[Column], rows: Sequence[Row], *, as_csv: bool) -> None:
    lines = [
        [row["group"][name] or "-" for name in names]
        + [format(row[key], form) if key in row else "" for _, key, form in columns]
        for row in rows
    ]
    titles = [*names, *(title for title, _, _ in columns)]
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([titles, *lines])
        return
    if not rows:
        typer.echo("no request in this time")
        return
    sheet = Sheet("", *titles, left=names, spare=_SPARE, whole="--csv")
    for line in lines:
        sheet.add_row(*line)
    Console().print(sheet)
