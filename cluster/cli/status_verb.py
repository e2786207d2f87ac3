"""`baton status`: a gateway's /admin/status as tables of pools, workers, lanes and tickets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl, open_client, request_json
from cluster.cli.terminal_tables import Sheet, show
from kvtransfer.reshard import EIGHT_BITS
from protos.hints import byte_count, counted
from protos.model_files.hub_name import HubName
from router.fleet_owner import DesiredFleet, Revision

POOLS = ("prefill", "decode", "colocated")
STYLES = {
    "ready": "green", "draining": "yellow", "joining": "yellow", "drained": "yellow", "lost": "red",
    "incompatible": "red", "quarantined": "red", "stuck": "red",
}  # fmt: skip
HERE = ("ready", "draining")
"""States in which a worker reports its load; in other states its last report is stale."""

SHORT = 40  # a longer reason is printed below the table
LONG = 240  # longer reasons are cut here: --json has all of them

Worker = Mapping[str, Any]
Held = Sequence[tuple[str, Mapping[str, Any] | None]]
"""Tickets and blocks of each worker; None for a worker that did not answer."""


def status(
    url: GatewayUrl = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The gateway's whole reply, as JSON.")] = False,
    kv: Annotated[bool, typer.Option("--kv", help="Only KV: every ticket, lane and block tier.")] = False,
    api_key: AdminKey = "",
) -> None:
    """Show pools, workers, load, KV use, lanes and tickets of a running cluster."""
    answer = fetch_status(url, api_key, "/admin/kv" if kv else "/admin/status")
    show(answer, lambda: kv_tables(answer) if kv else status_tables(answer, url), as_json=as_json)


def fetch_status(url: str, api_key: str = "", path: str = "/admin/status") -> dict[str, Any]:
    """Raises Unavailable if no cluster answers, NotFound if another server does."""
    with open_client(url, api_key) as client:
        status: dict[str, Any] = request_json(client, path)
        return status


def kv_tables(state_of_kv: Mapping[str, Any]) -> RenderableType:
    """Prints /admin/kv as tables."""
    held: Held = [(one["worker_id"], one if one["tickets"] is not None else None) for one in state_of_kv["workers"]]
    silent = [worker_id for worker_id, one in held if one is None]
    reserved, oldest = byte_count(state_of_kv["num_bytes_reserved"]), _duration(state_of_kv["oldest_s"])
    parts: list[RenderableType] = [
        Text(f"{counted(state_of_kv['num_tickets'], 'ticket')}, {reserved} reserved, the oldest for {oldest}"),
        *([Text(f"no answer from {', '.join(silent)}", "red")] if silent else []),
    ]
    for table in (_tickets(held), _lanes(held), _tiers(held)):
        if table.row_count:
            parts += ["", table]
    return Group(*parts)


def status_tables(status: Mapping[str, Any], url: str) -> RenderableType:
    """Prints /admin/status as tables, without empty ones."""
    workers: Sequence[Worker] = sorted(status["workers"], key=_place)
    held = [(worker["worker_id"], status["kv"].get(worker["worker_id"])) for worker in workers]
    tables = (_pools(workers), _workers(workers), _speculation(workers), _lanes(held), _tickets(held))
    infos = [worker["info"] for worker in workers if worker["info"]]
    names = dict.fromkeys(HubName.of_cached(info["model_path"]) for info in infos)
    stored = [Text(f"model: {one}") for one in names if one]
    weights = dict.fromkeys(info["weights"] for info in infos)
    stored += [Text(f"weights: {one}") for one in weights if one]
    stored += [Text(f"KV: {one}") for one in dict.fromkeys(_kv_dtype(worker) for worker in workers) if one]
    parts: list[RenderableType] = [_headline(status, url), *_fleet(status.get("capacity")), *stored]
    for table in tables:
        if table.row_count:
            parts += ["", table]
    paused = [_paused(worker, one) for worker in workers if worker["state"] in HERE for one in _paused_drafts(worker)]
    if paused:
        parts += ["", *paused]
    reasons = [_reason(worker) for worker in workers if len(worker["reason"]) > SHORT]
    return Group(*parts, *([""] if reasons else []), *reasons)


def _kv_dtype(worker: Worker) -> str:
    """Returns the type of 8-bit keys and values, "" for wider ones."""
    groups = ((worker["info"] or {}).get("layout") or {}).get("groups", ())
    dtypes = {part["dtype"] for group in groups for part in group["parts"]}
    return ", ".join(sorted(dtypes & EIGHT_BITS))


def _reason(worker: Worker) -> Text:
    reason = str(worker["reason"])
    shown = reason if len(reason) <= LONG else f"{reason[:LONG].rstrip()} ..."
    return Text(f"{worker['worker_id']}: {shown}", STYLES.get(worker["state"], ""))


def _headline(status: Mapping[str, Any], url: str) -> Text:
    ready = Text("ready", "bold green") if status["ready"] else Text(f"not ready: {status['reason']}", "bold red")
    if asleep := status.get("asleep"):
        ready = Text(str(asleep), "bold yellow")
    joint = ", but " if status["ready"] else "; "
    degraded = (joint, (status["degraded"], "yellow")) if status.get("degraded") else ()
    others = [f"{url}/models/{name}" for name in status.get("models", ())[1:]]
    beside = f"\nother models, each with a status of its own (--url): {', '.join(others)}" if others else ""
    ports = ", ".join(map(str, status.get("processes", ())))
    several = (
        f"\ngateway processes, each with its own metrics, requests and page, at the ports {ports}" if ports else ""
    )
    state = f" at {url}{': ' if asleep else ' is '}"
    return Text.assemble((status["model"], "bold"), state, ready, *degraded, beside, several)


def _fleet(capacity: Mapping[str, Any] | None, now: Callable[[], float] = time.time) -> list[Text]:
    """Describes the desired fleet if it has changed, with its latest change, and the planner."""
    if not capacity:
        return []
    planner = [] if capacity.get("planner") is None else [Text(f"planner: {planner_words(capacity['planner'], now())}")]
    if not capacity["changes"]:
        return planner
    latest, waiting = capacity["changes"][-1], ", ".join(capacity["waiting_for"])
    ago = _duration(max(0.0, now() - latest["at_s"]))
    why = f" ({latest['why']})" if latest["why"] else ""
    outcome = f"{latest['state']}: {latest['reason']}" if latest["reason"] else latest["state"]
    if waiting and not latest["reason"]:
        outcome = f"waiting for {waiting}"
    style = {"failed": "red", "under way": "yellow"}.get(latest["state"], "yellow" if waiting else "")
    return [
        Text(f"fleet: {fleet_words(capacity['desired'])}", style),
        Text(f"       changed {ago} ago by {latest['who'] or 'an operator'}{why}, {outcome}", style),
        *planner,
    ]


def planner_words(planner: Mapping[str, Any], now_s: float) -> str:
    """Describes the limits of a planner, and until when it leaves an operator's change alone."""
    bounds = ", ".join(f"{role} {least} to {planner['most'][role]}" for role, least in planner["least"].items())
    until_s = planner["manual_until_s"]
    if until_s <= now_s:
        return bounds
    return f"{bounds}; an operator's change holds until {clock(until_s)}, for {_duration(until_s - now_s)} more"


