"""The calls that a driver answers (`cluster.ray.driver`): a method each, of values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from cluster.process.scratch_dir import PREFIX
from cluster.ray.actors import RayNodes
from cluster.ray.hosts import TakenShare
from cluster.ray.ray_session import Machines
from cluster.ray.shares import RayShares
from cluster.supervision.worker_placement import NodeResources, WorkerPlan


class RayCalls:
    """`contact_s`: ranks on nodes end after this time without a supervisor."""

    def __init__(self, machines: Machines, folder: Path, contact_s: float) -> None:
        self._machines = machines
        self._shares = RayShares(machines)
        self._nodes = RayNodes(machines, folder.name.removeprefix(PREFIX), contact_s)

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Raises the BatonError of the method, or what Ray raises."""
        work = getattr(self, method)
        kinds = get_type_hints(work).values()
        return await work(*(msgspec.convert(value, kind) for value, kind in zip(arguments, kinds, strict=False)))

    async def nodes(self) -> tuple[NodeResources, ...]:
        return await self._machines.nodes()

    async def take(self, plan: WorkerPlan) -> TakenShare:
        """Waits until there is room. Raises WorkerLost."""
        devices = await self._shares.take(plan)
        hosts: tuple[str, ...] = ()
        if not self._machines.is_private:
            hosts = await self._nodes.addresses(await self._shares.node_ids(plan.worker_id))
        return TakenShare(devices=devices, hosts=hosts)

    async def keep(self, plan: WorkerPlan, share: TakenShare) -> bool:
        """Reserves what a running worker has. Returns whether Ray gave exactly that."""
        return await self._shares.take_devices(plan, share.devices, share.hosts)

    async def give_back(self, worker_id: str) -> None:
        await self._shares.give_back(worker_id)

    async def leave(self, address: str) -> None:
        await self._nodes.leave(address)

    async def on_node(self, address: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Calls the `NodeActor` at the address. Raises Unavailable if Ray does not have the node."""
        return await self._nodes.call(address, method, *arguments)
