"""What gateway processes behind one port tell each other of the work that they have just given to workers, and of
workers that failed what they were given.

    decided ─▶ a datagram to each sibling ─▶ counts as routed there, until the worker's own load shows it
    failed ──▶ a datagram to each sibling ─▶ counts as failed there: five in a row, of whomever, are a pause of all

Workers say what they have after each step only. Between two steps every process would choose the same idle worker.
A datagram says: (kind, tokens to read, blocks to hold, worker). One that is lost costs a choice that is a little worse.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from router.datagrams import Datagrams
from router.siblings import load_socket

_HEAD = struct.Struct("!cII")
_GIVEN, _FAILED = b"g", b"f"
_MAX_BYTES = 4096
MOST = 2**32 - 1

Take = Callable[[str, int, int], None]
"""(worker, tokens to read, blocks to hold)"""
Blame = Callable[[str], None]


class SharedLoad:
    """Of process `number` of `count`, on one event loop: `start` and `close` it."""

    def __init__(self, *, folder: Path, number: int, count: int, take: Take, blame: Blame) -> None:
        paths = [load_socket(folder, one) for one in range(count)]
        self._datagrams = Datagrams(paths, number, max_bytes=_MAX_BYTES, hear=self._hear)
        self._take = take
        self._blame = blame

    def tell(self, worker_id: str, num_tokens: int, num_blocks: int) -> None:
        head = _HEAD.pack(_GIVEN, min(max(num_tokens, 0), MOST), min(num_blocks, MOST))
        self._datagrams.send(head + worker_id.encode())

    def tell_failure(self, worker_id: str) -> None:
        self._datagrams.send(_HEAD.pack(_FAILED, 0, 0) + worker_id.encode())

    async def start(self) -> None:
        self._datagrams.start()

    async def close(self) -> None:
        self._datagrams.close()

    def _hear(self, told: bytes) -> None:
        kind, num_tokens, num_blocks = _HEAD.unpack_from(told)
        worker_id = told[_HEAD.size :].decode()
        if kind == _FAILED:
            self._blame(worker_id)
        else:
            self._take(worker_id, num_tokens, num_blocks)
