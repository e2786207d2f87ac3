"""`baton scale prefill=2 decode=3`, `baton flip decode-1 prefill` and `baton roll --model NEW` change the desired fleet
of a running cluster."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl, open_client, request_json
from cluster.cli.change.drain_verb import printer, until
from cluster.cli.status_verb import fleet_words, planner_words
from cluster.config.settings import paths_of, setting
from cluster.hub.download import local_model
from protos.errors import InvalidRequest, Misconfigured, Unavailable
from protos.values import WorkerRole

Change = Mapping[str, Any]
Why = Annotated[str, typer.Option("--why", help="The reason, for the list of changes.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return when the change is recorded, before it is reached.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait; the change goes on after that.")]


def scale(
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=COUNT...", help="As prefill=2 decode=3.")],
    url: GatewayUrl = DEFAULT_URL,
    why: Why = "",
    no_wait: NoWait = False,
    timeout_s: Timeout = 600.0,
    api_key: AdminKey = "",
) -> None:
    """Change the number of workers of a running cluster, and wait until they serve. Requests of workers that end move
    with their KV to others."""
    order = {"kind": "scale", "counts": parse_counts(counts), "why": why}
    _order(order, url, api_key, timeout_s=None if no_wait else timeout_s)


def flip(
    worker_id: Annotated[str, typer.Argument(metavar="WORKER", help="Its name in `baton status`.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    url: GatewayUrl = DEFAULT_URL,
    why: Why = "",
    no_wait: NoWait = False,
    timeout_s: Timeout = 600.0,
    api_key: AdminKey = "",
) -> None:
    """Change the role of a running worker, and wait until it has it. It keeps its weights and its cached KV; its
    requests move with their KV to other workers."""
    if role not in (WorkerRole.PREFILL, WorkerRole.DECODE):
        raise Misconfigured(f"flip {worker_id} {role}: give prefill or decode", param="role")
    order = {"kind": "flip", "worker_id": worker_id, "role": role, "why": why}
    _order(order, url, api_key, timeout_s=None if no_wait else timeout_s)


def roll(
    model: Annotated[
        str, typer.Option(help="The new model's path on workers' and gateways' hosts, or a hub's name.")
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="As worker.dtype=float32.")
    ] = None,
    surge: Annotated[int, typer.Option(min=0, max=64, help="Workers of each pool that start before others end.")] = 1,
    abort: Annotated[bool, typer.Option("--abort", help="Go back from the roll that is under way.")] = False,
    url: GatewayUrl = DEFAULT_URL,
    why: Why = "",
    no_wait: NoWait = False,
    timeout_s: Timeout = 3600.0,
    api_key: AdminKey = "",
) -> None:
    """Replace the workers of a running cluster by workers with another model or other settings, some at a time, and
    wait until all are replaced. Every answer is wholly of the old or of the new workers."""
    if abort and (model or settings):
        raise Misconfigured("--abort and --model or --set are both given: give one", param="abort")
    if not (abort or model or settings):
        raise Misconfigured("nothing is to change: give --model, --set or --abort", param="model")
    order: dict[str, Any] = {"kind": "abort", "why": why}
    if not abort:
        path = str(Path(local_model(model)).absolute()) if model else None
        order |= {"kind": "roll", "model": path, "settings": parse_settings(settings or ()), "surge": surge}
    _order(order, url, api_key, timeout_s=None if no_wait else timeout_s)


def parse_settings(given: Sequence[str]) -> dict[str, Any]:
    """Settings by path. Raises Misconfigured."""
    return {path: value for one in given for path, value in paths_of(setting(one))}


def parse_counts(given: Sequence[str]) -> dict[str, int]:
    """Numbers of workers by role. Raises Misconfigured."""
    counts: dict[str, int] = {}
    for one in given:
        role, _, number = one.partition("=")
        if role not in list(WorkerRole):
            roles = ", ".join(WorkerRole)
            raise Misconfigured(f"{one}: {role!r} is no role: give one of {roles}, as decode=3", param="counts")
        if not (number.isascii() and number.isdigit()):
            raise Misconfigured(
                f"{one}: {number!r} is no number of workers: give one from 0 to 4096, as {role}=2", param="counts"
            )
        if role in counts:
            raise Misconfigured(f"{one}: {role} is given twice: give it once", param="counts")
        counts[role] = int(number)
    return counts


def who() -> str:
    """The person at this terminal, as user@host."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name
        return socket.gethostname()


def _order(order: Mapping[str, Any], url: str, api_key: str, *, timeout_s: float | None) -> None:
    with open_client(url, api_key) as client:
        change = request_json(client, "/admin/capacity", "POST", {"who": who(), **order})
        if order["kind"] in ("scale", "flip") and (planner := request_json(client, "/admin/capacity").get("planner")):
            typer.echo(f"a planner decides here: {planner_words(planner, time.time())}")
        if not change["number"]:
            typer.echo(f"the fleet is {fleet_words(change['after'])} already")
        elif timeout_s is None:
            typer.echo(f"change {change['number']}: {fleet_words(change['before'])} -> {fleet_words(change['after'])}")
        else:
            until(lambda: _look(client, change), timeout_s=timeout_s, show=printer(), goes_on="It goes on")


def _look(client: httpx.Client, change: Change) -> tuple[str, bool]:
    """How far the change is, and whether it is reached. Raises Unavailable if it has failed, InvalidRequest if another
    change has replaced it."""
    target, view = fleet_words(change["after"]), request_json(client, "/admin/capacity")
    now = next((seen for seen in view["changes"] if seen["number"] == change["number"]), change)
    match now["state"]:
        case "reached":
            return f"the fleet is {target}, after {now['ended_s'] - now['at_s']:.1f} s", True
        case "failed":
            raise Unavailable(f"{target}: {now['reason']}; the fleet stays {fleet_words(view['desired'])}")
        case "replaced":
            replaced = now["reason"] or "another change has replaced this one"
            raise InvalidRequest(f"{target}: {replaced}; the fleet is to be {fleet_words(view['desired'])}")
    return f"fleet is to be {target}: waiting for {', '.join(view['waiting_for']) or 'the supervisor'}", False
