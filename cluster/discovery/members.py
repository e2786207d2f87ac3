"""How gateways learn of workers: the supervisor announces them, a gateway follows. The router's `Fleet` is a `Members`.

supervisor ── announce ─▶ DirectAnnouncer ────────── starting, add / remove_worker ──▶ Members          one process
supervisor ── announce ─▶ RedisAnnouncer ═▶ Redis ═▶ RedisDiscovery ── the same ─────▶ Members          several
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from protos.errors import BatonError
from router.fleet.successors import Successor

log = logging.getLogger("baton.discovery")


class Members(Protocol):
    """The workers that a gateway knows. Adding one again with another address moves it."""

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
        """A process of the worker is being started; called again while it reads its weights. Gateways let running
        answers wait for it until the worker is announced or withdrawn, or until this announcer falls silent."""
        ...

    async def announce(self, worker_id: str, address: str) -> None:
        """The worker serves at this address (host:port), also after a restart."""
        ...

    async def withdraw(self, worker_id: str) -> None:
        """The worker will not come back."""
        ...

    async def close(self) -> None: ...


class ClusterAnnouncer(Announcer, Protocol):
    """Also announces faults of the cluster behind the workers, such as a silent Ray."""

    async def set_degraded(self, reason: str) -> None:
        """`reason` is shown beside other faults; "" when the cluster is whole."""
        ...


class LateAnnouncer:
    """A `ClusterAnnouncer` that passes on to another one what is announced, from `begin` on. Sends a fault once."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self._starting: dict[str, Successor] = {}
        self._degraded = ""
        self._to: ClusterAnnouncer | None = None

    async def begin(self, to: ClusterAnnouncer) -> None:
        self._to = to
        for worker_id, successor in self._starting.items():
            await to.starting(worker_id, successor)
        for worker_id, address in self.addresses.items():
            await to.announce(worker_id, address)

    def end(self) -> None:
        """Nothing is passed on from now on."""
        self._to = None

    async def starting(self, worker_id: str, successor: Successor) -> None:
        self._starting[worker_id] = successor
        if self._to is not None:
            await self._to.starting(worker_id, successor)

    async def announce(self, worker_id: str, address: str) -> None:
        self.addresses[worker_id] = address
        self._starting.pop(worker_id, None)
        if self._to is not None:
            await self._to.announce(worker_id, address)

    async def withdraw(self, worker_id: str) -> None:
        self.addresses.pop(worker_id, None)
        self._starting.pop(worker_id, None)
        if self._to is not None:
            await self._to.withdraw(worker_id)

    async def set_degraded(self, reason: str) -> None:
        if reason != self._degraded and self._to is not None:
            self._degraded = reason
            await self._to.set_degraded(reason)

    async def close(self) -> None:
        pass


class Discovery(Protocol):
    """Gives a gateway the list of workers. `trouble` is the reason for which the list may be stale; "" while it is
    current."""

    @property
    def trouble(self) -> str: ...

    async def follow(self, members: Members) -> None:
        """Keeps `members` up to date until cancelled."""
        ...


class DirectAnnouncer:
    """For a supervisor and a gateway in one process: passes announcements on directly."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def starting(self, worker_id: str, successor: Successor) -> None:
        self._members.starting(worker_id, successor)

    async def announce(self, worker_id: str, address: str) -> None:
        self._members.add_worker(address, worker_id=worker_id)

    async def withdraw(self, worker_id: str) -> None:
        await self._members.remove_worker(worker_id)

    async def set_degraded(self, reason: str) -> None:
        self._members.set_degraded(reason)

    async def close(self) -> None:
        pass


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
