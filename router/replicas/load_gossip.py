"""Gateway processes behind one port publish the work that they route to workers, and workers' failures, to each other.

    decided ─▶ a datagram to each process ─▶ counts as routed, until the worker's own load includes it
    failed ──▶ a datagram to each process ─▶ counts for a while, together with that process's own failures in a row

Workers publish their load after each step only. Between two steps every process would choose the same idle worker.
A datagram is (given, tokens to prefill, blocks to hold, worker) or (failed, failures in a row, process, worker).
A lost datagram makes one decision slightly worse.
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
"""(worker, gateway process, its failures in a row)"""


class LoadGossip:
    """Process `number` of `count`, on one event loop: `start` and `close` it."""

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

    def _hear(self, message: bytes) -> None:
        kind, *numbers = _HEAD.unpack_from(message)
        worker_id = message[_HEAD.size :].decode()
        if kind == _FAILED:
            in_row, process = numbers
            self._blame(worker_id, process, in_row)
        else:
            num_tokens, num_blocks = numbers
            self._take(worker_id, num_tokens, num_blocks)
