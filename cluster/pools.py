"""The workers of a deployment: Ray, the plan of who runs where, and the supervisor that keeps it so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from cluster.config import ClusterConfig
from cluster.discovery import Announcer
from cluster.machines import Machines
from cluster.placement import Node, WorkerPlan, check_fits, plan, why_not_gpus
from cluster.progress import Bars
from cluster.supervisor import Supervisor
from protos.errors import BatonError, WorkerLost
from router.client import OpenChannel, WorkerClient, channels_of

log = logging.getLogger("baton.cluster")

DRAIN_PERIOD_S = 0.1
HEALTH_TIMEOUT_S = 5.0


class Pools:
    """`prepare` at any time, then `start`, `ready`, `wait`; `stop` undoes whatever was done, in any state."""

    def __init__(self, config: ClusterConfig, bars: Bars) -> None:
        self._config = config
        self._bars = bars
        self._machines = Machines(config.ray)
        self._supervisor: Supervisor | None = None
        self._supervising: asyncio.Task[None] | None = None
        self.plans: Sequence[WorkerPlan] = ()

    async def prepare(self) -> None:
        """Starts Ray, or finds it: seconds. Raises Misconfigured."""
        address = self._config.ray.address
        done = self._bars.step(f"connecting to Ray at {address}" if address else "starting Ray")
        await self._machines.start()
        done()

    async def start(self, announcer: Announcer) -> None:
        """Plans, and lets the supervisor loose. Raises Misconfigured when the machines cannot hold the plan."""
        from cluster.launcher import RayLauncher

        config, nodes = self._config, await self._machines.nodes()
        tp, device = config.worker.tp, config.worker.device
        if self._machines.is_private:
            check_fits(config.pools, nodes, tp=tp, device=device)
        self.plans = plan(config.pools, nodes, tp=tp, device=device, pool_resources=config.ray.pool_resources)
        self._say_why_on_cpu(nodes)
        self._supervisor = Supervisor(
            self.plans,
            launcher=RayLauncher(config, self._machines),
            announcer=announcer,
            check_health=partial(_check_health, channels_of(config.peers)),
            config=config.supervision,
            first_incarnation=time.time_ns() // 1_000_000,
            watch=self._bars.show,
        )
        self._supervising = asyncio.create_task(self._supervisor.run(), name="supervisor")

    async def ready(self) -> None:
        """Returns when every worker serves; raises the BatonError of one that never will."""
        assert self._supervisor is not None, "start() comes first"
        ready = asyncio.ensure_future(self._supervisor.ready())
        ended = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
        finally:
            ready.cancel()
            ended.cancel()

    async def wait(self) -> None:
        """Until `stop`; raises the BatonError of a worker that will never start."""
        assert self._supervising is not None, "start() comes first"
        await asyncio.shield(self._supervising)

    async def drain(self, grace_s: float) -> None:
        """No new work for any worker; returns when what runs has finished, at the latest after `grace_s`."""
        if self._supervisor is not None:
            channels = channels_of(self._config.peers)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.gather(*(_drain(channels, address) for address in self._supervisor.addresses()))

    async def stop(self) -> None:
        """Ends the workers; cancelled, it leaves that to `end`."""
        if self._supervisor is not None:
            await self._supervisor.stop()

    async def end(self) -> None:
        """The last: no process of ours is left after it."""
        await self.stop()
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        await self._machines.stop()

    def _say_why_on_cpu(self, nodes: Sequence[Node]) -> None:
        config = self._config
        if config.worker.device == "auto" and any(node.gpus for node in nodes) and self.plans[0].device == "cpu":
            log.warning("running on CPUs: %s", why_not_gpus(config.pools, nodes, tp=config.worker.tp))


async def _check_health(open_channel: OpenChannel, address: str) -> None:
    client = WorkerClient(
        address,
        connect_timeout_s=HEALTH_TIMEOUT_S,
        control_timeout_s=HEALTH_TIMEOUT_S,
        open_channel=open_channel,
    )
    try:
        health = await client.health()
    finally:
        await client.close()
    if not health.healthy:
        raise WorkerLost(health.reason)


async def _drain(open_channel: OpenChannel, address: str) -> None:
    client = WorkerClient(address, connect_timeout_s=2.0, control_timeout_s=2.0, open_channel=open_channel)
    try:
        while True:
            if not await client.drain():
                return
            await asyncio.sleep(DRAIN_PERIOD_S)
    except BatonError as error:
        log.warning("worker at %s could not be drained: %s", address, error.message)
    finally:
        await client.close()
