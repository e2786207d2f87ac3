"""Ranks on nodes of a Ray that Baton did not start, as their supervisor reaches them: through the driver, and an actor
on each node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from cluster.ray.driver_process import DriverProcess
from cluster.ray.hosts import RankConnection
from cluster.supervision.rank import Event, RankSpec
from cluster.supervision.rank_messages import RANK_MESSAGES
from cluster.supervision.rank_starter import CONTACT_S
from protos.errors import Unavailable, WorkerLost

Result = TypeVar("Result")

FIND_S = 1.0  # between two checks whether a lost node is back


class NodeHost:
    """A `Host`: one node. Its ranks end after `orphan_s` without contact."""

    def __init__(self, address: str, driver: DriverProcess, orphan_s: float) -> None:
        self.address = address
        self.driver = driver
        self._orphan_s = orphan_s

    async def meeting_place(self) -> tuple[str, int]:
        return await self._once("meeting_place", self.address, kind=tuple[str, int])

    async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
        return await self._once("start", name, dict(environment), leader, kind=int)

    async def order(self, name: str, pid: int, orders: RankSpec) -> RankConnection:
        packed = RANK_MESSAGES.encode("RankSpec", orders)
        return NodeLink(name, await self._once("order", name, pid, packed, kind=int), self)

    async def attach(self, name: str, pid: int) -> RankConnection:
        """Waits until Ray has the node. Raises WorkerLost if the node has been absent for so long that its ranks have
        ended by themselves."""
        limit_s = self._orphan_s + CONTACT_S
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return NodeLink(name, await self.call("attach", name, pid, kind=int), self)
                    except WorkerLost:  # the rank has ended
                        raise
                    except Unavailable:
                        await asyncio.sleep(FIND_S)
        except TimeoutError:
            raise WorkerLost(f"Ray has not had the machine {self.address} for {limit_s:g} s") from None

    async def end(self, name: str, pid: int) -> None:
        with suppress(WorkerLost):
            await self._once("end", name, pid, kind=type(None))

    async def call(self, method: str, *arguments: object, kind: type[Result]) -> Result:
        """Raises Unavailable without Ray or without the node, else the BatonError of the method."""
        return await self.driver.call("on_node", self.address, method, arguments, kind=kind)

    async def _once(self, method: str, *arguments: object, kind: type[Result]) -> Result:
        try:
            return await self.call(method, *arguments, kind=kind)
        except Unavailable as error:
            raise WorkerLost(error.message) from error


class NodeLink:
    """A `RankConnection` that is made again after the loss of its node or of Ray, which the rank outlives. Meanwhile
    the rank's health shows whether it lives."""

    def __init__(self, name: str, pid: int, node: NodeHost) -> None:
        self._name = name
        self._pid = pid
        self._node = node

    async def news(self) -> Sequence[Event]:
        driver = self._node.driver
        while True:
            try:
                packed = await self._node.call("news", self._name, kind=tuple[bytes, ...])
            except WorkerLost:  # the rank has ended
                raise
            except Unavailable:
                driver.doubt(f"Ray has lost the machine {self._node.address}", self._name)
                try:
                    await self._node.attach(self._name, self._pid)
                finally:
                    driver.doubt("", self._name)
            else:
                return tuple(RANK_MESSAGES.decode(event)[1] for event in packed)

    async def stop(self) -> None:
        await self._node.call("stop", self._name, kind=type(None))

    async def close(self) -> None:
        with suppress(Unavailable):
            await self._node.call("close", self._name, kind=type(None))
