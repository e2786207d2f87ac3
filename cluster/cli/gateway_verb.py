"""`baton gateway`: the router alone, for workers started elsewhere. Any number of replicas may run."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli import options
from cluster.gateway.run import run_gateway
from cluster.hub.local_models import with_local_models
from cluster.process.logs import LogFormat, terminal

At = Annotated[list[str] | None, typer.Option("--worker", metavar="HOST:PORT", help="Address of a worker. Repeatable.")]


@options.takes_settings(
    "model", "served_name", "fleet", "discovery", *options.GATEWAY, "worker.max_model_len", "peers.token", several=True
)
def gateway(given: options.GivenSettings, worker: At = None, log_format: options.Log = LogFormat.TEXT) -> None:
    """Serve HTTP and gRPC until Ctrl-C, for the workers at the given addresses or announced in Redis."""
    import uvloop

    configs = given.configs()
    console = terminal(log_format, access_log=configs[0].router.http.access_log)
    configs = tuple(with_local_models(config, weights=False) for config in configs)
    if not uvloop.run(run_gateway(configs, tuple(worker or ()), console, log_format)):
        raise typer.Exit(130)
