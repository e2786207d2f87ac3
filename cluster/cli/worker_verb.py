"""`baton worker`: one worker in this terminal, without Ray or supervision, for debugging."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.cli import options
from cluster.config.cluster_config import ClusterConfig
from cluster.hub.local_models import with_local_models
from cluster.process.logs import LogFormat, ResultConsole, terminal
from cluster.process.ports import listen
from cluster.process.signals import StopSignal, stopped
from cluster.supervision.rank import Ended, Loading, LocalRank, RankSpec, Serving
from protos.errors import Misconfigured
from protos.values import WorkerRole
from protos.wire import raised
from workers.worker_config import RankId

log = logging.getLogger("baton.cluster")

Role = Annotated[WorkerRole, typer.Option("--role", help="What the worker does.")]
At = Annotated[str, typer.Option("--host", help="Address to listen on, which others connect to.")]
OnPort = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port of the worker's gRPC service; 0: any free one.")
]
Id = Annotated[str, typer.Option("--id", help="Name of the worker. Default: its role and a random word.")]


@options.takes_settings(
    "model",
    "served_name",
    "worker.device",
    "worker.dtype",
    "worker.kv_dtype",
    "worker.quantize",
    "worker.max_model_len",
    "worker.host_kv_gib",
    "worker.speculate",
    "peers.token",
)
def worker(
    given: options.GivenSettings,
    role: Role = WorkerRole.COLOCATED,
    host: At = "127.0.0.1",
    port: OnPort = 0,
    worker_id: Id = "",
    log_format: options.Log = LogFormat.TEXT,
) -> None:
    """Run one worker until Ctrl-C and print its address, for `baton gateway --worker`."""
    console = terminal(log_format)
    config = with_local_models(given.config())
    if config.worker.tp > 1:
        raise Misconfigured(
            f"worker.tp is {config.worker.tp}: one process is one rank, so use `baton serve`", param="tp"
        )
    if not config.peers.token:
        config = config.with_token()
        log.info("callers need this worker's token: BATON_TOKEN=%s baton gateway --worker ...", config.peers.token)
    orders = RankSpec(
        role=role,
        worker=config.worker,
        rank_id=RankId(
            worker_id=worker_id or f"{role}-{secrets.token_hex(3)}",
            incarnation=time.time_ns() // 1_000_000,
            host=host,
        ),
        port=port,
        peers=config.peers,
    )
    asyncio.run(run_worker(config, orders, console))


async def run_worker(config: ClusterConfig, orders: RankSpec, console: Console) -> None:
    """Runs until a signal. Raises the BatonError with which the worker ended."""
    config.check_model()
    config.peers.check()
    listen(orders.rank_id.host, orders.port).close()  # fails before the weights are read if the port is taken
    stop, rank = StopSignal(), LocalRank()
    rank.start(orders)
    await stop.before(_print_events(rank))
    log.info("%s", stopped(await stop.patiently(rank.leave(config.supervision.grace_s))))


async def _print_events(rank: LocalRank) -> None:
    while True:
        for event in await rank.news():
            match event:
                case Loading():
                    log.info("%s", event)
                case Serving(info=info):
                    log.info("%s serves %s at %s", info.worker_id, info.model, info.address)
                    ResultConsole().say(escape(info.address))
                case Ended(error=error):
                    if error is not None:
                        raise raised(error)
                    return
