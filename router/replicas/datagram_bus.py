"""Messages between gateway processes behind one port: datagrams over Unix sockets; sending never blocks.

While a process's socket is full its datagrams wait in a short queue. A datagram to a process that is gone is lost.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

MAX_WAITING = 256  # for one process
BUFFER_BYTES = 4 * 2**20
AT_ONCE = 64  # read in one turn of the event loop


class DatagramBus:
    """The bus of process `number`, whose socket is at that place of `paths`: `start` and `close` it on its event loop.
    `hear` is called with other processes' messages of at most `max_bytes`."""

    def __init__(self, paths: Sequence[str], number: int, *, max_bytes: int, hear: Callable[[bytes], None]) -> None:
        self._path = paths[number]
        self._ways = [DatagramPeer(path) for place, path in enumerate(paths) if place != number]
        self._max_bytes = max_bytes
        self._hear = hear
        self._end: socket.socket | None = None

    @property
    def num_dropped(self) -> int:
        """Messages that could not be sent."""
        return sum(way.num_dropped for way in self._ways)

    def send(self, told: bytes) -> None:
        for way in self._ways:
            way.send(told)

    def start(self) -> None:
        self._end = _bound(self._path)
        asyncio.get_running_loop().add_reader(self._end, self._read, self._end)

    def close(self) -> None:
        if self._end is not None:
            asyncio.get_running_loop().remove_reader(self._end)
            self._end.close()
            self._end = None
        for way in self._ways:
            way.close()

    def _read(self, end: socket.socket) -> None:
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                self._hear(end.recv(self._max_bytes))


class DatagramPeer:
    """The queue to one process, across its restarts."""

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
            asyncio.get_running_loop().add_writer(self._end, self._resume)

    def close(self) -> None:
        if self._end is not None:
            asyncio.get_running_loop().remove_writer(self._end)
            self._end.close()
            self._end = None
        self.num_dropped += len(self._waiting)
        self._waiting.clear()

    def _resume(self) -> None:
        while self._waiting and self._try(self._waiting[0]):
            if self._waiting:
                self._waiting.popleft()
        if not self._waiting and self._end is not None:
            asyncio.get_running_loop().remove_writer(self._end)

    def _try(self, message: bytes) -> bool:
        """False if there is no room now. Messages to a process that is gone are lost."""
        for _ in range(2):  # the second time to its next life
            try:
                self._end = self._end or _connected(self._path)
            except OSError:
                break
            try:
                self._end.send(message)
                return True
            except BlockingIOError:
                return False
            except OSError:
                self.close()
        self.num_dropped += 1
        return True


def _bound(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)  # left by a process that died
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