def clock(at_s: float) -> str:
    """The time of day here."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def fleet_words(fleet: Mapping[str, Any]) -> str:
    """Describes a fleet: 1 prefill + 2 decode, and its revision unless it is the first."""
    return str(fleet_of(fleet))


def fleet_of(fleet: Mapping[str, Any]) -> DesiredFleet:
    """A fleet of the reply of /admin/capacity."""
    return DesiredFleet(counts=fleet["counts"], revision=Revision(**fleet.get("revision") or {}))


def _pools(workers: Sequence[Worker]) -> Sheet:
    table = Sheet(
        "Pools", "pool", "ready", "running", "waiting", "queued", "KV use", "tickets", "moved",
        spare=("moved", "tickets", "queued"),
    )  # fmt: skip
    for pool in sorted({_pool(worker) for worker in workers}, key=_rank):
        members = [worker for worker in workers if _pool(worker) == pool]
        loads = [worker["load"] for worker in members if worker["state"] in HERE]

        def total(name: str, loads: Sequence[Mapping[str, Any]] = loads) -> int:
            return sum(load[name] for load in loads)

        num_ready = sum(worker["state"] == "ready" for worker in members)
        table.add_row(
            pool,
            Text(f"{num_ready}/{len(members)}", "green" if num_ready == len(members) else "red"),
            *(f"{total(name):,}" for name in ("num_running", "num_waiting", "queued_prefill_tokens")),
            _share(total("num_blocks") - total("num_free_blocks"), total("num_blocks")),
            f"{total('num_tickets'):,}",
            _moved(loads),
        )
    return table


def _moved(loads: Sequence[Mapping[str, Any]]) -> str:
    """KV sent or received; for prefill pools also the share of that time that computation hid."""
    travelled_s, hidden_s = (sum(load[name] for load in loads) for name in ("transfer_s", "transfer_hidden_s"))
    hidden = f" ({hidden_s / travelled_s:.0%} hidden)" if hidden_s else ""
    return byte_count(sum(load["transfer_bytes"] for load in loads)) + hidden


def _workers(workers: Sequence[Worker]) -> Sheet:
    table = Sheet(
        "Workers", "worker", "state", "address", "process", "on", "running", "waiting", "KV", "cached",
        "prefill\ntok/s", "step", prose=("state",),
        spare=("process", "cached", "step", "prefill\ntok/s", "address", "on", "waiting", "KV"),
    )  # fmt: skip
    for worker in workers:
        info = worker["info"] or {}
        reason = worker["reason"] if len(worker["reason"]) <= SHORT else ""
        state = f"{worker['state']}: {reason}" if reason else worker["state"]
        table.add_row(
            _name(worker),
            Text(state, STYLES.get(worker["state"], "")),
            worker["address"],
            str(info.get("process_id") or "-"),
            info.get("device", "?"),
            *(_load(worker) if worker["state"] in HERE else ["-"] * 6),
        )
    return table


def _name(worker: Worker) -> str:
    """Adds the worker's role after a flip, when its name says another one."""
    worker_id, role = str(worker["worker_id"]), _pool(worker)
    named = worker_id.rpartition("-")[0]
    return f"{worker_id} ({role})" if named in POOLS and worker["info"] and named != role else worker_id


