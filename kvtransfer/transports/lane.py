"""One end of a lane: a thread that meets the peer and moves bytes until it is asked to end, or the wire breaks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvtransfer.transports.wire import Rendezvous, Wire, WireBroken
from protos.values import LaneStats

log = logging.getLogger("baton.kvtransfer")


class Closing(Exception):
    """The lane was asked to end."""


class Lane:
    """One end of a lane: its thread, its clock of progress, and how it ends. `work` moves bytes until it raises."""

    def __init__(self, peer: str, meeting: Rendezvous, *, stall_s: float, wait_s: float) -> None:
        self.peer = peer
        self.meeting = meeting
        self.num_staged_bytes = 0
        self.closing = threading.Event()
        self._stall_s = stall_s
        self._wire: Wire | None = None
        self._wire_lock = threading.Lock()
        self._wait_s = wait_s
        self._deadline_s = 0.0
        self._num_bytes = 0
        self._busy_s = 0.0
        self._progress_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self.still_wanted()

    def start(self, work: Callable[[Wire], None], lost: Callable[[str | None], None]) -> None:
        """`lost` is called once, at the very end: with a reason, or None if the lane was asked to end."""
        self._thread = threading.Thread(target=self._run, args=(work, lost), name=f"lane {self.peer}", daemon=True)
        self._thread.start()

    def still_wanted(self) -> None:
        """Begins the wait for the peer anew."""
        self._deadline_s = time.monotonic() + self._wait_s

    def moved(self, num_bytes: int, elapsed_s: float) -> None:
        self._num_bytes += num_bytes
        self._busy_s += elapsed_s
        self._progress_s = time.monotonic()

    def end(self) -> None:
        """Returns at once; the thread ends as soon as it notices."""
        self.closing.set()
        with self._wire_lock:
            wire = self._wire
        if wire is not None:
            wire.sever()

    def ended(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(2 * self._stall_s)
            if self._thread.is_alive():
                log.error("the thread of the lane to %s does not end", self.peer)

    def stats(self) -> LaneStats:
        with self._wire_lock:
            wire = self._wire
        return LaneStats(
            peer=self.peer,
            transport=wire.transport if wire else "none yet",
            state="open" if wire else "opening",
            num_bytes=self._num_bytes,
            busy_s=self._busy_s,
            idle_s=time.monotonic() - self._progress_s,
        )

    def _run(self, work: Callable[[Wire], None], lost: Callable[[str | None], None]) -> None:
        reason: str | None = None
        try:
            wire = self.meeting.meet(self._keep_waiting)
            with self._wire_lock:
                self._wire = wire
            self._progress_s = time.monotonic()
            while not self.closing.is_set():
                work(wire)
        except Closing:
            pass
        except WireBroken as error:
            reason = str(error)
        except Exception as error:  # the thread must always say how it ended, or tickets would hang until their lease
            log.exception("the lane to %s failed", self.peer)
            reason = f"{type(error).__name__}: {error}"
        self.meeting.leave()
        with self._wire_lock:
            self._wire = None  # and with its groups go the connections, which the peer notices
        lost(None if self.closing.is_set() else reason)

    def _keep_waiting(self, seconds: float) -> None:
        if self.closing.wait(seconds):
            raise Closing
        if time.monotonic() > self._deadline_s:
            raise WireBroken(f"{self.peer} did not come within {self._wait_s:g} s")


def end_all(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.end()
    for lane in lanes:
        lane.join()
