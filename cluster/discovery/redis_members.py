"""Workers announced in Redis under a lease: a worker whose supervisor does not renew the lease disappears when it
expires.

    baton:worker:<id>   "host:port", then a space and the token of its run, if a supervisor made one; expires after the
                        lease. A client that can read this Redis can call the workers.
    baton:workers       the ids that may exist (a set)
    baton:starting:<id> "role loaded", of a process that is being started; expires after the lease
    baton:starting      the ids that may be starting (a set)
    baton:degraded:<id> faults of the cluster behind the workers of the supervisor <id>; expires after the lease
    baton:degraded      the ids of supervisors that may have such (a set)
    baton:changes       a channel: read again; a message names a worker that was withdrawn

Where several fleets share a Redis, the keys of the fleet b begin with "baton@b:".

A gateway reads everything on every change, and every `period_s` in case it missed a message. While Redis is unreachable
it keeps the workers it knows, and notices their death by their connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import NamedTuple, NoReturn
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ResponseError

from cluster.discovery.members import Members
from protos.errors import Misconfigured
from protos.event_loop import loop_time
from protos.values import WorkerRole
from router.fleet.successors import Successor
from router.log_throttle import OutageLog
from router.prefix.redis_url import PASSWORD_VARIABLE, TROUBLES, parse, raise_if_cancelled

log = logging.getLogger("baton.discovery")

LEASE_S = 5.0
ROOT = "baton"


class LeaseKind(NamedTuple):
    """A kind of announcement: the prefix of its keys, before the id, and the key of the set of ids."""

    key: str
    ids: str


def root_of(fleet: str) -> str:
    """The beginning of a fleet's keys."""
    return f"{ROOT}@{fleet}" if fleet else ROOT


class FleetKeys:
    """The keys of a fleet: `changes` is the channel."""

    def __init__(self, fleet: str = "") -> None:
        root = root_of(fleet)
        self.changes = f"{root}:changes"
        self.owner = f"{root}:owner"
        self.worker = LeaseKind(f"{root}:worker:", f"{root}:workers")
        self.starting = LeaseKind(f"{root}:starting:", f"{root}:starting")
        self.degraded = LeaseKind(f"{root}:degraded:", f"{root}:degraded")


# A successor may have announced the same worker already: delete the key only if this announcer wrote it.
_FORGET = """
if redis.call('get', KEYS[1]) == ARGV[1] then
    redis.call('del', KEYS[1])
    redis.call('srem', KEYS[2], ARGV[2])
    redis.call('publish', KEYS[3], ARGV[2])
end
"""
# The owner's lease, unless another one has it.
_OWN = """
local owner = redis.call('get', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return 1
"""
_DISOWN = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"
_TIDY = "if redis.call('exists', KEYS[1]) == 0 then redis.call('srem', KEYS[2], ARGV[1]) end"


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


def _packed(successor: Successor) -> str:
    return f"{successor.role.value} {successor.loaded:.2f}"


