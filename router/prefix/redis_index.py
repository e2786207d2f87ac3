"""The prefix index that any number of gateways share: matched in this process's memory, published through Redis.

worker ══ its own stream ══▶ every gateway ──▶ its local index                 complete, with or without Redis
                             the one that has the worker's lease ──▶ Redis     events, and snapshots of its blocks
Redis ──▶ every gateway      at its start: all blocks at once; then events that it lacks, and the prompts that
                             others route, so that equal prompts of one burst meet"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from google.protobuf.message import DecodeError
from redis.exceptions import ResponseError

from protos.event_loop import loop_time
from protos.hints import counted
from protos.values import BlockHash, Hello, KVEvents
from router.log_throttle import OutageLog, RareLog
from router.prefix.feed import Feed
from router.prefix.index import PrefixIndex
from router.prefix.redis_store import (
    EVENTS,
    EventEntry,
    ForeignEntry,
    PromptEntry,
    Store,
    StreamPositions,
    num_blocks,
    stream_order,
)
from router.prefix.redis_url import TROUBLES, raise_if_cancelled

log = logging.getLogger("baton.router")

TICKS_A_LEASE = 3
PAUSE_S = 0.5
MAX_PAUSE_S = 4.0
WARM_S = 3.0
LEAST_BEFORE_SNAPSHOT = 4096  # blocks published since the last one
MAX_EXPECTED_WAITING = 256
NOT_YET = "the prefix index in Redis has not been read yet"
UNREADABLE = (LookupError, ValueError, TypeError, ArithmeticError, AssertionError, DecodeError)


@dataclass(slots=True)
class Scribe:
    """A worker with a connection to this gateway. While `writing`, `pending` has its events that Redis does not have
    yet; `num_since` blocks were written after the last snapshot, when the stream had `read_then` entries behind it."""

    writing: bool = False
    snapshot_due: bool = True
    pending: list[KVEvents] = field(default_factory=list)
    num_since: int = 0
    read_then: int = 0


class RedisFeed(Feed):
    """The feed of one gateway, on one event loop. `start` and `close` it.

    Without Redis only the local index works, and `trouble` is set. `num_entries` of the stream of events were read;
    `num_outages` counts how often Redis was lost or was empty, `num_faults` how often an internal error restarted the
    sharing. Foreign data in its keys is ignored, and `warning` is set for a minute.
    """

    def __init__(self, index: PrefixIndex, store: Store) -> None:
        super().__init__(index, gateway_id=store.gateway_id)
        self._store = store
        self._scribes: dict[str, Scribe] = {}
        self._expected: list[tuple[str, Sequence[BlockHash], float]] = []
        self._released: list[str] = []
        self._lost: set[str] = set()  # leases taken by another gateway
        self._unled_since_s: dict[str, float] = {}
        self._places: StreamPositions = {}
        self._news = asyncio.Event()
        self._tick_due = True
        self._warmed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.warm_s = WARM_S
        self.num_entries = 0
        self.num_faults = 0
        self.num_outages = 0
        self.trouble = NOT_YET
        self._outage = OutageLog(log)
        self._unreadable = RareLog(log)
        self._pause_s = PAUSE_S

    @property
    def warning(self) -> str:
        return self._unreadable.recent

    # -- the feed ------------------------------------------------------------------------------------------------------

    def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, until: float) -> None:
        super().expect(worker_id, hashes, until=until)
        if not self.trouble and hashes:
            self._expected.append((worker_id, hashes, until))
            del self._expected[:-MAX_EXPECTED_WAITING]
            self._news.set()

    def drop(self, worker_id: str) -> None:
        super().drop(worker_id)
        scribe = self._scribes.pop(worker_id, None)
        if scribe is not None and scribe.writing:
            self._released.append(worker_id)
            self._news.set()

    def hello(self, worker_id: str, incarnation: int) -> Hello:
        hello = super().hello(worker_id, incarnation)
        self._scribes[worker_id] = Scribe()
        self._unled_since_s.pop(worker_id, None)
        self._tick_due = True
        self._news.set()
        return hello

    def _received(self, worker_id: str, message: KVEvents) -> None:
        scribe = self._scribes[worker_id]
        if not scribe.writing or scribe.snapshot_due or not (message.events or message.snapshot):
            return
        if message.snapshot:
            scribe.snapshot_due = True
            scribe.pending.clear()
        else:
            scribe.pending.append(message)
        self._news.set()

    def lost(self, worker_id: str) -> None:
        """The lease is no longer renewed: it ends unless the worker reconnects in time."""
        self._scribes.pop(worker_id, None)

    def writes_for(self, worker_id: str) -> bool:
        scribe = self._scribes.get(worker_id)
        return scribe is not None and scribe.writing and not scribe.snapshot_due

    # -- sharing -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prefix index in Redis")
        with suppress(TimeoutError):
            async with asyncio.timeout(self.warm_s):
                await self._warmed.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        writing = [worker_id for worker_id, scribe in self._scribes.items() if scribe.writing]
        with suppress(*TROUBLES):
            for worker_id in (*writing, *self._released):
                await self._store.release(worker_id)
        with suppress(*TROUBLES):
            await self._store.close()

    async def _run(self) -> NoReturn:
        while True:
            raise_if_cancelled()
            try:
                await self._warm()
                raise_if_cancelled()
                self._warmed.set()
                if self.trouble == NOT_YET:
                    self._over()
                await self._share()
            except TROUBLES as error:
                self._met_trouble(error)
            except Exception as error:  # foreign data must not end this gateway's sharing for good
                log.exception("the prefix index in Redis: an internal error, or foreign data in it")
                self.num_faults += 1
                self._met_trouble(error)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    async def _share(self) -> NoReturn:
        both = asyncio.create_task(self._follow()), asyncio.create_task(self._write())
        try:
            await asyncio.gather(*both)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
        raise AssertionError("neither ends by itself")

    def _interrupted(self, reason: str) -> None:
        if self.trouble in ("", NOT_YET):
            self.num_outages += 1
        self.trouble = reason
        self._outage.lost(reason, f"{reason}: going on with this gateway's own prefix index")

    def _met_trouble(self, error: BaseException) -> None:
        what = "used" if isinstance(error, ResponseError) else "reached"
        self._interrupted(f"the prefix index in Redis cannot be {what}: {str(error) or type(error).__name__}")
        self._expected.clear()
        self._lost.clear()
        for scribe in self._scribes.values():
            _begin_again(scribe)

    def _over(self) -> None:
        message = f"the prefix index is shared through Redis: {counted(len(self.worker_ids), 'worker')} known"
        if self.trouble == NOT_YET:
            log.info("%s", message)
        self.trouble = ""
        self._outage.back(message)
        self._pause_s = PAUSE_S

    # -- reading -------------------------------------------------------------------------------------------------------

    async def _warm(self) -> None:
        places = await self._store.ends()
        first = places[EVENTS]
        for worker_id in await self._worker_ids():
            if worker_id not in self._scribes:
                first = min(first, await self._load(worker_id) or first, key=stream_order)
        self._places = places | {EVENTS: first}
        while entries := await self._store.read(self._places, wait=False):
            raise_if_cancelled()
            await self._take(entries)

    async def _worker_ids(self) -> list[str]:
        worker_ids = await self._store.worker_ids()
        if None in worker_ids:
            self._leave_out("the id of a worker", ValueError())
        return sorted(worker_id for worker_id in worker_ids if worker_id is not None)

    async def _load(self, worker_id: str) -> str | None:
        """Loads a worker's snapshot, unless the index has later events. Returns the position in the stream after the
        snapshot."""
        try:
            stored = await self._store.snapshot(worker_id)
            if stored is None:
                return None
            snapshot, position = stored
            received = self.position(worker_id)
            if worker_id not in self._scribes and (snapshot.incarnation, snapshot.first_seq) > received:
                self.receive_shared(worker_id, snapshot)
            return position
        except UNREADABLE as error:
            self._leave_out(f"the blocks of worker {worker_id!r}", error)
            return None

    async def _follow(self) -> NoReturn:
        while True:
            raise_if_cancelled()
            await self._take(await self._store.read(self._places, wait=True))

    async def _take(self, entries: Sequence[EventEntry | PromptEntry | ForeignEntry]) -> None:
        now = loop_time()
        for entry in entries:
            if not isinstance(entry, PromptEntry):
                self.num_entries += 1
            if isinstance(entry, ForeignEntry):
                self._leave_out("an entry of a stream", entry.error)
                continue
            if entry.gateway == self._store.gateway_id:
                continue
            if isinstance(entry, PromptEntry):
                if self.position(entry.worker_id) != (0, 0):
                    num_cached = self.index.match(entry.hashes, now=now).blocks.get(entry.worker_id, 0)
                    self.routed(entry.worker_id, len(entry.hashes), num_cached)
                    self.index.expect(entry.worker_id, entry.hashes, until=now + entry.for_s)
                continue
            if (entry.incarnation, entry.first_seq + entry.num_events) <= self.position(entry.worker_id):
                continue  # received from the worker itself
            if not self._heard_of(entry) and entry.worker_id not in self._scribes:
                await self._load(entry.worker_id)

    def _heard_of(self, entry: EventEntry) -> bool:
        try:
            return self.receive_shared(entry.worker_id, entry.message())
        except UNREADABLE as error:
            self._leave_out(f"events of worker {entry.worker_id!r}", error)
            return True

    def _leave_out(self, what: str, error: Exception) -> None:
        self._unreadable.note(
            f"{what[:120]} in Redis cannot be read ({type(error).__name__}), and no gateway has written it: left out. "
            f"Only gateways may write to {self._store.root}*"
        )

    # -- writing -------------------------------------------------------------------------------------------------------

    async def _write(self) -> NoReturn:
        clock = asyncio.get_running_loop().time
        next_s = clock()
        while True:
            raise_if_cancelled()
            self._news.clear()
            if self._tick_due or clock() >= next_s:
                self._tick_due = False
                await self._tick()
                next_s = clock() + self._store.lease_s / TICKS_A_LEASE
            await self._flush(until=next_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_s):
                    await self._news.wait()

    async def _tick(self) -> None:
        self._lost.update(await self._store.renew([name for name, scribe in self._scribes.items() if scribe.writing]))
        lost, self._lost = self._lost, set()
        for worker_id in lost:
            if worker_id in self._scribes:
                _begin_again(self._scribes[worker_id])
        waiting = [name for name, scribe in self._scribes.items() if not scribe.writing]
        for worker_id, holder in (await self._store.holders(waiting)).items():
            if worker_id in lost and holder is None:
                self._interrupted("Redis has lost the published index")
            elif worker_id in lost and holder != self._store.gateway_id:
                log.warning("%s: gateway %s publishes its events from now on, not this one", worker_id, holder)
            if holder in (None, self._store.gateway_id):
                await self._acquire(worker_id)
        await self._bury()

    async def _acquire(self, worker_id: str) -> None:
        scribe = self._scribes.get(worker_id)
        incarnation, _ = self.position(worker_id)
        if scribe is not None and incarnation and await self._store.acquire(worker_id, incarnation):
            scribe.writing = scribe.snapshot_due = True

    async def _bury(self) -> None:
        """Removes workers for which no gateway has written for a whole lease: they have no successor."""
        now = loop_time()
        unconnected = {*self.worker_ids, *await self._worker_ids()} - self._scribes.keys()
        holders = await self._store.holders(sorted(unconnected))
        for worker_id, holder in holders.items():
            if holder is not None:
                self._unled_since_s.pop(worker_id, None)
            elif now - self._unled_since_s.setdefault(worker_id, now) >= self._store.lease_s:
                del self._unled_since_s[worker_id]
                await self._store.tidy(worker_id)
                if worker_id not in self._scribes:
                    self.drop(worker_id)

    async def _flush(self, *, until: float) -> None:
        """Writes the pending events. Leases must be renewed at `until`, so the rest may have to wait."""
        expected, self._expected = self._expected, []
        clock = asyncio.get_running_loop().time
        now = clock()
        for worker_id, hashes, ends in expected:
            if ends > now:
                await self._store.expect(worker_id, hashes, for_s=ends - now)
        released, self._released = self._released, []
        for worker_id in released:
            await self._store.release(worker_id)
        for worker_id, scribe in list(self._scribes.items()):
            if clock() >= until:
                self._news.set()
                return
            if scribe.writing and not (await self._bring_up_to_date(worker_id, scribe)):
                self._lost.add(worker_id)
                self._tick_due = True
                self._news.set()
        if not self._tick_due:
            self._over()

    async def _bring_up_to_date(self, worker_id: str, scribe: Scribe) -> bool:
        """False when this gateway may not write for the worker any more."""
        behind = scribe.num_since > max(
            LEAST_BEFORE_SNAPSHOT, self.index.num_blocks(worker_id) + self.index.num_on_host(worker_id)
        )
        trimmed = scribe.num_since and self.num_entries - scribe.read_then > self._store.max_entries // 2
        if scribe.snapshot_due or behind or trimmed:
            incarnation, next_seq = self.position(worker_id)
            blocks = self.index.blocks(worker_id)
            scribe.snapshot_due, scribe.num_since, scribe.read_then = False, 0, self.num_entries
            scribe.pending.clear()
            snapshot = KVEvents(incarnation=incarnation, first_seq=next_seq, events=blocks, snapshot=True)
            return await self._store.write(worker_id, snapshot)
        if not scribe.pending:
            return True
        messages, scribe.pending = scribe.pending, []
        scribe.num_since += sum(num_blocks(event) for message in messages for event in message.events)
        return await self._store.append(worker_id, messages)


def _begin_again(scribe: Scribe) -> None:
    scribe.writing, scribe.snapshot_due = False, True
    scribe.pending.clear()
