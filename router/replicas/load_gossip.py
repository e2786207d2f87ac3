"""Gateway processes behind one port publish to each other the work that they have just given to workers, and failures
of workers.

    decided ─▶ a datagram to each sibling ─▶ counts as routed there, until the worker's own load shows it
    failed ──▶ a datagram to each sibling ─▶ counts for a while as failed there, with all that failed here in a row

Workers say what they have after each step only. Between two steps every process would choose the same idle worker.
A datagram says: (given, tokens to read, blocks to hold, worker), or (failed, how often in a row, who says so, worker).
One that is lost costs a choice that is a little worse.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from router.replicas.datagram_bus import DatagramBus
from router.replicas.peers import load_socket

_HEAD = struct.Struct("!cII")
_GIVEN, _FAILED = b"g", b"f"
_MAX_BYTES = 4096
MOST = 2**32 - 1

Take = Callable[[str, int, int], None]
"""(worker, tokens to read, blocks to hold)"""
Blame = Callable[[str, int, int], None]
"""(worker, sibling, its failures in a row)"""


class LoadGossip:
    """Of process `number` of `count`, on one event loop: `start` and `close` it."""

    def __init__(self, *, folder: Path, number: int, count: int, take: Take, blame: Blame) -> None:
        paths = [load_socket(folder, one) for one in range(count)]
        self._datagrams = DatagramBus(paths, number, max_bytes=_MAX_BYTES, hear=self._hear)
        self._number = number
        self._take = take
        self._blame = blame

    def tell(self, worker_id: str, num_tokens: int, num_blocks: int) -> None:
        head = _HEAD.pack(_GIVEN, min(max(num_tokens, 0), MOST), min(num_blocks, MOST))
        self._datagrams.send(head + worker_id.encode())

    def publish_failure(self, worker_id: str, in_row: int) -> None:
        self._datagrams.send(_HEAD.pack(_FAILED, min(in_row, MOST), self._number) + worker_id.encode())

    async def start(self) -> None:
        self._datagrams.start()

    async def close(self) -> None:
        self._datagrams.close()

    def _hear(self, told: bytes) -> None:
        kind, *numbers = _HEAD.unpack_from(told)
        worker_id = told[_HEAD.size :].decode()
        if kind == _FAILED:
            in_row, sibling = numbers
            self._blame(worker_id, sibling, in_row)
        else:
            num_tokens, num_blocks = numbers
            self._take(worker_id, num_tokens, num_blocks)
