"""The places of workers: shares of machines that Ray has reserved for them.

On this machine a worker keeps its place over its restarts and Ray's: a successor can start there while Ray is away. On
nodes of a Ray that Baton did not start nothing is reserved while Ray is away.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from cluster.ray.driver_process import DriverProcess
from cluster.ray.hosts import Host, TakenShare, WorkerPlace
from cluster.ray.node_hosts import NodeHost
from cluster.supervision.living import LivingWorker
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import BatonError, Unavailable

log = logging.getLogger("baton.cluster")


class Places:
    """A `WorkerPlaces`. `here`: this machine, None for nodes of a Ray that Baton did not start."""

    def __init__(self, driver: DriverProcess, here: Host | None, orphan_s: float) -> None:
        self._driver = driver
        self._here = here
        self._orphan_s = orphan_s
        self._taken: dict[str, TakenShare] = {}  # by worker
        self._ended: set[str] = set()  # workers on nodes whose share is given back; `_taken` has the nodes to leave

    @property
    def trouble(self) -> str:
        return self._driver.fault

    async def keep(self, plans: Sequence[WorkerPlan]) -> None:
        """Reserves the places of running workers in a new Ray, or warns: they serve either way. Raises Unavailable if
        that Ray is lost."""
        for plan in plans:
            share = self._taken.get(plan.worker_id)
            if share is None or plan.worker_id in self._ended:
                continue
            why = ""
            try:
                if await self._driver.call("keep", plan, share, kind=bool):
                    continue
            except BatonError as error:
                if not self._driver.is_up:
                    raise
                why = f": {error.message}"
            if self._taken.get(plan.worker_id) is not share or plan.worker_id in self._ended:
                continue
            log.warning(
                "worker %s: Ray could not reserve what it has (GPUs: %s): Ray may give the same to other programs%s",
                plan.worker_id, ", ".join(share.devices) or "none", why,
            )  # fmt: skip

    async def take(self, plan: WorkerPlan) -> WorkerPlace:
        while self._here is None or plan.worker_id not in self._taken:
            try:
                share = await self._driver.call("take", plan, kind=TakenShare)
            except Unavailable:
                if self._driver.is_up:
                    raise
                continue  # Ray was lost: the next one is called
            await self._move(plan.worker_id, share)
            break
        return self._place(plan, self._taken[plan.worker_id])

    async def retake(self, plan: WorkerPlan, living: LivingWorker) -> WorkerPlace:
        share = TakenShare(devices=living.devices, hosts=living.hosts if self._here is None else ())
        await self._move(plan.worker_id, share)
        return self._place(plan, share)

    async def give_back(self, plan: WorkerPlan) -> None:
        if self._here is None:
            self._ended.add(plan.worker_id)
            await self._try("give_back", plan.worker_id)

    async def release(self, worker_id: str) -> None:
        await self._move(worker_id, None)
        await self._try("give_back", worker_id)

    def _place(self, plan: WorkerPlan, share: TakenShare) -> WorkerPlace:
        if self._here is not None:
            return WorkerPlace(hosts=(self._here,) * plan.num_ranks, devices=share.devices)
        nodes = {address: NodeHost(address, self._driver, self._orphan_s) for address in share.hosts}
        return WorkerPlace(hosts=tuple(nodes[address] for address in share.hosts), devices=share.devices)

    async def _move(self, worker_id: str, share: TakenShare | None) -> None:
        """Records the worker's place, and leaves nodes of its former place without other workers."""
        before = self._taken.pop(worker_id, TakenShare())
        self._ended.discard(worker_id)
        if share is not None:
            self._taken[worker_id] = share
        used = {address for taken in self._taken.values() for address in taken.hosts}
        for address in {*before.hosts} - used:
            await self._try("leave", address)

    async def _try(self, method: str, argument: str) -> None:
        """Ignores errors: a lost Ray has nothing to give back."""
        if self._driver.is_up:
            with suppress(BatonError):
                await self._driver.call(method, argument, kind=type(None))
