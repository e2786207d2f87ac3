"""Workers announced in Redis under a lease: they disappear when it expires, which their supervisor renews.

    baton:owner         the supervisor; expires after the lease
    baton:announced     all that it announces (`Announced`, JSON) with the token of its run: a client that can read this
                        Redis can call the workers. Expires after the lease, or when the workers would end.
    baton:changes       a channel: read again

Where several fleets share a Redis, the keys of the fleet b begin with "baton@b:"."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import NoReturn
from uuid import uuid4

import msgspec
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ResponseError

from cluster.discovery.members import Announced, AnnouncedMembers, Members
from protos.errors import Misconfigured
from protos.event_loop import loop_time
from router.log_throttle import OutageLog
from router.prefix.redis_url import PASSWORD_VARIABLE, TROUBLES, parse, raise_if_cancelled

log = logging.getLogger("baton.discovery")

LEASE_S = 5.0
ROOT = "baton"
NO_OWNER = "no `baton pools` runs: its workers serve on for a while, and are not started again"


def root_of(fleet: str) -> str:
    return f"{ROOT}@{fleet}" if fleet else ROOT


class FleetKeys:
    """The keys of a fleet: `changes` is the channel."""

    def __init__(self, fleet: str = "") -> None:
        root = root_of(fleet)
        self.changes = f"{root}:changes"
        self.owner = f"{root}:owner"
        self.announced = f"{root}:announced"


# Renews the owner's lease and what it announces, unless another one has the lease.
_ANNOUNCE = """
local owner = redis.call('get', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
if ARGV[3] ~= '' then redis.call('set', KEYS[2], ARGV[3], 'px', ARGV[4]) end
return 1
"""
_DISOWN = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"


def client_of(url: str, *, timeout_s: float = 2.0) -> Redis:
    """A client that connects when it is used; a URL without a password takes BATON_REDIS_PASSWORD."""
    client: Redis = Redis.from_url(
        url,
        password=os.environ.get(PASSWORD_VARIABLE) or None,  # a password in the URL takes precedence
        decode_responses=True,
        encoding_errors="replace",
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
    )
    return client


async def connect(url: str, *, timeout_s: float = 2.0) -> Redis:
    """A client for `url`; a URL without a password takes BATON_REDIS_PASSWORD.

    Raises Misconfigured if no Redis answers there, or if it refuses the password.
    """
    client, shown = client_of(url, timeout_s=timeout_s), parse(url, setting="discovery").shown
    try:
        await client.ping()
    except AuthenticationError as error:
        await client.aclose()
        raise Misconfigured(
            f"Redis at {shown} refuses the password, or requires one: put it into the URL or into the "
            f"environment variable {PASSWORD_VARIABLE} ({error})",
            param="discovery",
        ) from error
    except TROUBLES as error:
        await client.aclose()
        raise Misconfigured(
            f"no Redis answers at {shown}: {error}; start it, or correct --discovery", param="discovery"
        ) from error
    return client


class _Trouble:
    """Logs once when Redis is lost and once when it is back."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._outage = OutageLog(log)

    @property
    def reason(self) -> str:
        return self._outage.reason

    def met(self, error: BaseException) -> None:
        what = "used" if isinstance(error, ResponseError) else "reached"
        reason = f"Redis cannot be {what} ({error})"
        self._outage.lost(reason, f"{reason}: {self._consequence}")

    def over(self) -> None:
        self._outage.back("Redis answers again")


class RedisAnnouncer:
    """Renews its lease three times in its length, so that one missed renewal loses no worker. Workers that outlive
    their supervisor stay announced for `orphan_s`. Lives on one event loop."""

    def __init__(
        self, client: Redis, *, token: str = "", lease_s: float = LEASE_S, orphan_s: float = 0.0, fleet: str = ""
    ) -> None:
        self._client = client
        self._keys = FleetKeys(fleet)
        self.token = token
        self._lease_s = lease_s
        self._orphan_s = orphan_s
        self.replaced = asyncio.Event()  # another process owns the fleet
        self._announced: Announced | None = None
        self._id = uuid4().hex
        self._news = asyncio.Event()
        self._trouble = _Trouble("gateways that start now will not find the workers")
        self._keeper: asyncio.Task[None] | None = None

    async def own(self) -> None:
        """Makes this process the fleet's owner, once the lease of an ended owner is over. Raises Misconfigured while
        another process renews it, and the errors of Redis."""
        until_s = loop_time() + 2 * self._lease_s
        while not await self._write():
            if loop_time() > until_s:
                raise Misconfigured(
                    "another `baton pools` runs the workers of this fleet: stop it, or give --fleet a name of its own",
                    param="fleet",
                )
            await asyncio.sleep(self._lease_s / 20)
        self._keeper = asyncio.create_task(self._keep(), name="announcer")

    async def publish(self, announced: Announced) -> None:
        """Notifies gateways immediately, unless only the words of a fault have changed."""
        before, self._announced = self._announced, announced
        is_fault = before is not None and bool(before.degraded) == bool(announced.degraded)
        if before is None or not is_fault or replace(before, degraded=announced.degraded) != announced:
            self._news.set()

    async def close(self, *, withdraw: bool = True) -> None:
        """Withdraws all workers if Redis can be reached, or leaves them to the next owner."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            workers = {} if withdraw or self._announced is None else self._announced.workers
            self._announced = Announced(workers=workers)
            with suppress(*TROUBLES):
                if not self.replaced.is_set() and await self._write():
                    await self._client.publish(self._keys.changes, "")
                    await self._client.eval(_DISOWN, 1, self._keys.owner, self._id)
        await self._client.aclose()

    async def _keep(self) -> None:
        while True:
            raise_if_cancelled()
            changed = self._news.is_set()
            self._news.clear()
            try:
                if not await self._write():
                    return self.replaced.set()
                if changed:
                    await self._client.publish(self._keys.changes, "")
                self._trouble.over()
            except TROUBLES as error:
                self._trouble.met(error)
                if changed:
                    self._news.set()
                await asyncio.sleep(self._lease_s / 10)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._news.wait()

    async def _write(self) -> bool:
        """False if another process owns the fleet."""
        packed, keys = "", self._keys
        if self._announced is not None:
            packed = msgspec.json.encode(replace(self._announced, token=self.token)).decode()
        lease_ms, orphan_ms = (int(1000 * seconds) for seconds in (self._lease_s, max(self._lease_s, self._orphan_s)))
        written = self._client.eval(
            _ANNOUNCE, 2, keys.owner, keys.announced, self._id, lease_ms, packed, orphan_ms
        )  # fmt: skip
        return bool(await written)


class RedisDiscovery:
    """Lives on one event loop, for one gateway. Calls `learn` with the address and the token of each worker that it
    finds, before it adds the worker.

    Workers that are missing without a withdrawal are kept for another lease: if Redis loses its data, the cluster keeps
    its workers until their supervisor has announced them again.
    """

    def __init__(
        self,
        client: Redis,
        *,
        learn: Callable[[str, str], None] = lambda address, token: None,
        period_s: float = 1.0,
        lease_s: float = LEASE_S,
        fleet: str = "",
    ) -> None:
        self._client = client
        self._keys = FleetKeys(fleet)
        self._learn = learn
        self._period_s = period_s
        self._lease_s = lease_s
        self._trouble = _Trouble("going on with the workers known so far")
        self._missing_since_s: float | None = None

    @property
    def trouble(self) -> str:
        return self._trouble.reason

    async def follow(self, members: Members) -> None:
        told = AnnouncedMembers(members)
        try:
            while True:
                try:
                    await self._listen(told)
                except TROUBLES as error:
                    self._trouble.met(error)
                    self._missing_since_s = None
                    await asyncio.sleep(self._period_s)
        finally:
            await self._client.aclose()

    async def _listen(self, members: AnnouncedMembers) -> NoReturn:
        addresses: set[str] = set()
        async with aclosing(self._client.pubsub()) as changes:
            await changes.subscribe(self._keys.changes)
            while True:
                announced = await self._read()
                raise_if_cancelled()
                if announced is not None:
                    for address in announced.workers.values():
                        self._learn(address, announced.token)
                    await members.publish(announced)
                    for address in addresses - {*announced.workers.values()}:
                        self._learn(address, "")
                    addresses = {*announced.workers.values()}
                self._trouble.over()
                await changes.get_message(ignore_subscribe_messages=True, timeout=self._period_s)

    async def _read(self) -> Announced | None:
        """None while it may only be missing."""
        packed, owner = await self._client.mget([self._keys.announced, self._keys.owner])
        announced = _unpacked(packed) if packed is not None else None
        if announced is None:
            now = loop_time()
            self._missing_since_s = since_s = now if self._missing_since_s is None else self._missing_since_s
            return Announced() if now - since_s >= self._lease_s else None
        self._missing_since_s = None
        if owner is None:
            return replace(announced, starting={}, degraded=NO_OWNER if announced.workers else "")
        return announced


def _unpacked(packed: str | bytes) -> Announced | None:
    """None for a value that no announcer writes."""
    try:
        return msgspec.json.decode(packed, type=Announced)
    except msgspec.DecodeError:
        return None
