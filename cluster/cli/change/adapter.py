"""`baton adapter load NAME PATH`, `unload NAME`, `list`: LoRA adapters of a running cluster."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl, open_client, request_json
from cluster.hub.download import local_model
from protos.errors import Misconfigured, Unavailable
from protos.hints import byte_count

_LOAD_TIMEOUT_S = 150.0


class AdapterVerb(StrEnum):
    LOAD = "load"
    UNLOAD = "unload"
    LIST = "list"


def adapter(
    verb: Annotated[AdapterVerb, typer.Argument(help="load NAME PATH, unload NAME, or list.")],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The model's name in requests.")] = "",
    path: Annotated[
        str,
        typer.Argument(metavar="[PATH]", help="Its folder on the workers' machines, or a name of the hub."),
    ] = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: AdminKey = "",
) -> None:
    """Load, unload or list the LoRA adapters of a running cluster. A loaded adapter is a model of every API at once;
    requests of an unloaded one run to their end."""
    _check_arguments(verb, name, path)
    with open_client(url, api_key) as client:
        client.timeout = httpx.Timeout(_LOAD_TIMEOUT_S)
        match verb:
            case AdapterVerb.LOAD:
                order = {"name": name, "path": str(Path(local_model(path, "path")).absolute())}
                report = request_json(client, "/admin/adapters", "POST", order)
                _show(report, f"{name} is loaded on")
            case AdapterVerb.UNLOAD:
                report = request_json(client, f"/admin/adapters/{name}", "DELETE")
                _show(report, f"{name} is unloaded on")
            case AdapterVerb.LIST:
                rows = request_json(client, "/admin/adapters")["adapters"]
                if not rows:
                    typer.echo("no adapter is loaded")
                for row in rows:
                    typer.echo(
                        f"{row['name']}: {row['path']}, rank {row['rank']}, {byte_count(row['num_bytes'])}, "
                        f"on {', '.join(row['workers'])}"
                    )


def _check_arguments(verb: AdapterVerb, name: str, path: str) -> None:
    """Raises Misconfigured."""
    given = bool(name) + bool(path)
    wanted = {AdapterVerb.LOAD: 2, AdapterVerb.UNLOAD: 1, AdapterVerb.LIST: 0}[verb]
    if given != wanted:
        form = {AdapterVerb.LOAD: " NAME PATH", AdapterVerb.UNLOAD: " NAME", AdapterVerb.LIST: ""}[verb]
        raise Misconfigured(f"write it as baton adapter {verb}{form}", param="adapter")


def _show(report: dict[str, Any], done: str) -> None:
    """Raises Unavailable if a worker has not obeyed."""
    if report["done"]:
        typer.echo(f"{done} {', '.join(report['done'])}")
    if report["failed"]:
        raise Unavailable("; ".join(f"{worker_id}: {why}" for worker_id, why in sorted(report["failed"].items())))
