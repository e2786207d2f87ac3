"""How gateways learn of workers: the supervisor announces, a gateway follows. The router's `Fleet` is a `Members`.

supervisor ── announce ─▶ DirectAnnouncer ─────────── starting / join / leave ──▶ Members          one process
supervisor ── announce ─▶ RedisAnnouncer ═▶ Redis ═▶ RedisDiscovery ── starting / join / leave ──▶ Members     several
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
    """Who is told. Joining again with another address means that the worker has moved."""

    def starting(self, worker_id: str, successor: Successor | None) -> None:
        """A process of the worker is being started, or (None) is not announced any more. Ends with `join`."""
        ...

    def join(self, address: str, *, worker_id: str) -> None: ...

    async def leave(self, worker_id: str) -> None: ...

    def set_degraded(self, reason: str) -> None:
        """What is wrong with the cluster behind the workers, for `degraded`; "" when nothing is."""
        ...


class Announcer(Protocol):
    """The supervisor's side. Never fails: what cannot be said now is said as soon as it can be."""

    async def starting(self, worker_id: str, successor: Successor) -> None:
        """A process of the worker is being started; called again as it reads its weights. Gateways let running answers
        wait for it until the worker is announced or withdrawn, or this announcer is silent."""
        ...

    async def announce(self, worker_id: str, address: str) -> None:
        """The worker lives at this address (host:port) now; also after a restart."""
        ...

    async def withdraw(self, worker_id: str) -> None:
        """The worker will not come back."""
        ...

    async def close(self) -> None: ...


class ClusterAnnouncer(Announcer, Protocol):
    """Also announces what is wrong with the cluster behind the workers."""

    async def set_degraded(self, reason: str) -> None:
        """For people, beside what else is wrong; "" when nothing is."""
        ...


class Discovery(Protocol):
    """A gateway's side. `trouble` says why what it knows may be old; "" while it is current."""

    @property
    def trouble(self) -> str: ...

    async def follow(self, members: Members) -> None:
        """Keeps `members` up to date until cancelled."""
        ...


class DirectAnnouncer:
    """Supervisor and gateway are one process: whoever is announced has joined."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def starting(self, worker_id: str, successor: Successor) -> None:
        self._members.starting(worker_id, successor)

    async def announce(self, worker_id: str, address: str) -> None:
        self._members.join(address, worker_id=worker_id)

    async def withdraw(self, worker_id: str) -> None:
        await self._members.leave(worker_id)

    async def set_degraded(self, reason: str) -> None:
        self._members.set_degraded(reason)

    async def close(self) -> None:
        pass


class StaticDiscovery:
    """Workers at addresses that somebody wrote down. `identify` asks the one at an address for its id."""

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
        """Waits for a worker that is still starting; from the first meeting on, members keep in touch themselves."""
        told = False
        while True:
            try:
                worker_id = await self._identify(address)
            except BatonError as error:
                if not told:
                    log.warning("waiting for a worker at %s: %s", address, error.message)
                told = True
                await asyncio.sleep(self._period_s)
            else:
                members.join(address, worker_id=worker_id)
                return
