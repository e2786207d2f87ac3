"""`baton pools`: workers and their supervisor without a gateway, announced in Redis to any number of gateways."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli import options
from cluster.config.config import ClusterConfig
from cluster.discovery.base import ClusterAnnouncer
from cluster.planner.planned_fleet import PlannedFleet
from cluster.planner.planner import KeptLoad
from cluster.process.logs import LogFormat, terminal
from cluster.process.signals import StopSignal, stopped, stopping
from cluster.ray.pools import Pools
from cluster.supervision.placement import FIRST
from cluster.supervision.progress import Bars
from protos.errors import Misconfigured
from protos.hints import counted
from router.fleet_owner import DesiredFleet

log = logging.getLogger("baton.cluster")

HEARTBEAT_S = 1.0
Heartbeat = Annotated[
    Path | None, typer.Option("--heartbeat", metavar="FILE", help="Touch this file every second, for a liveness probe.")
]


@options.takes_settings("model", "served_name", "fleet", "discovery", *options.POOLS, *options.PLANNER, "ray.address")
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
    from cluster.capacity.controller import FleetController, continued
    from cluster.capacity.redis_fleet import learned_of, record_of, serve_calls
    from cluster.capacity.revise import rolls_of
    from cluster.config.revised import digest_of
    from cluster.discovery.redis import RedisAnnouncer, connect

    stop, bars = StopSignal(), Bars(console)
    given, config = config.peers.token, config.with_token()
    announcer = RedisAnnouncer(
        await connect(config.discovery), token="" if given else config.peers.token, fleet=config.fleet
    )
    client = await connect(config.discovery)
    store, configured = record_of(client, config.fleet), DesiredFleet(counts=dict(config.pools.counts()))
    learned = learned_of(client, config.fleet)
    settings = config
    record = continued(await store.load(), configured, digest_of(settings))
    if record is not None and record.desired != configured:
        log.info("going on with the fleet of an earlier `baton pools`: %s", record.desired)
        config = replace(config, pools=config.pools.with_counts(record.desired.counts))
    workers = Pools(config, bars, revision=record.desired.revision if record is not None else FIRST)
    rolls = rolls_of(workers, settings)
    controller = FleetController(workers, configured, record=record, store=store, rolls=rolls)
    kept = KeptLoad(earlier=await learned.load(), save=learned.save)
    owner = PlannedFleet(controller, config.planner_settings(), kept=kept)
    calls = asyncio.create_task(serve_calls(client, owner, fleet=config.fleet), name="fleet calls")
    try:
        await stop.before(_serve(workers, announcer, bars, owner))
        grace_s = config.supervision.grace_s if workers.plans else 0.0
        log.info("%s", stopping(grace_s))
        in_order = await stop.patiently(_stop(workers, grace_s))
    finally:
        calls.cancel()
        await owner.close()
        await workers.end()
        await store.close()
        await learned.close()
        await client.aclose()
        await announcer.close()
    log.info("%s", stopped(in_order))
    return in_order


async def _serve(workers: Pools, announcer: ClusterAnnouncer, bars: Bars, owner: PlannedFleet) -> None:
    with bars:
        await workers.prepare()
        await workers.start(announcer)
        await workers.ready()
    log.info("serving with %s", counted(len(workers.plans), "worker"))
    owner.start()
    await workers.wait()


async def _stop(workers: Pools, grace_s: float) -> None:
    await workers.drain(grace_s)
    await workers.stop()
