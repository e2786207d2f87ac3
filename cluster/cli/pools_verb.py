"""`baton pools`: workers and their supervisor without a gateway, announced in Redis to any number of gateways."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.cli import options
from cluster.config.cluster_config import ClusterConfig
from cluster.hub.local_models import with_local_models
from cluster.planner.planned_fleet import PlannedFleet
from cluster.planner.planner import KeptLoad
from cluster.process.logs import LogFormat, terminal
from cluster.process.scratch_dir import kill_users
from cluster.process.signals import StopSignal, stopped, stopping
from cluster.ray.pools import Pools
from cluster.ray.ray_session import short_folder
from cluster.supervision.start_progress import Bars
from cluster.supervision.worker_placement import FIRST
from protos.errors import Misconfigured
from protos.hints import counted
from router.fleet_owner import DesiredFleet

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from cluster.capacity.takeover import Takeover
    from cluster.discovery.redis_members import RedisAnnouncer

log = logging.getLogger("baton.cluster")

HEARTBEAT_S = 1.0
Heartbeat = Annotated[
    Path | None, typer.Option("--heartbeat", metavar="FILE", help="Touch this file every second, for a liveness probe.")
]


@options.takes_settings("model", "served_name", "fleet", "discovery", *options.POOLS, *options.PLANNER, "ray.address")
def pools(given: options.GivenSettings, heartbeat: Heartbeat = None, log_format: options.Log = LogFormat.TEXT) -> None:
    """Run and supervise workers until Ctrl-C, for every `baton gateway` with the same --discovery. Workers outlive this
    process if it is killed: the next one continues with them."""
    console = terminal(log_format)
    config = with_local_models(given.config())
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
    from cluster.capacity.redis_fleet import serve_calls
    from cluster.discovery.redis_members import RedisAnnouncer, connect

    stop, bars, orphan_s = StopSignal(), Bars(console), config.supervision.orphan_timeout_s
    announcer = RedisAnnouncer(await connect(config.discovery), orphan_s=orphan_s, fleet=config.fleet)
    stays = False
    async with AsyncExitStack() as closing:
        closing.push_async_callback(lambda: announcer.close(withdraw=not stays))
        client = await closing.enter_async_context(await connect(config.discovery))
        await announcer.own()
        workers, owner, takeover = await _open(config, client, announcer, closing, bars)
        for work in (serve_calls(client, owner, fleet=config.fleet), _yield(announcer, stop)):
            closing.callback(asyncio.create_task(work).cancel)
        await stop.before(_serve(workers, announcer, bars, owner, takeover))
        stays = announcer.replaced.is_set() or (stop.is_termination and bool(config.ray.address))
        if stays:
            log.info("stopping: the workers serve on for the next `baton pools`, for up to %g s", orphan_s)
            in_order = await stop.patiently(workers.leave())
        else:
            grace_s = config.supervision.grace_s if workers.plans else 0.0
            log.info("%s", stopping(grace_s))
            in_order = await stop.patiently(_stop(workers, grace_s))
    log.info("%s", stopped(in_order))
    return in_order


async def _open(
    config: ClusterConfig, client: Redis, announcer: RedisAnnouncer, closing: AsyncExitStack, bars: Bars
) -> tuple[Pools, PlannedFleet, Takeover | None]:
    """Opens the workers and the owner of their number, with the takeover from workers of an earlier process."""
    from cluster.capacity.controller import FleetController, continued
    from cluster.capacity.redis_fleet import learned_of, living_of, record_of
    from cluster.capacity.takeover import takeover_of
    from cluster.config.revised import digest_of, reviser

    store, living = record_of(client, config.fleet), living_of(client, config.fleet)
    learned = learned_of(client, config.fleet)
    for close in (store.close, living.close, learned.close):
        closing.push_async_callback(close)
    configured, origin, has_token = (
        DesiredFleet(counts=dict(config.pools.counts())),
        digest_of(config),
        config.peers.token,
    )
    record, left = await store.load(), await living.load()
    if (takeover := takeover_of(left, record, config)) is not None:
        config, record = takeover.config, takeover.record
    else:
        if left is not None:
            kill_users(short_folder() / left.folder)  # those on other machines end by themselves
        config, record, left = config.with_token(), continued(record, configured, origin), None
    if record is not None and record.desired != configured:
        log.info("going on with the fleet of an earlier `baton pools`: %s", record.desired)
        config = replace(config, pools=config.pools.with_counts(record.desired.counts))
    announcer.token = "" if has_token else config.peers.token
    revision = record.desired.revision if record is not None else FIRST
    workers = Pools(config, bars, revision=revision, keep=living.save, left=left)
    closing.push_async_callback(workers.end)
    controller = FleetController(
        workers, configured, record=record, store=store, revise=reviser(config), origin=origin,
        cut_off=takeover.cut_off(workers) if takeover is not None else None,
    )  # fmt: skip
    kept = KeptLoad(earlier=await learned.load(), save=learned.save)
    owner = PlannedFleet(controller, config.planner_settings(), kept=kept)
    closing.push_async_callback(owner.close)
    return workers, owner, takeover


async def _yield(announcer: RedisAnnouncer, stop: StopSignal) -> None:
    """Stops this process once another one has taken over its workers: both would end each other's."""
    await announcer.replaced.wait()
    log.error("another `baton pools` has taken over the workers while this one stood still: it ends")
    stop.requested.set()


async def _serve(
    workers: Pools, announcer: RedisAnnouncer, bars: Bars, owner: PlannedFleet, takeover: Takeover | None
) -> None:
    with bars:
        await workers.prepare()
        await workers.start(announcer.publish)
        if takeover is not None:
            await takeover.carry_out(owner)
        await workers.ready()
    log.info("serving with %s", counted(len(workers.plans), "worker"))
    owner.start()
    await workers.wait()


async def _stop(workers: Pools, grace_s: float) -> None:
    await workers.drain(grace_s)
    await workers.stop()
