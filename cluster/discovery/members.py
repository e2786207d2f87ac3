"""How gateways learn of workers: the supervisor announces them, a gateway follows. The router's `Fleet` is a `Members`.

supervisor ─▶ Announcements ── Announced ─▶ AnnouncedMembers ── add / remove_worker ... ─▶ Members          one process
supervisor ─▶ Announcements ── Announced ─▶ RedisAnnouncer ═▶ Redis ═▶ RedisDiscovery ─▶ the same          several
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from protos.errors import BatonError
from router.fleet.successors import Successor

log = logging.getLogger("baton.discovery")


class Members(Protocol):
    """The workers of a gateway. Adding one again with another address moves it."""

    def starting(self, worker_id: str, successor: Successor | None) -> None:
        """A process of the worker is being started, or (None) no longer announced. Ends with `add_worker`."""
        ...

    def add_worker(self, address: str, *, worker_id: str) -> None: ...

    async def remove_worker(self, worker_id: str) -> None: ...

    def set_degraded(self, reason: str) -> None:
        """Publishes the fault of the cluster behind the workers, for `degraded`; "" without a fault."""
        ...


class Announcer(Protocol):
    """The supervisor's side. Never fails: an announcement that cannot be made now is made as soon as possible."""

    async def starting(self, worker_id: str, successor: Successor) -> None:
        """Announces that a process of the worker is starting; called again while it reads its weights. Gateways let
        running answers wait for it until the worker is announced or withdrawn, or until this announcer falls silent."""
        ...

    async def announce(self, worker_id: str, address: str) -> None:
        """The worker serves at this address (host:port), also after a restart."""
        ...

    async def withdraw(self, worker_id: str) -> None:
        """The worker will not come back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A supervisor's announcements: addresses of serving workers and starting processes, by worker id; the cluster's
    fault, or ""; and the run's token, if it made one."""

    workers: dict[str, str] = field(default_factory=dict)
    starting: dict[str, Successor] = field(default_factory=dict)
    degraded: str = ""
    token: str = ""


Publish = Callable[[Announced], Awaitable[None]]


class Announcements:
    """An `Announcer` that publishes one value, whenever it changes, from `begin` to `end`."""

    def __init__(self) -> None:
        self._announced = Announced()
        self._publish: Publish | None = None

    async def begin(self, publish: Publish) -> None:
        self._publish = publish
        await publish(self._announced)

    def end(self) -> None:
        self._publish = None

    async def starting(self, worker_id: str, successor: Successor) -> None:
        await self._change(starting=self._announced.starting | {worker_id: successor})

    async def announce(self, worker_id: str, address: str) -> None:
        starting = _without(self._announced.starting, worker_id)
        await self._change(workers=self._announced.workers | {worker_id: address}, starting=starting)

    async def withdraw(self, worker_id: str) -> None:
        workers, starting = self._announced.workers, self._announced.starting
        await self._change(workers=_without(workers, worker_id), starting=_without(starting, worker_id))

    async def set_degraded(self, reason: str) -> None:
        if reason != self._announced.degraded:
            await self._change(degraded=reason)

    async def _change(self, **changes: Any) -> None:
        self._announced = replace(self._announced, **changes)
        if self._publish is not None:
            await self._publish(self._announced)


class AnnouncedMembers:
    """Tells `members` the differences between an announcement and the one before."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._last = Announced()

    async def publish(self, now: Announced) -> None:
        last, self._last = self._last, now
        if now.degraded != last.degraded:
            self._members.set_degraded(now.degraded)
        for worker_id, successor in now.starting.items():
            if last.starting.get(worker_id) != successor:
                self._members.starting(worker_id, successor)
        started = last.starting.keys() - now.starting.keys()
        for worker_id in started - now.workers.keys():
            self._members.starting(worker_id, None)
        for worker_id, address in now.workers.items():
            if last.workers.get(worker_id) != address or worker_id in started:
                self._members.add_worker(address, worker_id=worker_id)
        for worker_id in last.workers.keys() - now.workers.keys():
            await self._members.remove_worker(worker_id)


def _without(values: dict[str, Any], worker_id: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != worker_id}


class Discovery(Protocol):
    """Gives a gateway the list of workers. `trouble` is the reason for which the list may be stale; "" while it is
    current."""

    @property
    def trouble(self) -> str: ...

    async def follow(self, members: Members) -> None:
        """Keeps `members` up to date until cancelled."""
        ...


class StaticDiscovery:
    """Workers at configured addresses. `identify` requests the worker's id from an address."""

    trouble = ""

    def __init__(
        self, addresses: Sequence[str], *, identify: Callable[[str], Awaitable[str]], period_s: float = 1.0
    ) -> None:
        self._addresses = addresses
        self._identify = identify
        self._period_s = period_s

    async def follow(self, members: Members) -> None:
        await asyncio.gather(*(self._join_identified(address, members) for address in self._addresses))

    async def _join_identified(self, address: str, members: Members) -> None:
        """Waits for a worker that is still starting; once it is added, `members` keep the connection themselves."""
        warned = False
        while True:
            try:
                worker_id = await self._identify(address)
            except BatonError as error:
                if not warned:
                    log.warning("waiting for a worker at %s: %s", address, error.message)
                warned = True
                await asyncio.sleep(self._period_s)
            else:
                members.add_worker(address, worker_id=worker_id)
                return
