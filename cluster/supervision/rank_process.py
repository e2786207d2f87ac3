"""A rank's own process. It does not use Ray: it outlives Ray and every supervisor, and ends with its cluster.

listen ─▶ RankSpec ─▶ Loading ... ─▶ Serving ─▶ ... ─▶ Ended: sent to the supervisor, then the process ends
             └─ the supervisor is gone ─▶ the rank continues ─▶ another one attaches
It ends by itself when the `baton` process of its cluster has ended: on that process's machine immediately, by a lock
that the kernel releases; on another machine after `contact_s` without a `RankContact`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from cluster.process.channel import MessageChannel
from cluster.supervision.rank import Ended, Event, LocalRank, Logged, RankSpec
from cluster.supervision.rank_messages import RANK_MESSAGES, AttachRank, RankAttached, RankContact, StopRank
from protos.hints import encodable

log = logging.getLogger("baton.worker")

MAX_UNSENT = 1_000  # log lines kept for the next supervisor
ORDERS_S = 20.0  # for the supervisor that has started the process
LAST_WORDS_S = 30.0  # for a supervisor to learn why the rank has ended
ORPHAN_STOP_S = 2.0


class RankProcess:
    """Lives on one event loop."""

    def __init__(self, contact_s: float = 0.0) -> None:
        self.over = asyncio.Event()
        self._rank = LocalRank(self._touch)
        self._orders: RankSpec | None = None
        self._state: Event | None = None  # the latest Loading or Serving
        self._unsent: deque[Event] = deque(maxlen=MAX_UNSENT)
        self._ended: Ended | None = None
        self._channel: MessageChannel | None = None
        self._contact_s = contact_s
        self._loop = asyncio.get_running_loop()
        self._last_contact_s = self._loop.time()
        self._tasks = {self._loop.create_task(self._relay())}
        self._loop.call_later(ORDERS_S, self._expect_orders)
        if contact_s:
            self._tasks.add(self._loop.create_task(self._expect_contact()))

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = MessageChannel(reader, writer, RANK_MESSAGES)
        match await channel.receive():
            case RankSpec() as orders:
                self._start(orders)
            case AttachRank():
                pass
            case _:
                await channel.close()
                return
        self._attach(channel)
        while (message := await channel.receive()) is not None:
            self._touch()
            if isinstance(message, StopRank):
                self._do(self._rank.stop())
            elif not isinstance(message, RankContact):
                log.error("a rank cannot handle the message %s", type(message).__name__)
        if self._channel is channel:
            self._channel = None
        await channel.close()

    def leave(self) -> None:
        """Handles a signal: drains, then ends."""
        grace_s = self._orders.grace_s if self._orders is not None else 0.0
        log.info("SIGTERM: running requests have %g s to finish", grace_s)
        self._do(self._rank.leave(grace_s))
        if self._orders is None:
            self.over.set()

    def orphaned(self, why: str) -> None:
        if self.over.is_set():
            return
        log.warning("%s: the rank ends", why)
        self._do(self._rank.stop())
        self._loop.call_later(ORPHAN_STOP_S, self.over.set)
        self._ended = self._ended or Ended()

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, orders: RankSpec) -> None:
        if self._orders is None:
            self._orders = orders
            self._touch()
            relay = LogRelay(self._rank)
            logging.getLogger("baton").addHandler(relay)
            logging.getLogger("baton").setLevel(logging.INFO)
            self._rank.start(orders)

    def _attach(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._touch()
        channel.send(RankAttached(pid=os.getpid(), has_orders=self._orders is not None))
        while self._unsent:
            channel.send(self._unsent.popleft())
        if self._state is not None:
            channel.send(self._state)
        if self._ended is not None:
            self._do(self._last_words(self._ended))

    def _touch(self) -> None:
        self._last_contact_s = self._loop.time()

    async def _relay(self) -> None:
        while True:
            self._note(await self._rank.news())

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Ended():
                    self._ended = event
                    self._do(self._last_words(event))
                    continue
                case Logged() if self._channel is None:
                    self._unsent.append(event)
                    continue
                case Logged():
                    pass
                case _:
                    self._state = event
            if self._channel is not None:
                self._channel.send(event)

    async def _last_words(self, ended: Ended) -> None:
        if self._channel is None:
            self._loop.call_later(LAST_WORDS_S, self.over.set)
            return
        self._channel.send(ended)
        await self._channel.close()
        self.over.set()

    def _expect_orders(self) -> None:
        if self._orders is None:
            self.over.set()

    async def _expect_contact(self) -> None:
        while (left_s := self._last_contact_s + self._contact_s - self._loop.time()) > 0:  # noqa: ASYNC110 - of silence
            await asyncio.sleep(left_s)
        self.orphaned(f"no supervisor has been in contact for {self._contact_s:g} s")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class LogRelay(logging.Handler):
    """Sends log records to the supervisor, which writes the log."""

    def __init__(self, rank: LocalRank) -> None:
        super().__init__(logging.INFO)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._rank.tell(Logged(level=record.levelno, message=encodable(self.format(record))))


def watch_lock(path: str, process: RankProcess) -> None:
    """Waits on a thread until the process that locks the file has ended in any way."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError as error:
            why = f"{path}: {error.strerror}"
        else:
            why = "the process that holds this cluster has ended"
        with suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(process.orphaned, why)

    threading.Thread(target=wait, daemon=True, name="cluster").start()


async def run(listening: socket.socket, lock: str, contact_s: float) -> None:
    process = RankProcess(contact_s)
    if lock:
        watch_lock(lock, process)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.leave)
    server = await asyncio.start_unix_server(process.meet, sock=listening)
    await process.over.wait()
    server.close()
    os._exit(0)  # interpreter exit would wait for threads of libraries and for calls that never return


def main(arguments: Sequence[str]) -> None:
    """Runs a rank. `arguments`: the descriptor of a listening socket; the lock that the cluster holds, or ""; the
    seconds without contact after which the rank ends, or 0."""
    import uvloop

    descriptor, lock, contact_s = arguments[:3]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    uvloop.run(run(socket.socket(fileno=int(descriptor)), lock, float(contact_s)))
