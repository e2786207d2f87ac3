"""A simulated Redis with the commands that `router.prefix.redis_store` uses.

RedisFeed ─ Store ─▶ Client ── delay, away or not ──▶ Server: strings, hashes, sets, streams, leases that end

Scripts are recognised by their text and run in Python; a test sends the same commands to this server and to a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as Unreachable

from router.prefix import redis_store

DELAY_S = 0.0002
NODE_ENTRIES = 100
"""A stream that is cut to about a length loses whole nodes of so many entries."""
Entry = tuple[bytes, dict[bytes, bytes]]
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class FakeRedisStream:
    entries: list[Entry] = field(default_factory=list)
    last: tuple[int, int] = (0, 0)


class Server:
    """It cannot be reached between `disconnect` and `reconnect`."""

    def __init__(self) -> None:
        self.reachable = True
        self._loop = asyncio.get_running_loop()
        self._values: dict[str, Any] = {}
        self._deadlines: dict[str, float] = {}
        self._reading: dict[asyncio.Future[None], None] = {}
        self._scripts: Mapping[str, Callable[[Sequence[str], Sequence[Any]], Any]] = {
            redis_store.ACQUIRE: self._acquire,
            redis_store.RENEW: self._renew,
            redis_store.APPEND: self._append,
            redis_store.SNAPSHOT: self._snapshot,
            redis_store.RELEASE: self._release,
            redis_store.TIDY: self._tidy,
        }

    def disconnect(self) -> None:
        """Disconnects clients. The server keeps its data, except leases that end meanwhile."""
        self.reachable = False
        self._wake()

    def reconnect(self) -> None:
        self.reachable = True

    def clear(self) -> None:
        self._values.clear()
        self._deadlines.clear()

    # -- commands ------------------------------------------------------------------------------------------------------

    def eval(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return self._scripts[script](keys, arguments)

    def get(self, key: str) -> Any:
        if key in self._deadlines and self._deadlines[key] <= self._loop.time():
            self.delete(key)
        return self._values.get(key)

    def delete(self, key: str) -> None:
        self._values.pop(key, None)
        self._deadlines.pop(key, None)

    def add(self, key: str, fields: Mapping[str, Any], *, max_len: int | None = None) -> bytes:
        stream = self._stream(key)
        stream.last = max((int(self._loop.time() * 1000) + 1, 0), (stream.last[0], stream.last[1] + 1))
        place = b"%d-%d" % stream.last
        stream.entries.append((place, {name.encode(): _bytes(value) for name, value in fields.items()}))
        if max_len is not None and len(stream.entries) >= max_len + NODE_ENTRIES:
            del stream.entries[: len(stream.entries) - max_len]
        self._wake()
        return place

    def after(self, key: str, place: str, count: int) -> list[Entry]:
        entries, since = self._stream(key).entries, redis_store.stream_order(place)
        first = len(entries)
        while first and redis_store.stream_order(entries[first - 1][0].decode()) > since:
            first -= 1
        return entries[first : first + count]

    def last(self, key: str, count: int) -> list[Entry]:
        return self._stream(key).entries[: -count - 1 : -1]

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when an entry was added, the server became unreachable, or the time is over."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._reading[waiter] = None
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            del self._reading[waiter]

    def _wake(self) -> None:
        for waiter in self._reading:
            if not waiter.done():
                waiter.set_result(None)

    def _stream(self, key: str) -> FakeRedisStream:
        stream: FakeRedisStream = self._values.setdefault(key, FakeRedisStream())
        return stream

    def _expire(self, key: str, milliseconds: Any) -> None:
        if key in self._values:
            self._deadlines[key] = self._loop.time() + int(milliseconds) / 1000

    # -- scripts -------------------------------------------------------------------------------------------------------

    def _holds(self, key: str, gateway_id: str) -> bool:
        return bool(self.get(key) == gateway_id.encode())

    def _knows_later(self, key: str, incarnation: str) -> bool:
        present = (self.get(key) or {}).get(b"incarnation")
        return present is not None and present > incarnation.encode()

    def _acquire(self, keys: Sequence[str], arguments: Sequence[Any]) -> int:
        gateway_id, incarnation, lease_ms = arguments
        held = self.get(keys[0]) is not None and not self._holds(keys[0], gateway_id)
        if held or self._knows_later(keys[1], incarnation):
            return 0
        self._values[keys[0]] = gateway_id.encode()
        self._expire(keys[0], lease_ms)
        return 1

    def _renew(self, keys: Sequence[str], arguments: Sequence[Any]) -> list[int]:
        gateway_id, lease_ms, snapshot_ms = arguments
        lost = []
        for number, (lease, blocks) in enumerate(zip(keys[::2], keys[1::2], strict=True)):
            if self._holds(lease, gateway_id):
                self._expire(lease, lease_ms)
                if self.get(blocks) is not None:
                    self._expire(blocks, snapshot_ms)
            else:
                lost.append(number)
        return lost

    def _append(self, keys: Sequence[str], arguments: Sequence[Any]) -> int:
        gateway_id, max_len, worker_id, incarnation, *entries = arguments
        if not self._holds(keys[0], gateway_id):
            return 0
        for first, num, events in zip(entries[::3], entries[1::3], entries[2::3], strict=True):
            entry = {"gateway": gateway_id, "worker": worker_id, "incarnation": incarnation}
            self.add(keys[1], entry | {"first": first, "num": num, "events": events}, max_len=max_len)
        return 1

    def _snapshot(self, keys: Sequence[str], arguments: Sequence[Any]) -> int:
        gateway_id, worker_id, incarnation, next_seq, snapshot_ms, *pieces = arguments
        if not self._holds(keys[0], gateway_id) or self._knows_later(keys[1], incarnation):
            return 0
        last = self.last(keys[3], 1)
        about = {"incarnation": incarnation, "next": next_seq, "position": last[0][0] if last else b"0-0"}
        self.delete(keys[1])
        self._values[keys[1]] = {name.encode(): _bytes(value) for name, value in about.items()}
        self._values[keys[1]] |= {b"%d" % number: piece for number, piece in enumerate(pieces)}
        self._expire(keys[1], snapshot_ms)
        self._values.setdefault(keys[2], {})[worker_id.encode()] = None
        entry = {"gateway": gateway_id, "worker": worker_id, "incarnation": incarnation}
        self.add(keys[3], entry | {"first": next_seq, "num": 0, "events": b""})
        return 1

    def _release(self, keys: Sequence[str], arguments: Sequence[Any]) -> None:
        if self._holds(keys[0], arguments[0]):
            self.delete(keys[0])

    def _tidy(self, keys: Sequence[str], arguments: Sequence[Any]) -> None:
        if self.get(keys[0]) is None:
            self.delete(keys[1])
            self._values.get(keys[2], {}).pop(arguments[0].encode(), None)


class FakeRedisClient:
    """One gateway's connection, with the methods and errors of `redis.asyncio.Redis`."""

    def __init__(self, server: Server) -> None:
        self.dead = False
        self._server = server

    async def eval(self, script: str, num_keys: int, *arguments: Any) -> Any:
        await self._travel()
        return await self._answer(self._server.eval(script, arguments[:num_keys], arguments[num_keys:]))

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        await self._travel()
        return await self._answer([self._server.get(key) for key in keys])

    async def smembers(self, key: str) -> list[bytes]:
        await self._travel()
        return await self._answer(list(self._server.get(key) or ()))

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        await self._travel()
        return await self._answer(dict(self._server.get(key) or {}))

    async def xadd(self, key: str, fields: Mapping[str, Any], *, maxlen: int, approximate: bool) -> bytes:
        assert approximate
        await self._travel()
        return await self._answer(self._server.add(key, fields, max_len=maxlen))

    async def xrevrange(self, key: str, *, count: int) -> list[Entry]:
        await self._travel()
        return await self._answer(self._server.last(key, count))

    async def xread(self, places: Mapping[str, str], *, count: int, block: int | None) -> list[Any]:
        await self._travel()
        entries = self._found(places, count)
        if not entries and block is not None:
            await self._server.wait_for_change(block / 1000)
            entries = self._found(places, count)
        return await self._answer(entries)

    async def aclose(self) -> None: ...

    def _found(self, places: Mapping[str, str], count: int) -> list[Any]:
        entries = {key: self._server.after(key, place, count) for key, place in places.items()}
        return [[key.encode(), listed] for key, listed in entries.items() if listed]

    async def _answer(self, answer: Result) -> Result:
        """A command takes effect even if its answer is lost."""
        await self._travel()
        return answer

    async def _travel(self) -> None:
        await asyncio.sleep(DELAY_S)
        if self.dead or not self._server.reachable:
            raise Unreachable("Error connecting to the simulated Redis: Connection refused.")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
