"""Ranks on the nodes of a Ray cluster that Baton did not start: an actor on each node starts their processes and relays
their messages. The processes outlive the actor and Ray: the next supervisor finds them by the node's address.

Ray imports this module by name on every node, so importing it must not import torch or Ray.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from cluster.process.scratch_dir import PREFIX, share
from cluster.ray.hosts import free_port, ours
from cluster.ray.ray_session import Machines, short_folder
from cluster.supervision.rank import RankSpec
from cluster.supervision.rank_messages import RANK_MESSAGES, AttachRank
from cluster.supervision.rank_starter import RankLink, end_process, start_process
from protos.errors import BatonError, Unavailable, WorkerLost
from protos.values import ErrorInfo
from protos.wire import error_info, raised

Result = TypeVar("Result")
Asked = ParamSpec("Asked")

NICENESS = "RAY_worker_niceness"
"""Without this variable Ray starts its workers with niceness 15, and ranks would starve beside other processes."""


def _returned(work: Callable[Asked, Awaitable[Result]]) -> Callable[Asked, Awaitable[Result | ErrorInfo]]:
    @wraps(work)
    async def answer(*args: Asked.args, **kwargs: Asked.kwargs) -> Result | ErrorInfo:
        try:
            return await work(*args, **kwargs)
        except (BatonError, OSError) as error:
            return error_info(error if isinstance(error, BatonError) else WorkerLost(str(error)))

    return answer


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

    @_returned
    async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
        own = ours(os.environ) | dict(environment)
        lock = str(self._folder / f"{leader}.lock") if leader else ""
        contact_s = 0.0 if leader else self._contact_s
        work = partial(
            start_process, self._folder, name, own, lock=lock, contact_s=contact_s,
            inherits=[self._share()],  # ranks outlive the actor, and need their files until a supervisor finds them
        )  # fmt: skip
        return await asyncio.to_thread(work)

    @_returned
    async def order(self, name: str, pid: int, packed: bytes) -> int:
        """`packed`: the RankSpec."""
        return await self._link(name, pid, RANK_MESSAGES.decode(packed)[1])

    @_returned
    async def attach(self, name: str, pid: int) -> int:
        return await self._link(name, pid, AttachRank())

    async def end(self, name: str, pid: int) -> None:
        end_process(self._folder, name, pid)

    @_returned
    async def news(self, name: str) -> Sequence[bytes]:
        return [RANK_MESSAGES.encode(type(event).__name__, event) for event in await self._linked(name).news()]

    @_returned
    async def stop(self, name: str) -> None:
        await self._linked(name).stop()

    async def close(self, name: str) -> None:
        if (link := self._links.pop(name, None)) is not None:
            await link.close()

    async def _link(self, name: str, pid: int, first: RankSpec | AttachRank) -> int:
        self._share()
        # A process of the node is no child of the actor's: its exit status is unknown.
        self._links[name] = link = await RankLink.connect(self._folder, name, pid, first, lambda _: None)
        return link.pid

    def _linked(self, name: str) -> RankLink:
        """Claims the link of a rank. Raises Unavailable if an earlier actor of this node has it."""
        if name not in self._links:
            raise Unavailable("this actor has no link to the rank")
        return self._links[name]

    def _share(self) -> int:
        """Raises Misconfigured if another user could write in the folder."""
        if self._lock is None:
            self._lock = share(self._folder)
        return self._lock


class RayNodes:
    """The nodes of a running Ray, with an actor on each node in use."""

    def __init__(self, machines: Machines, run: str, contact_s: float) -> None:
        self._machines = machines
        self._run = run
        self._contact_s = contact_s
        self._actors: dict[str, Any] = {}  # by address
        self._making = asyncio.Lock()

    async def call(self, address: str, method: str, *arguments: Any) -> Any:
        """Calls the actor on the node. Raises the BatonError that it returns, or Unavailable without the node."""
        from ray.exceptions import RayError, RayTaskError

        actor = await self._actor(address)
        try:
            reply = await getattr(actor, method).remote(*arguments)
        except RayError as error:
            lives = isinstance(error, RayTaskError)  # its method failed
            if not lives and self._actors.get(address) is actor:
                del self._actors[address]
            raise Unavailable(f"Ray has lost the machine of its process: {_last_line(error)}") from error
        if isinstance(reply, ErrorInfo):
            raise raised(reply)
        return reply

    async def addresses(self, node_ids: Sequence[str]) -> tuple[str, ...]:
        """Raises WorkerLost if a node is gone."""
        alive = dict(await self._alive())
        if not alive.keys() >= set(node_ids):
            raise WorkerLost("the worker's machine has left Ray")
        return tuple(alive[node_id] for node_id in node_ids)

    async def leave(self, address: str) -> None:
        """Ends the actor on a node without workers: Ray counts a node with an actor as busy, so its autoscaler would
        keep it. Never fails."""
        import ray

        actor = self._actors.pop(address, None)
        if actor is not None:
            with suppress(Exception):  # Ray raises plain Exceptions; a node that is gone has no actor
                await self._machines.call(lambda: ray.kill(actor))

    async def _alive(self) -> list[tuple[str, str]]:
        """Ids and addresses. Raises Unavailable if Ray cannot list its nodes."""
        import ray

        try:
            nodes = await self._machines.call(ray.nodes)
        except Exception as error:  # Ray raises plain Exceptions
            raise Unavailable(f"Ray cannot list its nodes: {_last_line(error)}") from error
        return [(str(node["NodeID"]), str(node["NodeManagerAddress"])) for node in nodes if node["Alive"]]

    async def _actor(self, address: str) -> Any:
        async with self._making:
            if address not in self._actors:
                ids = [node_id for node_id, known in await self._alive() if known == address]
                if not ids:
                    raise Unavailable(f"Ray does not have the machine {address}")
                self._actors[address] = await self._machines.call(lambda: self._make(ids[0]))
            return self._actors[address]

    def _make(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return ray.remote(NodeActor).options(
            num_cpus=0, max_restarts=0, max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._run, self._contact_s)  # fmt: skip


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
