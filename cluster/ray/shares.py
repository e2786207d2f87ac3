"""Shares of machines that Ray reserves for workers, as placement groups: a worker's ranks are on one machine, or, with
`ray.span_nodes` and where no machine has room for all, on several."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.ray.ray_session import Machines
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import WorkerLost

PINNED = 0.001  # of the custom resource by which Ray identifies a node
ROOM_S = 10.0  # for a group that fits where its worker already runs
REPORT_S = 20.0  # between two requests to nodes to report free resources


@dataclass(slots=True, eq=False)
class MachineShare:
    """A reservation in Ray: a group for the worker, or one for each rank if certain GPUs are needed."""

    groups: list[Any] = field(default_factory=list)
    devices: tuple[str, ...] = ()


class RayShares:
    """Placement groups of a running Ray."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._shares: dict[str, MachineShare] = {}  # by worker, as the locks
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def take(self, plan: WorkerPlan) -> tuple[str, ...]:
        """Waits until there is room. Returns the GPUs of each rank. Raises WorkerLost if Ray fails."""
        async with self._changing[plan.worker_id]:
            await self.give_back(plan.worker_id)
            return await self._take(plan)

    async def take_devices(self, plan: WorkerPlan, devices: tuple[str, ...], nodes: Sequence[str] = ()) -> bool:
        """Reserves the GPUs of a running worker, those of rank r on `nodes[r]`. Returns whether Ray gave exactly these,
        now or in an earlier call. Ray gives any free GPU, so wrong ones are held until the right one comes."""
        async with self._changing[plan.worker_id]:
            if plan.worker_id in self._shares:
                return self._shares[plan.worker_id].devices == devices
            return await self._take_devices(plan, devices, nodes)

    async def give_back(self, worker_id: str) -> None:
        share = self._shares.pop(worker_id, None)
        if share is not None:
            await self._remove(share.groups)

    async def node_ids(self, worker_id: str) -> Sequence[str]:
        from ray.util.placement_group import placement_group_table

        [group] = self._shares[worker_id].groups
        table = await self._machines.call(lambda: placement_group_table(group))
        return [str(node_id) for _, node_id in sorted(table["bundles_to_node_id"].items())]

    async def _take(self, plan: WorkerPlan) -> tuple[str, ...]:
        bundles = plan.bundles()
        group = await self._group(bundles, plan.worker_id, strategy="PACK" if plan.spans_nodes else "STRICT_PACK")
        share = self._shares[plan.worker_id] = MachineShare(groups=[group])
        try:
            await (_ready(group) if self._machines.is_private else self._ready_on_nodes(group, bundles[0]))
            if plan.gpus_per_rank:
                share.devices = await _devices(group, bundles)
        except BaseException:  # also if the caller was cancelled
            if self._shares.get(plan.worker_id) is share:
                del self._shares[plan.worker_id]
            await self._remove([group])
            raise
        return share.devices

    async def _take_devices(self, plan: WorkerPlan, devices: tuple[str, ...], nodes: Sequence[str]) -> bool:
        share = self._shares[plan.worker_id] = MachineShare(devices=devices)
        aside: dict[tuple[str, str], Any] = {}
        try:
            for rank, bundle in enumerate(plan.bundles()):
                node = nodes[rank] if nodes else ""
                pinned = {f"node:{node}": PINNED} if node else {}
                wanted = (node, devices[rank] if devices else "")
                while wanted not in aside:
                    group = await self._group([bundle | pinned], f"{plan.worker_id} rank {rank}")
                    try:
                        if not await _ready_now(group):
                            return False
                        aside[node, (await _devices(group, [bundle]))[0] if devices else ""] = group
                    finally:
                        if group not in aside.values():
                            await self._remove([group])
                if self._shares.get(plan.worker_id) is not share:  # given back meanwhile
                    return False
                share.groups.append(aside.pop(wanted))
            return True
        finally:
            await self._remove(list(aside.values()))

    async def _ready_on_nodes(self, group: Any, bundle: Mapping[str, float]) -> None:
        """Waits for a placement group. After the loss of a node Ray's head may forever count free resources of the
        other nodes as used (Ray 2.60): a node that runs a task reports them."""
        waiting = asyncio.ensure_future(_ready(group))
        try:
            while not (await asyncio.wait({waiting}, timeout=REPORT_S))[0]:
                await self._let_nodes_report(bundle)
            await waiting
        finally:
            waiting.cancel()

    async def _let_nodes_report(self, bundle: Mapping[str, float]) -> None:
        """Runs a task on nodes that could hold the bundle. Other nodes stay idle, so that an autoscaler can end
        them."""
        import ray

        def on_each_node() -> list[Any]:
            task, nodes = ray.remote(_visible_devices), ray.nodes()  # type: ignore[no-untyped-call]
            could = [n for n in nodes if all(n["Resources"].get(name, 0) >= size for name, size in bundle.items())]
            names = [f"node:{node['NodeManagerAddress']}" for node in could if node["Alive"]]
            return [task.options(num_cpus=0, resources={name: PINNED}).remote() for name in names]

        running = [asyncio.ensure_future(_done(one)) for one in await self._machines.call(on_each_node)]
        await asyncio.wait(running, timeout=REPORT_S)
        for one in running:
            one.cancel()

    async def _group(self, bundles: list[dict[str, float]], name: str, strategy: str = "STRICT_PACK") -> Any:
        from ray.util.placement_group import placement_group

        making = asyncio.ensure_future(
            self._machines.call(lambda: placement_group(bundles, strategy=strategy, name=name))
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:  # the thread makes it nevertheless
            await self._remove([await making])
            raise

    async def _remove(self, groups: Sequence[Any]) -> None:
        from ray.exceptions import RayError
        from ray.util.placement_group import remove_placement_group

        for group in groups:
            with suppress(RayError, ValueError):
                await self._machines.call(partial(remove_placement_group, group))


async def _done(task: Any) -> None:
    """Ignores the result of a node that is lost or too busy."""
    from ray.exceptions import RayError

    with suppress(RayError):
        await task


async def _ready(group: Any) -> None:
    from ray.exceptions import RayError

    try:
        await group.ready()
    except RayError as error:
        raise WorkerLost(f"Ray has no place for it: {str(error).strip().splitlines()[-1]}") from error


async def _ready_now(group: Any) -> bool:
    try:
        async with asyncio.timeout(ROOM_S):
            await _ready(group)
    except (TimeoutError, WorkerLost):
        return False
    return True


async def _devices(group: Any, bundles: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    look = ray.remote(_visible_devices)
    looking = [
        look.options(
            num_cpus=0, num_gpus=bundle["GPU"], max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number, bundle in enumerate(bundles)
    ]  # fmt: skip
    try:
        return tuple([await one for one in looking])
    except RayError as error:
        raise WorkerLost(
            f"Ray did not return the GPUs of the placement group: {str(error).strip().splitlines()[-1]}"
        ) from error


def _visible_devices() -> str:
    """Runs on the node, in a process of Ray."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
