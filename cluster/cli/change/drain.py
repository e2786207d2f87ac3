"""`baton drain WORKER`: a worker takes no new work, its requests migrate or finish, and then its process ends.

`baton drain --host ADDRESS` drains every worker of a host or pod that is about to end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import httpx
import typer

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, get_json, open_client, request_json
from protos.errors import DeadlineExceeded, Misconfigured, NotFound
from protos.hints import listed
from protos.listening import host_of
from router.fleet.worker import SUCCESSOR_S

PERIOD_S = 0.25

Worker = Mapping[str, Any]


def drain(
    worker_id: Annotated[str, typer.Argument(metavar="[WORKER]", help="Its name in `baton status`.")] = "",
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Drain every worker at this address, before its host or pod ends."
        ),
    ] = "",
    url: Annotated[str, typer.Option(help="URL of a gateway.")] = DEFAULT_URL,
    replaced: Annotated[
        bool, typer.Option("--replaced", help="Also wait until its successor is ready: one step of a rolling restart.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.0, help="Seconds to wait; the worker keeps draining after that.")
    ] = SUCCESSOR_S,
    api_key: AdminKey = "",
) -> None:
    """Drain a worker and wait until it has ended. Running requests move with their KV to other workers."""
    if bool(worker_id) == bool(host):
        raise Misconfigured("drain: give either a worker, or --host ADDRESS for every worker there")
    with open_client(url, api_key) as client:
        if host:
            leaving = _workers_at(client, host)
            if not leaving:
                typer.echo(f"no worker is at {host}")
        else:
            leaving = [_named(client, worker_id)]
        for worker in leaving:
            request_json(client, f"/admin/workers/{worker['worker_id']}/drain", "POST")
        for worker in leaving:
            _wait(
                client, worker["worker_id"], _incarnation(worker),
                replaced=replaced, timeout_s=timeout_s, show=printer(),
            )  # fmt: skip


def _workers_at(client: httpx.Client, host: str) -> list[Worker]:
    """Drained workers that may still have work."""
    workers = get_json(client, "/admin/status")["workers"]
    here = (worker for worker in workers if host_of(worker["address"]) == host)
    return [worker for worker in here if worker["state"] in ("ready", "draining")]


def _named(client: httpx.Client, worker_id: str) -> Worker:
    """Raises NotFound."""
    worker = _worker(client, worker_id)
    if worker is None:
        there = listed([one["worker_id"] for one in get_json(client, "/admin/status")["workers"]]) or "empty"
        raise NotFound(f"there is no worker {worker_id} at {client.base_url}: the fleet is {there}")
    return worker


def _wait(
    client: httpx.Client,
    worker_id: str,
    incarnation: int,
    *,
    replaced: bool,
    timeout_s: float,
    show: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when that incarnation has ended. Raises DeadlineExceeded."""
    deadline, moved = clock() + timeout_s, ""
    while True:
        worker = _worker(client, worker_id)
        own = worker is not None and _incarnation(worker) == incarnation
        gone = not own or worker is None or worker["state"] in ("lost", "drained", "joining")
        if own and worker is not None:
            moved = _moved(worker["load"])
        if gone and not replaced:
            show(f"{worker_id} has left{moved}")
            return
        if worker is not None and not own and worker["state"] == "ready":
            show(f"{worker_id} has been replaced{moved}")
            return
        line = f"{worker_id} has left, its successor is on its way" if gone or worker is None else _progress(worker)
        show(line)
        if clock() >= deadline:
            raise DeadlineExceeded(f"after {timeout_s:g} s: {line}. It drains on; `baton status` shows how far it is")
        sleep(PERIOD_S)


def _worker(client: httpx.Client, worker_id: str) -> Worker | None:
    workers = get_json(client, "/admin/status")["workers"]
    return next((worker for worker in workers if worker["worker_id"] == worker_id), None)


def _incarnation(worker: Worker) -> int:
    """0 for a worker that the gateway never connected to."""
    return int(worker["info"]["incarnation"]) if worker["info"] else 0


def _moved(load: Mapping[str, Any]) -> str:
    """The number of migrated requests in the worker's last report; nothing if it reported running requests, as their
    outcome is unknown."""
    is_last = not load["num_running"] + load["num_waiting"]
    return f": {load['num_moved']} moved on" if is_last and load["num_moved"] else ""


def _progress(worker: Worker) -> str:
    load = worker["load"]
    left = f"{load['num_running']} running, {load['num_waiting']} waiting, {load['num_moved']} moved on"
    return f"{worker['worker_id']} is {worker['state']}: {left}"


def printer() -> Callable[[str], None]:
    """On a terminal one line that changes, else a line for each change."""
    shown = ""
    on_terminal = sys.stdout.isatty()

    def show(line: str) -> None:
        nonlocal shown
        if line == shown:
            return
        if on_terminal:
            typer.echo(f"\r\x1b[K{line}", nl=not line.startswith(f"{line.split()[0]} is "))
        else:
            typer.echo(line)
        shown = line

    return show
