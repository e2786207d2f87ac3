"""`baton drain WORKER`: a worker takes no new work, its requests migrate or finish, and then its process ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl, open_client, request_json
from cluster.supervision.rank_starter import MODULE, has_ended
from protos.errors import DeadlineExceeded, Misconfigured, NotFound
from protos.hints import listed
from router.fleet.member import SUCCESSOR_S

PERIOD_S = 0.25

Worker = Mapping[str, Any]


def drain(
    worker_id: Annotated[str, typer.Argument(metavar="[WORKER]", help="Its name in `baton status`.")] = "",
    here: Annotated[
        bool, typer.Option("--here", help="Drain every worker of this machine or pod, by a signal and without a key.")
    ] = False,
    url: GatewayUrl = DEFAULT_URL,
    replaced: Annotated[
        bool, typer.Option("--replaced", help="Also wait until its successor is ready: one step of a rolling restart.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.0, help="Seconds to wait; the worker keeps draining after that.")
    ] = SUCCESSOR_S,
    api_key: AdminKey = "",
) -> None:
    """Drain a worker and wait until it has ended. Running requests move with their KV to other workers."""
    if bool(worker_id) == here:
        raise Misconfigured("drain: give either a worker, or --here for every worker of this machine")
    if here:
        return _drain_here(timeout_s, printer())
    with open_client(url, api_key) as client:
        worker = _named(client, worker_id)
        request_json(client, f"/admin/workers/{worker_id}/drain", "POST")
        _wait(client, worker_id, _incarnation(worker), replaced=replaced, timeout_s=timeout_s)


def _drain_here(timeout_s: float, show: Callable[[str], None]) -> None:
    """Signals rank 0 of every worker of this machine. Raises DeadlineExceeded."""
    leaving, deadline = [*_leaders()], time.monotonic() + timeout_s  # those of two clusters have the same names
    if not leaving:
        show("no worker is here")
    for _, pid in leaving:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for worker_id, pid in leaving:
        while not has_ended(pid):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"after {timeout_s:g} s: {worker_id} drains on, in process {pid}")
            time.sleep(PERIOD_S)
        show(f"{worker_id} has left")


def _leaders() -> Iterator[tuple[str, int]]:
    """Workers in this network namespace, with the processes of their ranks 0."""
    here = os.stat("/proc/self/ns/net").st_ino
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or belongs to another user
            command = (entry / "cmdline").read_text().split("\0")
            worker_id, _, rank = Path(command[-2] if MODULE in command else "").name.rpartition(".")
            if rank == "0" and (entry / "ns" / "net").stat().st_ino == here:
                yield worker_id.rpartition(".")[0], int(entry.name)


def _named(client: httpx.Client, worker_id: str) -> Worker:
    """Raises NotFound."""
    worker = _worker(client, worker_id)
    if worker is None:
        there = listed([one["worker_id"] for one in request_json(client, "/admin/status")["workers"]]) or "empty"
        raise NotFound(f"there is no worker {worker_id} at {client.base_url}: the fleet is {there}")
    return worker


def _wait(client: httpx.Client, worker_id: str, incarnation: int, *, replaced: bool, timeout_s: float) -> None:
    """Returns when that incarnation has ended. Raises DeadlineExceeded."""
    moved = ""

    def look() -> tuple[str, bool]:
        nonlocal moved
        worker = _worker(client, worker_id)
        own = worker is not None and _incarnation(worker) == incarnation
        if own and worker is not None:
            moved = _moved(worker["load"])
        if worker is not None and own and worker["state"] not in ("lost", "drained", "joining"):
            return _progress(worker), False
        if not replaced:
            return f"{worker_id} has left{moved}", True
        if worker is not None and not own and worker["state"] == "ready":
            return f"{worker_id} has been replaced{moved}", True
        return f"{worker_id} has left, its successor is on its way", False

    until(look, timeout_s=timeout_s, show=printer(), goes_on="It drains on")


def _worker(client: httpx.Client, worker_id: str) -> Worker | None:
    workers = request_json(client, "/admin/status")["workers"]
    return next((worker for worker in workers if worker["worker_id"] == worker_id), None)


def _incarnation(worker: Worker) -> int:
    """0 for a worker that the gateway never connected to."""
    return int(worker["info"]["incarnation"]) if worker["info"] else 0


def _moved(load: Mapping[str, Any]) -> str:
    """The number of migrated requests in the worker's last report; "" if requests were still running, because their
    outcome is unknown."""
    is_last = not load["num_running"] + load["num_waiting"]
    return f": {load['num_moved']} moved on" if is_last and load["num_moved"] else ""


def _progress(worker: Worker) -> str:
    load = worker["load"]
    left = f"{load['num_running']} running, {load['num_waiting']} waiting, {load['num_moved']} moved on"
    return f"{worker['worker_id']} is {worker['state']}: {left}"


def until(
    look: Callable[[], tuple[str, bool]],
    *,
    timeout_s: float,
    show: Callable[[str], None],
    goes_on: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the line that `look` returns, until it says that this is the last one. Raises DeadlineExceeded."""
    deadline = clock() + timeout_s
    while True:
        line, is_over = look()
        show(line)
        if is_over:
            return
        if clock() >= deadline:
            raise DeadlineExceeded(f"after {timeout_s:g} s: {line}. {goes_on}; `baton status` shows how far it is")
        sleep(PERIOD_S)


def printer() -> Callable[[str], None]:
    """Prints one changing line on a terminal, else a line for each change."""
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
