"""Ranks on the nodes of a Ray cluster that Baton did not start: an actor on each node starts their processes and relays
their messages. The processes outlive the actor and Ray: the next supervisor finds them by the node's address.

Ray imports this module by name on every node, so importing it must not import torch or Ray.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from cluster.process.scratch_dir import PREFIX, share
from cluster.ray.hosts import RankConnection, free_port, ours
from cluster.ray.ray_session import Machines, short_folder
from cluster.supervision.rank import Event, RankSpec
from cluster.supervision.rank_starter import CONTACT_S, RankLink, end_process, start_process
from protos.errors import BatonError, WorkerLost
from protos.values import ErrorInfo
from protos.wire import error_info, raised

Result = TypeVar("Result")

NICENESS = "RAY_worker_niceness"
"""Without this variable Ray starts its workers with niceness 15, and ranks would starve beside other processes."""
FIND_S = 1.0  # between two checks whether a lost node is back


class NodeActor:
    """Runs on a node, until the supervisor that created it ends. `run` names the cluster. Errors are returned, as Ray
    would wrap raised ones."""

    def __init__(self, run: str, contact_s: float) -> None:
        self._folder = (
            short_folder() / f"{PREFIX}{run}-node"
        )  # beside the cluster's own folder if both are on one machine
        self._lock: int | None = None
        self._contact_s = contact_s
        self._links: dict[str, RankLink] = {}
        if NICENESS not in os.environ:
            with suppress(PermissionError):  # only root may; ranks inherit it
                os.setpriority(os.PRIO_PROCESS, 0, 0)

    async def meeting_place(self, address: str) -> tuple[str, int]:
        return address, free_port(address)

    async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int | ErrorInfo:
        return await _returned(self._start(name, environment, leader))

    async def _start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
        own = ours(os.environ) | dict(environment)
        lock = str(self._folder / f"{leader}.lock") if leader else ""
        contact_s = 0.0 if leader else self._contact_s
        work = partial(
            start_process, self._folder, name, own, lock=lock, contact_s=contact_s,
            inherits=[self._share()],  # ranks outlive the actor, and need their files until a supervisor finds them
        )  # fmt: skip
        return await asyncio.to_thread(work)

    async def order(self, name: str, pid: int, orders: RankSpec) -> int | ErrorInfo:
        return await _returned(self._link(name, partial(RankLink.start, self._folder, name, pid, orders, _unknown)))

    async def attach(self, name: str, pid: int) -> int | ErrorInfo:
        return await _returned(self._link(name, partial(RankLink.attach, self._folder, name, pid, _unknown)))

    async def end(self, name: str, pid: int) -> None:
        end_process(self._folder, name, pid)

    async def news(self, name: str) -> Sequence[Event] | ErrorInfo:
        return await _returned(self._links[name].news())

    async def stop(self, name: str) -> None:
        await self._links[name].stop()

    async def close(self, name: str) -> None:
        if (link := self._links.pop(name, None)) is not None:
            await link.close()

    async def _link(self, name: str, connect: Callable[[], Awaitable[RankLink]]) -> int:
        self._share()
        self._links[name] = link = await connect()
        return link.pid

    def _share(self) -> int:
        """Raises Misconfigured if another user could write in the folder."""
        if self._lock is None:
            self._lock = share(self._folder)
        return self._lock


class RayNode:
    """A `Host`: one node, through its actor."""

    def __init__(self, node_id: str, address: str, actor: Any, nodes: RayNodes) -> None:
        self.node_id = node_id
        self.address = address
        self.actor = actor
        self._nodes = nodes

    async def meeting_place(self) -> tuple[str, int]:
        host, port = await _result(self.actor.meeting_place.remote(self.address))
        return str(host), int(port)

    async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
        return int(await _result(self.actor.start.remote(name, dict(environment), leader)))

    async def order(self, name: str, pid: int, orders: RankSpec) -> RankConnection:
        return NodeLink(name, int(await _result(self.actor.order.remote(name, pid, orders))), self, self._nodes)

    async def attach(self, name: str, pid: int) -> RankConnection:
        return NodeLink(name, int(await _result(self.actor.attach.remote(name, pid))), self, self._nodes)

    async def end(self, name: str, pid: int) -> None:
        with suppress(WorkerLost):
            await _result(self.actor.end.remote(name, pid))


class NodeLink:
    """A `RankConnection`. Losing the actor does not mean that the rank is lost: a new actor is made once Ray has the
    node again. Meanwhile the rank's health shows whether it lives."""

    def __init__(self, name: str, pid: int, node: RayNode, nodes: RayNodes) -> None:
        self._name = name
        self._pid = pid
        self._node = node
        self._nodes = nodes

    async def news(self) -> Sequence[Event]:
        from ray.exceptions import RayError

        while True:
            try:
                reply = await self._node.actor.news.remote(self._name)
            except RayError:
                self._nodes.away(self._name, f"Ray has lost the machine {self._node.address}")
                try:
                    await self._find()
                finally:
                    self._nodes.away(self._name, "")
                continue
            if isinstance(reply, ErrorInfo):
                raise raised(reply)
            events: Sequence[Event] = reply
            return events

    async def stop(self) -> None:
        await _result(self._node.actor.stop.remote(self._name))

    async def close(self) -> None:
        with suppress(WorkerLost):
            await _result(self._node.actor.close.remote(self._name))

    async def _find(self) -> None:
        from ray.exceptions import RayError

        async with self._nodes.in_time(self._node.address):
            while True:
                await asyncio.sleep(FIND_S)
                self._node = await self._nodes.at(self._node.address)
                with suppress(RayError):
                    reply = await self._node.actor.attach.remote(self._name, self._pid)
                    if isinstance(reply, ErrorInfo):
                        raise raised(reply)
                    return