def _load(worker: Worker) -> list[str]:
    load = worker["load"]
    return [
        f"{load['num_running']:,}",
        f"{load['num_waiting']:,}",
        f"{1 - load['num_free_blocks'] / load['num_blocks']:.0%}" if load["num_blocks"] else "-",
        _cached(worker),
        f"{load['prefill_tokens_per_s']:,.0f}" if load["prefill_tokens_per_s"] else "-",
        f"{load['decode_step_s'] * 1000:,.1f} ms" if load["decode_step_s"] else "-",
    ]


def _speculation(workers: Sequence[Worker]) -> Sheet:
    """Drafts of each pool by source. A pool's totals are in its first row."""
    table = Sheet(
        "Speculation", "pool", "drafts of", "drafted", "accepted", "by position", "tokens a step", "saved",
        spare=("by position", "drafted"),
    )  # fmt: skip
    for pool in sorted({_pool(worker) for worker in workers}, key=_rank):
        members = [worker for worker in workers if _pool(worker) == pool and worker["state"] in HERE]
        loads = [load for worker in members if (load := worker["load"].get("speculation"))]
        num_rows = sum(load["num_rows"] for load in loads)
        if not num_rows:
            continue
        saved_s = sum(load["spared_s"] - load["spent_s"] for load in loads)
        total = [f"{sum(load['num_tokens'] for load in loads) / num_rows:.2f}", f"{max(0.0, saved_s):,.1f} s"]
        drafts = [one for load in loads for one in load["sources"]]
        for source in dict.fromkeys(one["source"] for one in drafts) or [""]:
            own = [one for one in drafts if one["source"] == source]
            drafted, accepted = (_sums([one[name] for one in own]) for name in ("drafted_at", "accepted_at"))
            shares = ", ".join(f"{part / whole:.0%}" for part, whole in zip(accepted, drafted, strict=True))
            cells = [f"{sum(drafted):,}", f"{sum(accepted) / sum(drafted):.0%}", shares] if drafted else ["0", "-", "-"]
            table.add_row(pool, source or "-", *cells, *total)
            total = ["", ""]
    return table


