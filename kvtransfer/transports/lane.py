"""One end of a lane: a thread that meets the peer and moves bytes until it is asked to end, or the wire breaks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtransfer.transports.wire import Rendezvous, Wire, WireBroken
from protos.values import LaneStats

log = logging.getLogger("baton.kvtransfer")


class Closing(Exception):
    """The lane was asked to end."""


class Lane:
    """One end of a lane: its threads, its clock of progress, and how it ends. Works move bytes until one raises."""

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

    def start(self, works: Sequence[Callable[[Wire], None]], lost: Callable[[str | None], None]) -> None:
        """Calls each of `works` again and again, on a thread of its own. `lost` is called once, at the very end: with
        a reason, or None if the lane was asked to end."""
        self._thread = self._make_thread(self._run, works, lost)
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

    def _run(self, works: Sequence[Callable[[Wire], None]], lost: Callable[[str | None], None]) -> None:
        reasons: list[str] = []
        with self._reasons_for_the_end(reasons):
            wire = self.meeting.meet(self._keep_waiting)
            with self._wire_lock:
                self._wire = wire
            self._progress_s = time.monotonic()
            first, *others = works
            beside = [self._make_thread(self._work, work, wire, reasons) for work in others]
            for thread in beside:
                thread.start()
            self._work(first, wire, reasons)
            for thread in beside:
                thread.join()
        self.meeting.leave()
        with self._wire_lock:
            broken, self._wire = self._wire, None  # and with it go the connections, which the peer notices
        if broken is not None:
            broken.close()
        lost(None if self.closing.is_set() or not reasons else reasons[0])

    def _work(self, work: Callable[[Wire], None], wire: Wire, reasons: list[str]) -> None:
        """Whichever ends first ends the others."""
        with self._reasons_for_the_end(reasons):
            while not (self.closing.is_set() or reasons):
                work(wire)
        if reasons:
            wire.sever()

    @contextmanager
    def _reasons_for_the_end(self, reasons: list[str]) -> Iterator[None]:
        try:
            yield
        except Closing:
            pass
        except WireBroken as error:
            reasons.append(str(error))
        except Exception as error:  # the thread must always say how it ended, or tickets would hang until their lease
            log.exception("the lane to %s failed", self.peer)
            reasons.append(f"{type(error).__name__}: {error}")

    def _make_thread(self, target: Callable[..., None], *args: object) -> threading.Thread:
        return threading.Thread(target=target, args=args, name=f"lane {self.peer}", daemon=True)

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
