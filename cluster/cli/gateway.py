"""`baton gateway`: the router alone, for workers that others start. As many replicas as one likes."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli import options
from cluster.gateway.run import run_gateway
from cluster.process.logs import LogFormat, terminal

At = Annotated[list[str] | None, typer.Option("--worker", metavar="HOST:PORT", help="Address of a worker. Repeatable.")]


def gateway(
    model: options.Model = None,
    worker: At = None,
    discovery: options.Discovery = None,
    host: options.Host = None,
    port: options.Port = None,
    grpc_port: options.GrpcPort = None,
    processes: options.Processes = None,
    index: options.Index = None,
    policy: options.Policy = None,
    shadow_policy: options.ShadowPolicy = None,
    tool_parser: options.ToolParser = None,
    max_model_len: options.MaxModelLen = None,
    token: options.Token = None,
    served_name: options.Name = None,
    file: options.ConfigFile = None,
    further: options.Set = None,
    log_format: options.Log = LogFormat.TEXT,
    access_log: options.AccessLog = None,
) -> None:
    """Serves HTTP and gRPC until Ctrl-C, for the workers at the given addresses or announced in Redis."""
    import uvloop

    given = {
        "model": model, "served_name": served_name, "host": host, "port": port, "grpc_port": grpc_port, "index": index,
        "discovery": discovery, "processes": processes, "peers": {"token": token},
        "worker": {"max_model_len": max_model_len},
        "router": {
            "policy": policy, "shadow_policy": shadow_policy, "tool_parser": tool_parser, "access_log": access_log,
        },
    }  # fmt: skip
    config = options.settings(file, given, further)
    console = terminal(log_format, access_log=config.router.access_log)
    if not uvloop.run(run_gateway(config, tuple(worker or ()), console, log_format)):
        raise typer.Exit(130)