def _paused_drafts(worker: Worker) -> Sequence[Mapping[str, Any]]:
    paused: Sequence[Mapping[str, Any]] = (worker["load"].get("speculation") or {}).get("paused", ())
    return paused


def _paused(worker: Worker, paused: Mapping[str, Any]) -> Text:
    """Describes a proposer that is paused because its drafts did not pay."""
    return Text(
        f"{worker['worker_id']}: drafts of {paused['source']} are paused for {paused['num_steps']:,} steps: they "
        f"spared {paused['spared_s']:.2f} s and took {paused['spent_s']:.2f} s",
        "yellow",
    )


def _sums(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*columns, fillvalue=0)]


def _cached(worker: Worker) -> str:
    """Cached blocks, and how many of them are in host memory."""
    host = f" ({worker['num_host_blocks']:,} host)" if worker.get("num_host_blocks") else ""
    return f"{worker['num_cached_blocks']:,}{host}"


def _lanes(held: Held) -> Sheet:
    table = Sheet(
        "Lanes", "worker", "peer", "over", "state", "moved", "speed", "idle", prose=("state", "over"),
        spare=("idle", "speed", "moved"),
    )  # fmt: skip
    for worker_id, lane in _each(held, "lanes"):
        speed = f"{byte_count(lane['num_bytes'] / lane['busy_s'])}/s" if lane["busy_s"] else "-"
        moved, idle = byte_count(lane["num_bytes"]), _duration(lane["idle_s"])
        over, state, why = lane["transport"], lane["state"], lane["reason"]
        if why and state == "open":
            over = f"{over}: {why}"
        elif why:
            state = f"{state}: {why}"
        table.add_row(worker_id, lane["peer"], over, Text(state, STYLES.get(lane["state"], "")), moved, speed, idle)
    return table


def _tiers(held: Held) -> Sheet:
    table = Sheet(
        "Blocks", "worker", "tier", "in use", "cached", "hits", "evicted", "loaded", spare=("loaded", "evicted")
    )
    for worker_id, tier in _each(held, "tiers"):
        cells_of = [f"{tier[name]:,}" for name in ("num_cached", "num_hit_tokens", "num_evicted", "num_loaded")]
        cells_of[1] += " tokens"
        table.add_row(worker_id, tier["tier"], _share(tier["num_used"], tier["num_blocks"]), *cells_of)
    return table


def _tickets(held: Held) -> Sheet:
    table = Sheet(
        "Tickets", "worker", "ticket", "state", "way", "with", "age", "size", prose=("state",),
        spare=("way", "size", "age"),
    )  # fmt: skip
    for worker_id, ticket in _each(held, "tickets"):
        name = f"{ticket['ticket_id']} (try {ticket['generation']})"
        age, size = _duration(ticket["age_s"]), byte_count(ticket["num_bytes"])
        table.add_row(worker_id, name, ticket["state"], ticket["direction"], ticket["owner"], age, size)
    return table


def _each(held: Held, what: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((worker_id, one) for worker_id, kv in held if kv is not None for one in kv[what])


def _pool(worker: Worker) -> str:
    return str(worker["info"]["role"]) if worker["info"] else "unknown"


def _rank(pool: str) -> int:
    return POOLS.index(pool) if pool in POOLS else len(POOLS)


def _place(worker: Worker) -> tuple[int, str, int]:
    """Sorts by pool, then by number: decode-10 comes after decode-9."""
    name, _, number = str(worker["worker_id"]).rpartition("-")
    return (_rank(_pool(worker)), name, int(number)) if number.isdigit() else (_rank(_pool(worker)), name + number, 0)


def _share(part: int, whole: int) -> str:
    return f"{part:,}/{whole:,} ({part / whole:.0%})" if whole else "-"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 60
        else f"{seconds / 60:.0f} min"
        if seconds < 3600
        else f"{seconds / 3600:.1f} h"
    )
