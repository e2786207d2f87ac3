"""The desired fleet in Redis: its owner's record, and calls of the owner by gateways elsewhere.

baton:fleet, :living, :learned   the owner's record, its workers, what the planner has learned: JSON
baton:fleet:calls                calls that no owner has taken yet (a list)
baton:fleet:reply:<id>           the reply to a call (a list of one); expires

The keys of a second fleet b begin with "baton@b:".
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Generic, TypeVar
from uuid import uuid4

import msgspec
from redis.asyncio import Redis

from cluster.capacity.controller import FleetRecord
from cluster.discovery.redis_members import client_of, root_of
from cluster.planner.planner_values import LearnedLoad
from cluster.supervision.living import LivingFleet
from protos.errors import BatonError, Internal, Unavailable
from protos.values import ErrorInfo
from protos.wire import error_info, raised
from router.fleet_owner import (
    CapacityNews,
    CapacityOwner,
    FleetChange,
    FleetOrder,
    FleetReport,
    GatewaySight,
    SeenSight,
)
from router.log_throttle import OutageLog
from router.prefix.redis_url import TROUBLES, raise_if_cancelled

log = logging.getLogger("baton.discovery")

Kept = TypeVar("Kept")

REPLY_S = 30.0  # that an owner has to plan a change
TURN_S = 1.0  # of a blocking read; less than the client's timeout
RETRY_S = 0.5


def record_key(fleet: str) -> str:
    return f"{root_of(fleet)}:fleet"


def calls_key(fleet: str) -> str:
    return f"{root_of(fleet)}:fleet:calls"


def reply_key(fleet: str, reply_id: str) -> str:
    return f"{root_of(fleet)}:fleet:reply:{reply_id}"


class FleetCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a `method` of CapacityOwner. After `until_s` (seconds since 1970) its sender has given up."""

    reply_id: str
    until_s: float
    method: str
    order: FleetOrder | None = None
    sight: GatewaySight | None = None


class FleetReply(msgspec.Struct, frozen=True, kw_only=True):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: ErrorInfo | None = None


class RedisKept(Generic[Kept]):
    """A value at a key. A value that cannot be written is written as soon as Redis answers."""

    def __init__(self, client: Redis, key: str, kind: type[Kept], what: str) -> None:
        self._client = client
        self._key, self._kind, self._what = key, kind, what
        self._outage = OutageLog(log)
        self._unsaved: Kept | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._keep_saving(), name=what)

    async def load(self) -> Kept | None:
        """Returns None without a readable value. Raises the errors of Redis."""
        packed = await self._client.get(self._key)
        if packed is None:
            return None
        try:
            return msgspec.json.decode(str(packed), type=self._kind)
        except msgspec.DecodeError as error:
            log.warning("%s in Redis cannot be read, and is written anew: %s", self._what, error)
            return None

    def save(self, record: Kept) -> None:
        self._unsaved = record
        self._news.set()

    async def close(self) -> None:
        """Writes what has not been written, if Redis can be reached."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with suppress(*TROUBLES):
            await self._write()

    async def _keep_saving(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._write()
                self._outage.back(f"{self._what} is in Redis again")
            except TROUBLES as error:
                self._outage.lost(str(error), f"{self._what} cannot be written to Redis: {error}")
                self._news.set()
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        record = self._unsaved
        if record is not None:
            await self._client.set(self._key, msgspec.json.encode(record).decode())
            if self._unsaved is record:
                self._unsaved = None


def record_of(client: Redis, fleet: str = "") -> RedisKept[FleetRecord]:
    return RedisKept(client, record_key(fleet), FleetRecord, "the fleet's record")


def living_of(client: Redis, fleet: str = "") -> RedisKept[LivingFleet]:
    return RedisKept(client, f"{record_key(fleet)}:living", LivingFleet, "the record of the workers")


def learned_of(client: Redis, fleet: str = "") -> RedisKept[LearnedLoad]:
    return RedisKept(client, f"{record_key(fleet)}:learned", LearnedLoad, "what the planner has learned")


async def serve_calls(client: Redis, owner: CapacityOwner, *, fleet: str = "") -> None:
    """Replies to gateways' calls until cancelled. An outage of Redis only delays it."""
    replying: set[asyncio.Task[None]] = set()
    while True:
        raise_if_cancelled()
        try:
            taken: Any = await client.blpop([calls_key(fleet)], timeout=TURN_S)
        except TROUBLES:
            await asyncio.sleep(RETRY_S)
            continue
        if taken is None:
            continue
        try:
            call = msgspec.json.decode(str(taken[1]), type=FleetCall)
        except msgspec.DecodeError as error:
            log.warning("a call of the fleet's owner cannot be read: %s", error)
            continue
        if call.until_s > time.time():
            task = asyncio.create_task(_reply(client, call, owner, fleet))
            replying.add(task)
            task.add_done_callback(replying.discard)