def _unpacked(text: str) -> Successor | None:
    """None for an entry that no announcer writes."""
    role, _, loaded = text.partition(" ")
    try:
        return Successor(role=WorkerRole(role), loaded=float(loaded))
    except ValueError:
        return None


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
    """Lives on one event loop. Renews every lease three times in its length, so one missed renewal loses no worker.
    Workers that outlive their supervisor for `orphan_s` are announced for so long."""

    def __init__(
        self, client: Redis, *, token: str = "", lease_s: float = LEASE_S, orphan_s: float = 0.0, fleet: str = ""
    ) -> None:
        self._client = client
        self._keys = FleetKeys(fleet)
        self.token = token
        self._lease_s = lease_s
        self._orphan_s = orphan_s
        self._owns = False
        self.replaced = asyncio.Event()  # another process owns the fleet
        self._live: dict[str, str] = {}
        self._starting: dict[str, Successor] = {}
        self._gone: dict[str, str] = {}
        self._written: set[tuple[LeaseKind, str]] = set()
        self._id = uuid4().hex
        self._degraded = ""
        self._news = asyncio.Event()
        self._trouble = _Trouble("gateways that start now will not find the workers")
        self._keeper = asyncio.create_task(self._keep(), name="announcer")

    async def own(self) -> None:
        """Makes this process the fleet's owner, when the lease of one that has ended is over. Raises Misconfigured
        while another process renews it, and the errors of Redis."""
        until_s = loop_time() + 2 * self._lease_s
        while not await self._renew_ownership():
            if loop_time() > until_s:
                raise Misconfigured(
                    "another `baton pools` runs the workers of this fleet: stop it, or give --fleet a name of its own",
                    param="fleet",
                )
            await asyncio.sleep(self._lease_s / 20)
        self._owns = True

    async def _renew_ownership(self) -> bool:
        return bool(await self._client.eval(_OWN, 1, self._keys.owner, self._id, int(self._lease_s * 1000)))

    async def starting(self, worker_id: str, successor: Successor) -> None:
        self._starting[worker_id] = successor
        self._news.set()

    async def set_degraded(self, reason: str) -> None:
        """Notifies gateways immediately when the reason changes."""
        if bool(reason) != bool(self._degraded):
            self._news.set()
        self._degraded = reason

    async def announce(self, worker_id: str, address: str) -> None:
        self._live[worker_id] = f"{address} {self.token}".rstrip()
        self._starting.pop(worker_id, None)
        self._gone.pop(worker_id, None)
        self._news.set()

    async def withdraw(self, worker_id: str) -> None:
        address = self._live.pop(worker_id, None)
        if address is not None:
            self._gone[worker_id] = address
        if self._starting.pop(worker_id, None) is not None or address is not None:
            self._news.set()

    async def close(self, *, withdraw: bool = True) -> None:
        """Withdraws all workers if Redis can be reached, or leaves them to the next owner."""
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        if withdraw:
            self._gone |= self._live
            self._live.clear()
        self._starting.clear()
        self._degraded = ""
        with suppress(*TROUBLES):
            if not self.replaced.is_set():
                await self._write(changed=True)
            if self._owns:
                await self._client.eval(_DISOWN, 1, self._keys.owner, self._id)
        await self._client.aclose()

    async def _keep(self) -> None:
        while True:
            raise_if_cancelled()
            changed = self._news.is_set()
            self._news.clear()
            try:
                if self._owns and not await self._renew_ownership():
                    return self.replaced.set()
                await self._write(changed=changed)
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

    async def _write(self, *, changed: bool) -> None:
        gone, leased = dict(self._gone), self._leased()
        async with self._client.pipeline(transaction=True) as pipe:
            for (kind, name), value in leased.items():
                lease_s = max(self._lease_s, self._orphan_s if kind is self._keys.worker else 0.0)
                pipe.set(kind.key + name, value, px=int(lease_s * 1000))
                pipe.sadd(kind.ids, name)
            for kind, name in self._written - leased.keys():
                if kind is not self._keys.worker:
                    pipe.delete(kind.key + name)
                    pipe.srem(kind.ids, name)
            for worker_id, address in gone.items():
                pipe.eval(
                    _FORGET,
                    3,
                    self._keys.worker.key + worker_id,
                    self._keys.worker.ids,
                    self._keys.changes,
                    address,
                    worker_id,
                )
            if changed:
                pipe.publish(self._keys.changes, "")
            await pipe.execute()
        self._written = set(leased)
        for worker_id, address in gone.items():
            if self._gone.get(worker_id) == address:
                del self._gone[worker_id]

    def _leased(self) -> dict[tuple[LeaseKind, str], str]:
        """The value of every announcement in force, by kind and id."""
        leased = {(self._keys.worker, worker_id): address for worker_id, address in self._live.items()}
        leased |= {(self._keys.starting, worker_id): _packed(one) for worker_id, one in self._starting.items()}
        return leased | ({(self._keys.degraded, self._id): self._degraded} if self._degraded else {})


