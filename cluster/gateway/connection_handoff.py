"""Distributes connections among gateway processes: the supervisor accepts them and gives each to the process with the
fewest.

    client ──▶ Door (supervisor): accept ══ the socket itself ══▶ Threshold (process): serve
                 ▲                                                     │
                 └──────────────── one byte a connection that ended ◀──┘

When a process ends, connections it had not taken yet go to another one, and the port stays open.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger("baton.cluster")

CONNECTION, NO_MORE, ENDED = b"c", b"n", b"e"
AT_ONCE = 64  # accepted in one iteration of the event loop
PAUSE_S = 0.02  # while no process, or no file descriptor, is available
MAX_ENDED = 4096


@dataclass(slots=True, eq=False)
class ProcessLink:
    """The supervisor's end of the channel to one process. `end` is the process's own, kept here too, so that sockets it
    left unread can be read."""

    ours: socket.socket
    end: socket.socket
    num_open: int = 0
    last_turn: int = 0
    in_rotation: bool = False


class ConnectionHandoff:
    """Runs on the supervisor's event loop, before a listening socket."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._listening.setblocking(False)
        self._ways: dict[int, ProcessLink] = {}
        self._waiting: deque[socket.socket] = deque()
        self._turn = 0
        self._is_shut = False
        self._loop = asyncio.get_running_loop()

    def open(self, number: int) -> socket.socket:
        """The end that process `number` inherits. It gets no connections before `admit`."""
        ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        end.setblocking(False)
        way = self._ways[number] = ProcessLink(ours, end)
        self._loop.add_reader(ours, self._count_ended, way)
        return end

    def admit(self, number: int) -> None:
        """From now on the process gets connections."""
        self._ways[number].in_rotation = True
        self._go_on()

    def dismiss(self, number: int) -> None:
        """Sends NO_MORE to the process, which gets no more connections."""
        way = self._ways[number]
        way.in_rotation = False
        with suppress(OSError):
            way.ours.send(NO_MORE)

    def lose(self, number: int) -> None:
        """The process has ended. Connections it had not taken go to others while the door is open."""
        way = self._ways.pop(number)
        self._loop.remove_reader(way.ours)
        with suppress(BlockingIOError):
            while received := socket.recv_fds(way.end, 1, 1):
                self._waiting.extend(socket.socket(fileno=one) for one in received[1])
        way.ours.close()
        way.end.close()
        if self._is_shut:
            self._end_waiting()
        self._go_on()

    def shut(self) -> None:
        """Accepts the connections that wait in the backlog, then closes the port."""
        if self._is_shut:
            return
        self._accept()
        self._is_shut = True
        self._loop.remove_reader(self._listening)
        self._listening.close()
        self._end_waiting()
        for number in self._ways:
            self.dismiss(number)

    # ------------------------------------------------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        while self._waiting:
            self._waiting.popleft().close()

    def _go_on(self) -> None:
        """Hands out waiting connections, then accepts more while a process can take them."""
        if self._is_shut:
            return
        self._loop.remove_reader(self._listening)
        while self._waiting:
            if not self._hand(self._waiting[0]):
                break
            self._waiting.popleft().close()
        if any(way.in_rotation for way in self._ways.values()):
            if self._waiting:
                self._loop.call_later(PAUSE_S, self._go_on)
            else:
                self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        if self._is_shut:
            return
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("connections wait to be accepted: %s", error.strerror)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(PAUSE_S, self._go_on)
                return
            if self._hand(connection):
                connection.close()
            else:
                self._waiting.append(connection)
                self._go_on()
                return

    def _hand(self, connection: socket.socket) -> bool:
        """True if a process has taken it."""
        ways = [way for way in self._ways.values() if way.in_rotation]
        for way in sorted(ways, key=lambda way: (way.num_open, way.last_turn)):
            try:
                socket.send_fds(way.ours, [CONNECTION], [connection.fileno()])
            except OSError:
                continue  # full, or gone and not noticed yet
            self._turn += 1
            way.last_turn = self._turn
            way.num_open += 1
            return True
        return False

    def _count_ended(self, way: ProcessLink) -> None:
        try:
            ended = way.ours.recv(MAX_ENDED)
        except OSError:
            return
        way.num_open -= len(ended)
        if not ended:
            self._loop.remove_reader(way.ours)


class ConnectionReceiver:
    """In a gateway process: calls `take` with each connection. `closed` is set when no more will come."""

    def __init__(self, end: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._end = end
        self._take = take
        self._num_ended = 0
        self.closed = asyncio.Event()
        end.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._receive)

    def ended(self) -> None:
        """Reports that a connection has ended."""
        self._num_ended += 1
        with suppress(OSError):  # the channel is full: reported with the next one
            self._end.send(ENDED * min(self._num_ended, MAX_ENDED))
            self._num_ended -= min(self._num_ended, MAX_ENDED)

    def close(self) -> None:
        self._loop.remove_reader(self._end)
        self._end.close()
        self.closed.set()

    def _receive(self) -> None:
        for _ in range(AT_ONCE):
            try:
                what, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                what, descriptors = b"", []
            for one in descriptors:
                self._take(socket.socket(fileno=one))
            if what != CONNECTION:  # no more will come, or the supervisor is gone
                self._loop.remove_reader(self._end)
                self.closed.set()
                return