async def _reply(client: Redis, call: FleetCall, owner: CapacityOwner, fleet: str) -> None:
    try:
        reply = FleetReply(result=msgspec.Raw(msgspec.json.encode(await _result(call, owner))))
    except BatonError as error:
        reply = FleetReply(error=error_info(error))
    except Exception as error:  # the gateway must get an answer
        reply = FleetReply(error=error_info(Internal(f"{type(error).__name__}: {error}")))
    key = reply_key(fleet, call.reply_id)
    with suppress(*TROUBLES):
        async with client.pipeline(transaction=True) as pipe:
            pipe.rpush(key, msgspec.json.encode(reply).decode())
            pipe.expire(key, int(REPLY_S))
            await pipe.execute()


async def _result(call: FleetCall, owner: CapacityOwner) -> object:
    match call:
        case FleetCall(method="order", order=FleetOrder() as order):
            return await owner.order(order)
        case FleetCall(method="report"):
            return await owner.report(call.sight)
        case FleetCall(method="sights"):
            return await owner.sights()
    return await owner.view()


class RedisFleetOwner:
    """The `CapacityOwner` as a gateway in another process reaches it."""

    def __init__(self, url: str, *, fleet: str = "") -> None:
        self._url = url
        self._fleet = fleet
        self._client: Redis | None = None

    async def view(self) -> FleetReport:
        return await self._call("view", FleetReport)

    async def order(self, order: FleetOrder) -> FleetChange:
        return await self._call("order", FleetChange, order=order)

    async def report(self, sight: GatewaySight | None) -> CapacityNews:
        return await self._call("report", CapacityNews, sight=sight)

    async def sights(self) -> tuple[SeenSight, ...]:
        return await self._call("sights", tuple[SeenSight, ...])

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _call(
        self, method: str, kind: type[Kept], *, order: FleetOrder | None = None, sight: GatewaySight | None = None
    ) -> Kept:
        if self._client is None:
            self._client = client_of(self._url)
        call = FleetCall(reply_id=uuid4().hex, until_s=time.time() + REPLY_S, method=method, order=order, sight=sight)
        packed = msgspec.json.encode(call).decode()
        try:
            reply = await self._exchange(self._client, packed, call.reply_id)
        except TROUBLES as error:
            raise Unavailable(f"Redis, through which `baton pools` is reached, does not answer: {error}") from error
        if reply is None:
            with suppress(*TROUBLES):
                await self._client.lrem(calls_key(self._fleet), 0, packed)
            raise Unavailable(f"no `baton pools` has answered for {REPLY_S:g} s: does it run, with the same discovery?")
        if reply.error is not None:
            raise raised(reply.error)
        return msgspec.json.decode(reply.result, type=kind)

    async def _exchange(self, client: Redis, packed: str, reply_id: str) -> FleetReply | None:
        """Returns None without a reply in time."""
        await client.rpush(calls_key(self._fleet), packed)
        until_s = time.time() + REPLY_S
        while time.time() < until_s:
            taken: Any = await client.blpop([reply_key(self._fleet, reply_id)], timeout=TURN_S)
            if taken is not None:
                return msgspec.json.decode(str(taken[1]), type=FleetReply)
        return None
