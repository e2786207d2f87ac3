"""The flags that several verbs share, and how they become a ClusterConfig: file below, flags above."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.config.config import ClusterConfig
from cluster.config.settings import Table, make_blaming, make_config, merge, read_file, setting
from cluster.process.logs import LogFormat
from protos.errors import Misconfigured
from router.policies.names import check_names
from workers.config import Device, Dtype

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file of settings; `baton config` prints one.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting of the file, as worker.prefill_chunk=256. Repeatable."
    ),
]
Log = Annotated[LogFormat, typer.Option("--log-format", help="Lines for people, or JSON for machines.")]
AccessLog = Annotated[
    bool | None, typer.Option("--access-log/--no-access-log", help="A line for each request. Default: yes.")
]
Model = Annotated[str | None, typer.Option("--model", metavar="PATH", help="Folder of a Hugging Face checkpoint.")]
Name = Annotated[str | None, typer.Option("--served-name", help="What clients call the model. Default: its folder.")]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. Default: 127.0.0.1.")]
Port = Annotated[int | None, typer.Option("--port", help="Of HTTP; 0: any, and any for gRPC. Default: 8000.")]
GrpcPort = Annotated[int | None, typer.Option("--grpc-port", help="Of the gRPC service; 0: any. Default: 8001.")]
Processes = Annotated[int | None, typer.Option("--processes", help="Gateway processes behind the port. Default: 1.")]
Prefill = Annotated[
    int | None, typer.Option("--prefill", help="Number of prefill workers. Default: 1; 0: decode workers prefill too.")
]
Decode = Annotated[int | None, typer.Option("--decode", help="Number of decode workers. Default: 1.")]
Colocated = Annotated[bool, typer.Option("--colocated", help="Workers that prefill and decode, instead of two pools.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Number of colocated workers: --colocated goes without saying. Default: 1."),
]
Tp = Annotated[int | None, typer.Option("--tp", help="Tensor parallel ranks of every worker. Default: 1.")]
PrefillTp = Annotated[int | None, typer.Option("--prefill-tp", help="Ranks of a prefill worker. Default: --tp.")]
DecodeTp = Annotated[int | None, typer.Option("--decode-tp", help="Ranks of a decode worker. Default: --tp.")]
OnDevice = Annotated[Device | None, typer.Option("--device", help="Default: auto, GPUs if there are enough.")]
InDtype = Annotated[Dtype | None, typer.Option("--dtype", help="Default: auto, that of the checkpoint.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", metavar="TOKENS", help="Of a prompt and its answer, at most. Default: the model's own."
    ),
]
HostKv = Annotated[
    float | None,
    typer.Option("--host-kv-gib", min=0, help="Host memory of a worker for KV that its device evicts. Default: 0."),
]
Index = Annotated[
    str | None,
    typer.Option("--index", help="Where gateways share the prefix index, redis://host:port. Default: memory."),
]
Policy = Annotated[str | None, typer.Option("--policy", help="How requests are routed: docs/routing.md.")]
ShadowPolicy = Annotated[
    str | None,
    typer.Option("--shadow-policy", metavar="NAME", help="Another one that scores every request, and does no more."),
]
ToolParser = Annotated[
    str | None,
    typer.Option("--tool-parser", metavar="FORMAT", help="How calls of tools are written: docs/api.md."),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="BATON_TOKEN",
        show_envvar=True,
        help="What callers of a worker show it; better by the variable, as flags are seen by other users.",
    ),
]
RayAddress = Annotated[str | None, typer.Option("--ray-address", help="A Ray that runs. Default: one of our own.")]
Discovery = Annotated[
    str | None, typer.Option("--discovery", metavar="URL", help="redis://host:port where supervisor and gateways meet.")
]


def settings(file: Path | None, flags: Table, further: list[str] | None) -> ClusterConfig:
    """`flags` are tables, with None for what was not given. Raises Misconfigured."""
    said, over = read_file(file) if file is not None else {}, _given(flags)
    for one in further or ():
        over = merge(over, setting(one))
    return make_blaming(file, said, over, _make)


def _make(tables: Table) -> ClusterConfig:
    config = make_config(tables)
    check_names(config.router)
    return config


def pools(prefill: int | None, decode: int | None, colocated: bool, workers: int | None) -> Table:
    """The [pools] table. One kind of cluster on the command line replaces the other kind in the file."""
    if colocated or workers is not None:
        return {"prefill": prefill or 0, "decode": decode or 0, "colocated": 1 if workers is None else workers}
    both = {"prefill": prefill, "decode": decode}
    return both | {"colocated": 0} if prefill is not None or decode is not None else both


def refuse_others(context: typer.Context, why: str, taken: Collection[str]) -> None:
    """Raises Misconfigured for flags that would be dropped."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in taken
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise Misconfigured(f"{why}: leave {', '.join(given)} out", param=given[0].lstrip("-"))


def _given(flags: Table) -> Table:
    given: dict[str, Any] = {}
    for name, value in flags.items():
        if isinstance(value, dict):
            given[name] = _given(value)
        elif value is not None:
            given[name] = value
    return given