class RedisDiscovery:
    """Lives on one event loop, for one gateway. Calls `learn` with the address and the token of each worker that it
    finds, before it adds the worker.

    A worker that is missing without a withdrawal is kept for another lease: if Redis loses its data, the cluster keeps
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
        self._known: dict[str, str] = {}
        self._starting: dict[str, Successor] = {}
        self._missing_since_s: dict[str, float] = {}
        self._degraded = ""

    @property
    def trouble(self) -> str:
        return self._trouble.reason

    async def follow(self, members: Members) -> None:
        try:
            while True:
                try:
                    await self._listen(members)
                except TROUBLES as error:
                    self._trouble.met(error)
                    self._missing_since_s.clear()
                    await asyncio.sleep(self._period_s)
        finally:
            await self._client.aclose()

    async def _listen(self, members: Members) -> NoReturn:
        """Raises the errors of Redis."""
        withdrawn = ""
        async with aclosing(self._client.pubsub()) as changes:
            await changes.subscribe(self._keys.changes)
            while True:
                found, starting, degraded = await self._read()
                if found and not degraded and await self._client.get(self._keys.owner) is None:
                    degraded = "no `baton pools` runs: its workers serve on for a while, and are not started again"
                raise_if_cancelled()
                if degraded != self._degraded:
                    self._degraded = degraded
                    members.set_degraded(degraded)
                self._apply_starting(starting, found, members)
                await self._apply(found, withdrawn, members)
                self._trouble.over()
                message = await changes.get_message(ignore_subscribe_messages=True, timeout=self._period_s)
                withdrawn = str(message["data"]) if message is not None else ""

    async def _read(self) -> tuple[dict[str, str], dict[str, Successor], str]:
        """Addresses and starting processes by worker id, whose leases run, and the faults of the clusters behind the
        workers, of all supervisors. Starting processes are read first: a worker announced in between is found among the
        addresses."""
        names = [
            (kind, name)
            for kind in (self._keys.starting, self._keys.worker, self._keys.degraded)
            for name in sorted(str(one) for one in await self._client.smembers(kind.ids))
        ]
        addresses: dict[str, str] = {}
        starting: dict[str, Successor] = {}
        degraded: dict[str, None] = {}
        values = await self._client.mget([kind.key + name for kind, name in names]) if names else []
        for (kind, name), value in zip(names, values, strict=True):
            if value is None:
                await self._client.eval(_TIDY, 2, kind.key + name, kind.ids, name)
            elif kind is self._keys.degraded:
                degraded[str(value)] = None
            elif kind is self._keys.worker:
                addresses[name], _, token = str(value).partition(" ")
                self._learn(addresses[name], token)
            elif (successor := _unpacked(str(value))) is not None:
                starting[name] = successor
        return addresses, starting, "; ".join(degraded)

    def _apply_starting(self, found: Mapping[str, Successor], served: Mapping[str, str], members: Members) -> None:
        for worker_id, successor in found.items():
            if self._starting.get(worker_id) != successor:
                members.starting(worker_id, successor)
        for worker_id in self._starting.keys() - found.keys():
            if worker_id in served:
                members.add_worker(served[worker_id], worker_id=worker_id)
                self._known[worker_id] = served[worker_id]
            else:
                members.starting(worker_id, None)
        self._starting = dict(found)

    async def _apply(self, found: Mapping[str, str], withdrawn: str, members: Members) -> None:
        now = loop_time()
        for worker_id, address in found.items():
            self._missing_since_s.pop(worker_id, None)
            if (before := self._known.get(worker_id)) != address:
                self._known[worker_id] = address
                self._unlearn(before, found)
                members.add_worker(address, worker_id=worker_id)
        for worker_id in self._known.keys() - found.keys():
            since_s = self._missing_since_s.setdefault(worker_id, now)
            if worker_id == withdrawn or now - since_s >= self._lease_s:
                address = self._known.pop(worker_id)
                del self._missing_since_s[worker_id]
                self._unlearn(address, found)
                log.info("worker %s is no longer announced", worker_id, extra={"worker": worker_id})
                await members.remove_worker(worker_id)

    def _unlearn(self, address: str | None, found: Mapping[str, str]) -> None:
        """Drops the token of an address that no worker uses any more."""
        if address is not None and address not in (*found.values(), *self._known.values()):
            self._learn(address, "")
