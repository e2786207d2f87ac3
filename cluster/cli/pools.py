"""`baton pools`: workers and their supervisor without a gateway, announced in Redis to any number of gateways."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli import options
from cluster.config.config import ClusterConfig
from cluster.discovery.base import ClusterAnnouncer
from cluster.process.logs import LogFormat, terminal
from cluster.process.signals import StopSignal, stopped, stopping
from cluster.ray.pools import Pools
from cluster.supervision.progress import Bars
from protos.errors import Misconfigured
from protos.hints import counted

log = logging.getLogger("baton.cluster")

HEARTBEAT_S = 1.0
Heartbeat = Annotated[
    Path | None, typer.Option("--heartbeat", metavar="FILE", help="Touch this file every second, for a liveness probe.")
]


@options.takes_settings("model", "served_name", "discovery", *options.POOLS, "ray.address")
def pools(given: options.GivenSettings, heartbeat: Heartbeat = None, log_format: options.Log = LogFormat.TEXT) -> None:
    """Run and supervise workers until Ctrl-C, for every `baton gateway` with the same --discovery."""
    config, console = given.config(), terminal(log_format)
    if not asyncio.run(run_pools(config, console, heartbeat)):
        raise typer.Exit(130)


async def run_pools(config: ClusterConfig, console: Console, heartbeat: Path | None = None) -> bool:
    """Runs until a signal. Returns whether everything was stopped in order. Raises BatonError."""
    beating = asyncio.create_task(_keep_touching(heartbeat), name="heartbeat") if heartbeat is not None else None
    try:
        return await _run(config, console)
    finally:
        if beating is not None:
            beating.cancel()


async def _keep_touching(file: Path) -> None:
    """Touches a file: if the file grows old, this event loop hangs."""
    while True:
        _touch(file)
        await asyncio.sleep(HEARTBEAT_S)


def _touch(file: Path) -> None:
    try:
        file.touch()
    except OSError as error:
        log.warning("--heartbeat %s: %s", file, error.strerror)


async def _run(config: ClusterConfig, console: Console) -> bool:
    if not config.discovery:
        raise Misconfigured(
            "discovery is empty, so no gateway would find these workers: give --discovery redis://host:port",
            param="discovery",
        )
    config.peers.check()
    from cluster.discovery.redis import RedisAnnouncer, connect

    stop, bars = StopSignal(), Bars(console)
    given, config = config.peers.token, config.with_token()
    announcer = RedisAnnouncer(await connect(config.discovery), token="" if given else config.peers.token)
    workers = Pools(config, bars)
    try:
        await stop.before(_serve(workers, announcer, bars))
        grace_s = config.supervision.grace_s if workers.plans else 0.0
        log.info("%s", stopping(grace_s))
        in_order = await stop.patiently(_stop(workers, grace_s))
    finally:
        await workers.end()
        await announcer.close()
    log.info("%s", stopped(in_order))
    return in_order


async def _serve(workers: Pools, announcer: ClusterAnnouncer, bars: Bars) -> None:
    with bars:
        await workers.prepare()
        await workers.start(announcer)
        await workers.ready()
    log.info("serving with %s", counted(len(workers.plans), "worker"))
    await workers.wait()


async def _stop(workers: Pools, grace_s: float) -> None:
    await workers.drain(grace_s)
    await workers.stop()
