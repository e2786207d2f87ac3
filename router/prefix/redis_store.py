"""The data about one model's workers that gateways share in Redis. All keys are in one slot of a cluster.

    baton:{model}:kv1:lease:<worker>   the gateway that writes for this worker, while the worker lives; expires
    baton:{model}:kv1:blocks:<worker>  its cache as it was at some event: incarnation, next_seq, position in the stream,
                                       and the blocks in numbered pieces; expires some leases later
    baton:{model}:kv1:workers          ids that may have the two above (a set)
    baton:{model}:kv1:events           events after that (a stream, trimmed)
    baton:{model}:kv1:expected         prompts just routed (a stream, trimmed)

Every write is one script that first checks the lease and the incarnation: a gateway that was paused, or that writes
about a former life of a worker, changes nothing. `kv1` is the version of the format, block names included. Gateways
with different versions do not see each other's data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protos.chain import Chain
from protos.kv_pb2 import KVEvents as KVEventsMessage
from protos.values import BlockHash, Cleared, KVEvent, KVEvents
from protos.wire import from_proto, to_proto
from router.prefix.redis_url import close

FORM = "kv1"
LEASE_S = 5.0
MAX_ENTRIES = 4096  # approximate length of the stream of events
MAX_EXPECTED = 1024  # length of the stream of prompts
ENTRY_BLOCKS = 1024  # blocks per entry, unless one event has more
PIECE_BLOCKS = 65_536  # blocks of a snapshot per value: a megabyte
SNAPSHOT_LEASES = 12.0  # leases for which blocks outlive the last renewal: a gateway may restart meanwhile
BLOCK_MS = 500
READ_COUNT = 128

ACQUIRE = """
local holder = redis.call('get', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
local known = redis.call('hget', KEYS[2], 'incarnation')
if known and known > ARGV[2] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[3])
return 1
"""
RENEW = """
local lost = {}
for i = 1, #KEYS, 2 do
    if redis.call('get', KEYS[i]) == ARGV[1] then
        redis.call('pexpire', KEYS[i], ARGV[2])
        redis.call('pexpire', KEYS[i + 1], ARGV[3])
    else
        lost[#lost + 1] = (i - 1) / 2
    end
end
return lost
"""
APPEND = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 5, #ARGV, 3 do
    redis.call('xadd', KEYS[2], 'maxlen', '~', ARGV[2], '*', 'gateway', ARGV[1], 'worker', ARGV[3],
        'incarnation', ARGV[4], 'first', ARGV[i], 'num', ARGV[i + 1], 'events', ARGV[i + 2])
end
return 1
"""
SNAPSHOT = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
local known = redis.call('hget', KEYS[2], 'incarnation')
if known and known > ARGV[3] then return 0 end
local last = redis.call('xrevrange', KEYS[4], '+', '-', 'count', 1)
redis.call('del', KEYS[2])
redis.call('hset', KEYS[2], 'incarnation', ARGV[3], 'next', ARGV[4], 'position', last[1] and last[1][1] or '0-0')
for i = 6, #ARGV do redis.call('hset', KEYS[2], i - 6, ARGV[i]) end
redis.call('pexpire', KEYS[2], ARGV[5])
redis.call('sadd', KEYS[3], ARGV[2])
redis.call('xadd', KEYS[4], '*', 'gateway', ARGV[1], 'worker', ARGV[2], 'incarnation', ARGV[3],
    'first', ARGV[4], 'num', 0, 'events', '')
return 1
"""
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"
TIDY = """
if redis.call('exists', KEYS[1]) == 0 then
    redis.call('del', KEYS[2])
    redis.call('srem', KEYS[3], ARGV[1])
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEntry:
    """An entry of the stream of events: events that a worker sent to `gateway`, decoded on use. An entry without events
    announces a snapshot."""

    gateway: str
    worker_id: str
    incarnation: int
    first_seq: int
    num_events: int
    packed: bytes

    def message(self) -> KVEvents:
        events = from_proto(KVEvents, KVEventsMessage.FromString(self.packed)).events
        return KVEvents(incarnation=self.incarnation, first_seq=self.first_seq, events=events)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEntry:
    """An entry of the stream of prompts: `gateway` sent this prompt to a worker, which should cache it for `for_s`."""

    gateway: str
    worker_id: str
    for_s: float
    hashes: Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEntry:
    error: Exception


EVENTS, EXPECTED = "events", "expected"
StreamPositions = dict[str, str]
"""The positions up to which the two streams have been read, by their names."""


class Store:
    """One gateway's access to Redis. Its methods raise redis-py's errors when Redis cannot be reached."""

    def __init__(
        self, client: Any, *, model: str, gateway_id: str, lease_s: float = LEASE_S, max_entries: int = MAX_ENTRIES
    ) -> None:
        self._client = client
        self.gateway_id = gateway_id
        self.lease_s = lease_s
        self.max_entries = max_entries
        self._lease_ms = int(lease_s * 1000)
        self.root = f"baton:{{{model}}}:{FORM}:"

    async def close(self) -> None:
        await close(self._client)

    # -- writing for a worker ------------------------------------------------------------------------------------------

    async def acquire(self, worker_id: str, incarnation: int) -> bool:
        keys = (self._lease(worker_id), self._blocks(worker_id))
        return bool(await self._client.eval(ACQUIRE, 2, *keys, self.gateway_id, _sortable(incarnation), self._lease_ms))

    async def renew(self, worker_ids: Sequence[str]) -> list[str]:
        if not worker_ids:
            return []
        keys = [key for worker_id in worker_ids for key in (self._lease(worker_id), self._blocks(worker_id))]
        arguments = (self.gateway_id, self._lease_ms, self._snapshot_ms)
        lost = await self._client.eval(RENEW, len(keys), *keys, *arguments)
        return [worker_ids[int(number)] for number in lost]

    async def append(self, worker_id: str, messages: Sequence[KVEvents]) -> bool:
        entries: list[Any] = []
        for entry in _entries(messages):
            entries += (entry.first_seq, len(entry.events), to_proto(entry).SerializeToString())
        keys = (self._lease(worker_id), self.root + EVENTS)
        arguments = (self.gateway_id, self.max_entries, worker_id, messages[0].incarnation)
        return bool(await self._client.eval(APPEND, 2, *keys, *arguments, *entries))

    async def write(self, worker_id: str, snapshot: KVEvents) -> bool:
        keys = (self._lease(worker_id), self._blocks(worker_id), self.root + "workers", self.root + EVENTS)
        about = (self.gateway_id, worker_id, _sortable(snapshot.incarnation), snapshot.first_seq, self._snapshot_ms)
        pieces = [
            to_proto(piece).SerializeToString()
            for piece in _pieces(snapshot.incarnation, 0, snapshot.events, PIECE_BLOCKS)
        ]
        return bool(await self._client.eval(SNAPSHOT, 4, *keys, *about, *pieces))

    async def release(self, worker_id: str) -> None:
        await self._client.eval(RELEASE, 1, self._lease(worker_id), self.gateway_id)

    # -- reading what others wrote -------------------------------------------------------------------------------------

    async def worker_ids(self) -> list[str | None]:
        """The ids of all workers; None for an invalid id."""
        return [_text(worker_id) for worker_id in await self._client.smembers(self.root + "workers")]

    async def holders(self, worker_ids: Sequence[str]) -> dict[str, str | None]:
        if not worker_ids:
            return {}
        holders = await self._client.mget([self._lease(worker_id) for worker_id in worker_ids])
        named = (holder.decode("utf-8", "replace") if holder is not None else None for holder in holders)
        return dict(zip(worker_ids, named, strict=True))

    async def snapshot(self, worker_id: str) -> tuple[KVEvents, str] | None:
        """A worker's blocks, and the position in the stream from which later events follow."""
        fields: dict[bytes, bytes] = await self._client.hgetall(self._blocks(worker_id))
        if not fields:
            return None
        events: list[KVEvent] = []
        for number in range(len(fields) - 3):
            events += from_proto(KVEvents, KVEventsMessage.FromString(fields[b"%d" % number])).events
        snapshot = KVEvents(
            incarnation=int(fields[b"incarnation"]), first_seq=int(fields[b"next"]), events=tuple(events), snapshot=True
        )
        return snapshot, fields[b"position"].decode()

    async def tidy(self, worker_id: str) -> None:
        keys = (self._lease(worker_id), self._blocks(worker_id), self.root + "workers")
        await self._client.eval(TIDY, 3, *keys, worker_id)

    async def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, for_s: float) -> None:
        await self._client.xadd(
            self.root + EXPECTED,
            {"gateway": self.gateway_id, "worker": worker_id, "for_s": for_s, "hashes": Chain.of(hashes).packed},
            maxlen=MAX_EXPECTED,
            approximate=True,
        )

    async def ends(self) -> StreamPositions:
        last = {name: await self._client.xrevrange(self.root + name, count=1) for name in (EVENTS, EXPECTED)}
        return {name: entries[0][0].decode() if entries else "0-0" for name, entries in last.items()}

    async def read(self, places: StreamPositions, *, wait: bool) -> list[EventEntry | PromptEntry | ForeignEntry]:
        """Entries after `places`, which are advanced. Waits for half a second at most, or not at all."""
        after = {self.root + name: places.get(name, "0-0") for name in (EVENTS, EXPECTED)}
        answer = await self._client.xread(after, count=READ_COUNT, block=BLOCK_MS if wait else None)
        is_mapping = isinstance(answer, dict)  # with the third version of Redis's protocol
        entries: list[EventEntry | PromptEntry | ForeignEntry] = []
        for key, listed in answer.items() if is_mapping else answer:
            name = key.decode().removeprefix(self.root)
            for place, fields in listed[0] if is_mapping else listed:
                places[name] = place.decode()
                try:
                    entries.append(_event_entry(fields) if name == EVENTS else _expected(fields))
                except (LookupError, ValueError, AssertionError) as error:
                    entries.append(ForeignEntry(error=error))
        return entries

    def _lease(self, worker_id: str) -> str:
        return f"{self.root}lease:{worker_id}"

    def _blocks(self, worker_id: str) -> str:
        return f"{self.root}blocks:{worker_id}"

    @property
    def _snapshot_ms(self) -> int:
        return int(self._lease_ms * SNAPSHOT_LEASES)