class RayNodes:
    """The nodes of a running Ray, with an actor on each node in use. `away` is called with the name of a rank whose
    node Ray has lost, and the reason; with "" when the node is back."""

    def __init__(
        self, machines: Machines, run: str, contact_s: float, away: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        self._machines = machines
        self.away = away
        self._run = run
        self._contact_s = contact_s
        self._actors: dict[str, Any] = {}
        self._making = asyncio.Lock()

    async def of(self, node_id: str) -> RayNode:
        """Raises WorkerLost if the node is gone."""
        for known, address in await self._alive():
            if known == node_id:
                return RayNode(node_id, address, await self._actor(node_id), self)
        raise WorkerLost("the worker's machine has left Ray")

    async def leave(self, node_id: str) -> None:
        """Ends the actor on a node on which no worker runs: with an actor the node would never be idle for Ray, and its
        autoscaler would keep it. Never fails."""
        import ray

        actor = self._actors.pop(node_id, None)
        if actor is not None:
            with suppress(Exception):  # Ray raises plain Exceptions; a node that is gone has no actor
                await self._machines.call(lambda: ray.kill(actor))

    async def at(self, address: str) -> RayNode:
        """Waits until Ray has a node with this address. Raises WorkerLost if the node has been absent for so long that
        its ranks have ended by themselves."""
        from ray.exceptions import RayError

        async with self.in_time(address):
            while True:
                with suppress(WorkerLost, RayError):  # Ray has not listed its nodes yet, or loses this one meanwhile
                    for node_id, known in await self._alive():
                        if known == address:
                            return RayNode(node_id, address, await self._actor(node_id), self)
                await asyncio.sleep(FIND_S)

    @asynccontextmanager
    async def in_time(self, address: str) -> AsyncIterator[None]:
        """Raises WorkerLost if the ranks on the node have had no contact for so long that they have ended."""
        limit_s = self._contact_s + CONTACT_S
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise WorkerLost(f"Ray has not had the machine {address} for {limit_s:g} s") from None

    async def _alive(self) -> list[tuple[str, str]]:
        """Raises WorkerLost if Ray cannot list its nodes."""
        import ray

        try:
            nodes = await self._machines.call(ray.nodes)
        except Exception as error:  # Ray raises plain Exceptions
            raise WorkerLost(f"Ray cannot list its nodes: {_last_line(error)}") from error
        return [(str(node["NodeID"]), str(node["NodeManagerAddress"])) for node in nodes if node["Alive"]]

    async def _actor(self, node_id: str) -> Any:
        from ray.exceptions import RayError

        async with self._making:
            actor = self._actors.get(node_id)
            if actor is not None:
                try:
                    await actor.__ray_ready__.remote()
                    return actor
                except RayError:
                    pass
            self._actors[node_id] = actor = await self._machines.call(lambda: self._make(node_id))
            return actor

    def _make(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return ray.remote(NodeActor).options(
            num_cpus=0, max_restarts=0, max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._run, self._contact_s)  # fmt: skip


def _unknown(pid: int) -> int | None:
    """The exit status of a process that is no child of the actor's."""
    return None


async def _returned(work: Awaitable[Result]) -> Result | ErrorInfo:
    try:
        return await work
    except (BatonError, OSError) as error:
        return error_info(error if isinstance(error, BatonError) else WorkerLost(str(error)))


async def _result(call: Awaitable[Any]) -> Any:
    """Raises the BatonError that the actor returned, or WorkerLost if the actor is gone."""
    from ray.exceptions import RayError

    try:
        reply = await call
    except RayError as error:
        raise WorkerLost(f"Ray has lost the machine of its process: {_last_line(error)}") from error
    if isinstance(reply, ErrorInfo):
        raise raised(reply)
    return reply


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
