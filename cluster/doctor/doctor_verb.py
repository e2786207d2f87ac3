"""`baton doctor`: what is wrong with a running cluster, one line a finding with its fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl
from cluster.doctor.examination import Examination, Finding, LaneProbe, LaneSpeed, Severity
from cluster.doctor.gather import examine
from cluster.doctor.rules import findings
from protos.hints import counted


def doctor(
    url: GatewayUrl = DEFAULT_URL,
    redis: Annotated[str, typer.Option(help="Redis to examine, as in --index.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Findings and measurements, as JSON.")] = False,
    probe: Annotated[bool, typer.Option(help="Move KV over the lanes and compare the answers.")] = True,
    api_key: AdminKey = "",
) -> None:
    """Find what is wrong with a running cluster, in 15 seconds. Exits with 0 (nothing), 1 (warnings) or 2 (faults)."""
    seen = examine(url, api_key, redis, probes=probe)
    found = findings(*seen)
    if as_json:
        typer.echo(json.dumps(_view(seen, found), indent=2))
    else:
        probes = [probe for one in seen for probe in one.probes]
        for line in (*map(measured, probes), *_moved(seen), *_left_out(seen), *map(described, found)):
            typer.echo(line)
        typer.echo(summary(seen, found))
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


def summary(seen: Sequence[Examination], found: Sequence[Finding]) -> str:
    num, workers, lanes = len(found), sum(len(one.workers) for one in seen), sum(len(one.probes) for one in seen)
    models = f" of {len(seen)} models" if len(seen) > 1 else ""
    examined = f"{counted(workers, 'worker')}{models}, {counted(lanes, 'lane')} examined"
    return f"{examined}: {counted(num, 'finding') if num else 'nothing found'}"


def _speed(one: LaneSpeed) -> str:
    return f"{one.num_bytes / (one.lane_s or one.seconds) / 1e9:.3f} GB/s"


def _moved(seen: Sequence[Examination]) -> list[str]:
    """Repositories whose main branch has another commit than the served one, as a pinned revision may want."""
    return [
        f"{name.repository}: commit {name.revision[:12]} is served, main is {latest[:12]}: `baton roll --model "
        f"{name.repository}@main` brings it"
        for one in seen
        for name in one.hub_names
        if (latest := one.hub_commits.get(name.repository, "")) not in ("", name.revision)
    ]


def _left_out(seen: Sequence[Examination]) -> list[str]:
    left = (
        (seen[0].unseen, "more model"),
        (sum(one.unprobed for one in seen), "more lane"),
        (sum(one.untried for one in seen), "more port"),
    )
    return [f"no time for {counted(number, what)}" for number, what in left if number]


def _view(seen: Sequence[Examination], found: Sequence[Finding]) -> dict[str, Any]:
    first = seen[0]
    lanes = [asdict(one) | {"break_even_tokens": one.break_even_tokens} for each in seen for one in each.probes]
    redis = asdict(first.redis) if first.redis is not None else None
    return {
        "findings": [asdict(one) for one in found],
        "lanes": lanes,
        "num_lanes_left_out": sum(one.unprobed for one in seen),
        "num_ports_left_out": sum(one.untried for one in seen),
        "num_models_left_out": first.unseen,
        "redis": redis,
        "hub_commits": {name: commit for one in seen for name, commit in one.hub_commits.items()},
        "clock_ahead_s": first.clock_ahead_s,
        "num_models": len(seen),
        "num_workers": sum(len(one.workers) for one in seen),
    }
