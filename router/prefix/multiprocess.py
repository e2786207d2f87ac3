"""The prefix index of several gateway processes on one machine: equal prefixes of a burst meet without Redis.

    worker ══ its own stream ══▶ every process ──▶ its local index
    a prompt was routed ─▶ expect ─▶ local index
                                └─▶ a datagram to each other process ─▶ its local index        for a few seconds

A datagram is (seconds, worker, hashes). While a process's socket is full its datagrams wait in a short queue. A
datagram to a process that is gone is lost, which costs one prefix hit at most.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from pathlib import Path

from protos.chain import Chain
from protos.event_loop import loop_time
from protos.values import BLOCK_HASH_BYTES, BlockHash, BlockStored, KVEvent, KVEvents
from router.prefix.feed import Feed
from router.prefix.index import Match, PrefixIndex
from router.replicas.datagram_bus import DatagramBus
from router.replicas.peers import expectations_socket

log = logging.getLogger("baton.router")

MAX_BLOCKS = 4096  # blocks of a prompt that are published to other processes: 64 kB
_HEAD = struct.Struct("!dH")
_MAX_BYTES = _HEAD.size + 2**16 + MAX_BLOCKS * BLOCK_HASH_BYTES


class MultiprocessPrefixIndex:
    """`PrefixIndex` and `Peers` of process `number` of `count`, on one event loop. `start` and `close` it.

    `num_heard` counts prompts received from other processes, `num_dropped` prompts that could not be sent to one.
    """

    trouble = ""
    warning = ""

    def __init__(self, local: PrefixIndex, *, folder: Path, number: int, count: int) -> None:
        self.local = local
        paths = [expectations_socket(folder, one) for one in range(count)]
        self._datagrams = DatagramBus(paths, number, max_bytes=_MAX_BYTES, hear=self._hear)
        self.num_heard = 0

    @property
    def num_dropped(self) -> int:
        return self._datagrams.num_dropped

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
        head = _HEAD.pack(until - loop_time(), len(name))
        self._datagrams.send(head + name + Chain.of(hashes[:MAX_BLOCKS]).packed)

    def num_blocks(self, worker_id: str) -> int:
        return self.local.num_blocks(worker_id)

    def num_on_host(self, worker_id: str) -> int:
        return self.local.num_on_host(worker_id)

    def blocks(self, worker_id: str) -> tuple[BlockStored, ...]:
        return self.local.blocks(worker_id)

    # -- other processes -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._datagrams.start()

    async def close(self) -> None:
        self._datagrams.close()

    def join(self, feed: Feed) -> None:
        """Events are not published: every process has its own connection to every worker."""

    def connected(self, worker_id: str) -> None: ...

    def received(self, worker_id: str, message: KVEvents) -> None: ...

    def lost(self, worker_id: str) -> None: ...

    def _hear(self, datagram: bytes) -> None:
        seconds, length = _HEAD.unpack_from(datagram)
        start = _HEAD.size + length
        until = loop_time() + seconds
        self.local.expect(datagram[_HEAD.size : start].decode(), Chain(datagram[start:]), until=until)
        self.num_heard += 1