def _sortable(incarnation: int) -> str:
    return f"{incarnation:020d}"


def _text(name: bytes) -> str | None:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _event_entry(fields: dict[bytes, bytes]) -> EventEntry:
    return EventEntry(
        gateway=fields[b"gateway"].decode(),
        worker_id=fields[b"worker"].decode(),
        incarnation=int(fields[b"incarnation"]),
        first_seq=int(fields[b"first"]),
        num_events=int(fields[b"num"]),
        packed=fields[b"events"],
    )


def _expected(fields: dict[bytes, bytes]) -> PromptEntry:
    return PromptEntry(
        gateway=fields[b"gateway"].decode(),
        worker_id=fields[b"worker"].decode(),
        for_s=float(fields[b"for_s"]),
        hashes=Chain(fields[b"hashes"]),
    )


def stream_order(place: str) -> tuple[int, int]:
    milliseconds, _, number = place.partition("-")
    return int(milliseconds), int(number)


def num_blocks(event: KVEvent) -> int:
    return 0 if isinstance(event, Cleared) else len(event.hashes)


def _entries(messages: Sequence[KVEvents]) -> Iterator[KVEvents]:
    """Removes duplicates and divides the events into messages of moderate size. A message may repeat earlier events; a
    new message begins after events of another gateway."""
    first_seq, gathered = messages[0].first_seq, list[KVEvent]()
    for message in messages:
        next_seq = first_seq + len(gathered)
        if message.first_seq > next_seq:
            yield from _pieces(messages[0].incarnation, first_seq, gathered, ENTRY_BLOCKS)
            first_seq = next_seq = message.first_seq
            gathered = []
        gathered += message.events[next_seq - message.first_seq :]
    yield from _pieces(messages[0].incarnation, first_seq, gathered, ENTRY_BLOCKS)


def _pieces(incarnation: int, first_seq: int, events: Sequence[KVEvent], num_blocks_each: int) -> Iterator[KVEvents]:
    start = size = 0
    for stop, event in enumerate(events, 1):
        size += num_blocks(event)
        if size >= num_blocks_each or stop == len(events):
            yield KVEvents(incarnation=incarnation, first_seq=first_seq + start, events=tuple(events[start:stop]))
            start, size = stop, 0
