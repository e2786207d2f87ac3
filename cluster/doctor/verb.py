"""`baton doctor`: what is wrong with a running cluster, one line a finding with its fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cluster.cli.admin_client import DEFAULT_URL, AdminKey
from cluster.doctor.examination import Examination, Finding, LaneProbe, LaneSpeed, Severity
from cluster.doctor.gather import examine
from cluster.doctor.rules import findings
from protos.hints import counted


def doctor(
    url: Annotated[str, typer.Option(help="URL of a gateway.")] = DEFAULT_URL,
    redis: Annotated[str, typer.Option(help="Redis to examine, as in --index.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Findings and measurements, as JSON.")] = False,
    probe: Annotated[bool, typer.Option(help="Move KV over the lanes and compare the answers.")] = True,
    api_key: AdminKey = "",
) -> None:
    """Find what is wrong with a running cluster, in 15 seconds. Exits with 0 (nothing), 1 (warnings) or 2 (faults)."""
    examination = examine(url, api_key, redis, probes=probe)
    found = findings(examination)
    if as_json:
        typer.echo(json.dumps(_view(examination, found), indent=2))
    else:
        for line in (*map(measured, examination.probes), *_left_out(examination), *map(described, found)):
            typer.echo(line)
        typer.echo(summary(examination, found))
    faults = any(one.severity is Severity.FAULT for one in found)
    raise typer.Exit(2 if faults else 1 if found else 0)


def described(one: Finding) -> str:
    return f"{one.severity} {one.name}: {one.subject}: {one.text.rstrip('.')}. Fix: {one.fix}"


def measured(probe: LaneProbe) -> str:
    """A lane's line: its transport, its speeds by size, and from how many tokens on moving beats computing."""
    speeds = ", ".join(f"{_speed(one)} with {one.num_bytes / 1e6:.1f} MB" for one in probe.speeds)
    at = probe.break_even_tokens
    even = "computing is faster" if at is None else f"moving is faster from {max(1, at):,.0f} tokens on"
    even = even if len(probe.speeds) > 1 else "one size was measured"
    return f"lane {probe.name} over {probe.transport or '?'}: {speeds or 'nothing arrived'}; {even}"


def summary(examination: Examination, found: Sequence[Finding]) -> str:
    num = len(found)
    seen = f"{counted(len(examination.workers), 'worker')}, {counted(len(examination.probes), 'lane')} examined"
    return f"{seen}: {counted(num, 'finding') if num else 'nothing found'}"


def _speed(one: LaneSpeed) -> str:
    return f"{one.num_bytes / (one.lane_s or one.seconds) / 1e9:.3f} GB/s"


def _left_out(examination: Examination) -> list[str]:
    left = ((examination.unprobed, "more lane"), (examination.untried, "more port"))
    return [f"no time for {counted(number, what)}" for number, what in left if number]


def _view(examination: Examination, found: Sequence[Finding]) -> dict[str, Any]:
    lanes = [asdict(one) | {"break_even_tokens": one.break_even_tokens} for one in examination.probes]
    redis = asdict(examination.redis) if examination.redis is not None else None
    return {
        "findings": [asdict(one) for one in found],
        "lanes": lanes,
        "num_lanes_left_out": examination.unprobed,
        "num_ports_left_out": examination.untried,
        "redis": redis,
        "clock_ahead_s": examination.clock_ahead_s,
        "num_workers": len(examination.workers),
    }
