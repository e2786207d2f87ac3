"""The prefix index of one gateway process of several on a machine: siblings of a burst meet without Redis.

    worker ══ its own stream ══▶ every process ──▶ its local index
    a prompt was routed ─▶ expect ─▶ local index
                                └─▶ a datagram to each sibling ─▶ its local index        for a few seconds

A datagram says: (seconds, worker, hashes). One that finds no room waits in a short line; one that finds nobody is lost,
which costs a hit at most.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from protos.chain import Chain
from protos.values import BLOCK_HASH_BYTES, BlockHash, BlockStored, KVEvent, KVEvents
from router.prefix.feed import Feed
from router.prefix.index import Match, PrefixIndex
from router.siblings import expectations_socket

log = logging.getLogger("baton.router")

MAX_BLOCKS = 4096  # of a prompt that siblings are told of: 64 kB
MAX_WAITING = 256  # datagrams for one sibling
BUFFER_BYTES = 4 * 2**20
AT_ONCE = 64  # datagrams read in one turn of the event loop
_HEAD = struct.Struct("!dH")
_MAX_BYTES = _HEAD.size + 2**16 + MAX_BLOCKS * BLOCK_HASH_BYTES


class SiblingPrefixIndex:
    """`PrefixIndex` and `Peers` of process `number` of `count`, on one event loop. `start` and `close` it.

    `num_heard` prompts that siblings routed were taken over, `num_dropped` could not be told to one of them.
    """

    trouble = ""

    def __init__(self, local: PrefixIndex, *, folder: Path, number: int, count: int) -> None:
        self.local = local
        self._path = expectations_socket(folder, number)
        others = [other for other in range(count) if other != number]
        self._ways = [Way(expectations_socket(folder, other)) for other in others]
        self._end: socket.socket | None = None
        self.num_heard = 0

    @property
    def num_dropped(self) -> int:
        return sum(way.num_dropped for way in self._ways)

    # -- the index -----------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash], *, now: float) -> Match:
        return self.local.match(hashes, now=now)

    def apply(self, worker_id: str, events: Sequence[KVEvent]) -> None:
        self.local.apply(worker_id, events)

    def drop(self, worker_id: str) -> None:
        self.local.drop(worker_id)

    def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, until: float) -> None:
        self.local.expect(worker_id, hashes, until=until)
        if not hashes:
            return
        name = worker_id.encode()
        head = _HEAD.pack(until - asyncio.get_running_loop().time(), len(name))
        told = head + name + Chain.of(hashes[:MAX_BLOCKS]).packed
        for way in self._ways:
            way.send(told)

    def num_blocks(self, worker_id: str) -> int:
        return self.local.num_blocks(worker_id)

    def num_on_host(self, worker_id: str) -> int:
        return self.local.num_on_host(worker_id)

    def blocks(self, worker_id: str) -> tuple[BlockStored, ...]:
        return self.local.blocks(worker_id)

    # -- siblings ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._end = bound(self._path)
        asyncio.get_running_loop().add_reader(self._end, self._hear)

    async def close(self) -> None:
        if self._end is not None:
            asyncio.get_running_loop().remove_reader(self._end)
            self._end.close()
            self._end = None
        for way in self._ways:
            way.close()

    def join(self, feed: Feed) -> None:
        """Events need no help: every process hears every worker."""

    def met(self, worker_id: str) -> None: ...

    def heard(self, worker_id: str, message: KVEvents) -> None: ...

    def lost(self, worker_id: str) -> None: ...

    def _hear(self) -> None:
        assert self._end is not None
        now = asyncio.get_running_loop().time()
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                told = self._end.recv(_MAX_BYTES)
                seconds, length = _HEAD.unpack_from(told)
                start = _HEAD.size + length
                self.local.expect(told[_HEAD.size : start].decode(), Chain(told[start:]), until=now + seconds)
                self.num_heard += 1


class Way:
    """To one sibling, whatever life it is in."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._end: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self.num_dropped = 0

    def send(self, told: bytes) -> None:
        if self._waiting:
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append(told)
        elif not self._try(told):
            self._waiting.append(told)
            assert self._end is not None
            asyncio.get_running_loop().add_writer(self._end, self._go_on)

    def close(self) -> None:
        if self._end is not None:
            asyncio.get_running_loop().remove_writer(self._end)
            self._end.close()
            self._end = None
        self.num_dropped += len(self._waiting)
        self._waiting.clear()

    def _go_on(self) -> None:
        while self._waiting and self._try(self._waiting[0]):
            if self._waiting:
                self._waiting.popleft()
        if not self._waiting and self._end is not None:
            asyncio.get_running_loop().remove_writer(self._end)

    def _try(self, told: bytes) -> bool:
        """False when there is no room now. What a sibling that is gone is told is lost."""
        for _ in range(2):  # the second time to its next life
            try:
                self._end = self._end or _connected(self._path)
            except OSError:
                break
            try:
                self._end.send(told)
                return True
            except BlockingIOError:
                return False
            except OSError:
                self.close()
        self.num_dropped += 1
        return True


def bound(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)  # of one that died
    end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    end.setblocking(False)
    end.bind(path)
    return end


def _connected(path: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    end.setblocking(False)
    try:
        end.connect(path)
    except OSError:
        end.close()
        raise
    return end
