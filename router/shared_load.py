"""What gateway processes behind one port tell each other of the work that they have just given to workers.

    decided ─▶ a datagram to each sibling ─▶ counts as routed there, until the worker's own load shows it

Workers say what they have after each step only. Between two steps every process would choose the same idle worker.
A datagram says: (tokens to read, blocks to hold, worker). One that is lost costs a choice that is a little worse.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from router.prefix.siblings import AT_ONCE, Way, bound
from router.siblings import load_socket

_HEAD = struct.Struct("!II")
_MAX_BYTES = 4096
MOST = 2**32 - 1

Take = Callable[[str, int, int], None]
"""(worker, tokens to read, blocks to hold)"""


class SharedLoad:
    """Of process `number` of `count`, on one event loop: `start` and `close` it."""

    def __init__(self, *, folder: Path, number: int, count: int, take: Take) -> None:
        self._path = load_socket(folder, number)
        self._ways = [Way(load_socket(folder, other)) for other in range(count) if other != number]
        self._take = take
        self._end: socket.socket | None = None

    def tell(self, worker_id: str, num_tokens: int, num_blocks: int) -> None:
        told = _HEAD.pack(min(max(num_tokens, 0), MOST), min(num_blocks, MOST)) + worker_id.encode()
        for way in self._ways:
            way.send(told)

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

    def _hear(self) -> None:
        assert self._end is not None
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                told = self._end.recv(_MAX_BYTES)
                self._take(told[_HEAD.size :].decode(), *_HEAD.unpack_from(told))
