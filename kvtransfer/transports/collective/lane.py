"""One end of a lane: threads that connect to the peer and move bytes, and connect again after a stall, until it closes.

opening ── all ranks meet ──▶ open ── closed, or the peer is gone ───────────────▶ ended
   ▲  ▲                        │ │
   │  └── closed because it idled, and needed again before it had ended ─┘       (nothing is lost by this)
   │                           │
   └─────── quarantined ◀──────┘ nothing moved for `stall_s`: aborted; not used until its ranks have connected again, or
                                 this end could have for `stall_s`: a peer that has left comes only for another ticket
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transports.collective.lane_wire import LaneWire, PayloadCorrupted, Rendezvous, WireBroken, WireStuck
from protos.values import LaneLoad, LaneStats

log = logging.getLogger("baton.kvtransfer")

_RETRY_S = 0.2


class LaneCounters:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], Counter[str]] = {}

    def opened(self, transport: str, why: str) -> None:
        with self._lock:
            self._counts.setdefault((transport, why), Counter()).update(num_open=1, num_opened=1)

    def ended(self, transport: str, why: str, *, lost: bool, stuck: bool, corrupt: bool) -> None:
        with self._lock:
            counts = self._counts[transport, why]
            counts["num_open"] -= 1
            if lost:
                counts.update(num_lost=1, num_stuck=int(stuck), num_corrupt=int(corrupt))

    def lane_loads(self) -> Sequence[LaneLoad]:
        with self._lock:
            return [LaneLoad(transport=key[0], reason=key[1], **counts) for key, counts in self._counts.items()]


class Closing(Exception):
    """The lane is to end."""


class ClosedIdle(Exception):
    """The lane ends because no ticket needs it. Everything sent has arrived."""


Lost = Callable[[Exception, bool], None]
"""Called with the reason why payloads on their way will not arrive. True: the lane has ended, and its owner drops
it."""
Over = Callable[[], bool]
"""Returns True if a lane that is closing, or that idled, may end: its owner has dropped it then."""


class Lane:
    """The threads of a lane, its progress and its end. Works move bytes until one of them raises. `wait_s`: how long to
    wait for the peer. The owner guards `closing_idle`."""

    def __init__(
        self, peer: str, meeting: Rendezvous, counters: LaneCounters, config: LaneConfig, *, wait_s: float
    ) -> None:
        self.peer = peer
        self.meeting = meeting
        self.num_staged_bytes = 0
        self.closing = threading.Event()
        self.closing_idle = False
        self._left = False  # aborted by us, because it was not needed
        self._counters = counters
        self._config = config
        self._wire: LaneWire | None = None
        self._wire_lock = threading.Lock()
        self._quarantine = ""  # why
        self._wait_s = wait_s
        self._deadline_s = 0.0
        self._waiting_since_s = math.inf  # at the meeting place, for the peer
        self._aborted_s: float | None = None
        self._num_bytes = 0
        self._busy_s = 0.0
        self._progress_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self.still_wanted()

    def start(self, works: Sequence[Callable[[LaneWire], None]], *, lost: Lost, over: Over) -> None:
        """Calls each of `works` repeatedly, on a thread of its own, and then the other two."""
        self._thread = self._make_thread(self._run, works, lost, over)
        self._thread.start()

    def still_wanted(self) -> None:
        """Restarts the wait for the peer, and cancels a pending close."""
        self.closing_idle = False
        self._deadline_s = time.monotonic() + self._wait_s

    def moved(self, num_bytes: int, elapsed_s: float) -> None:
        self._num_bytes += num_bytes
        self._busy_s += elapsed_s
        self._progress_s = time.monotonic()

    def idles(self) -> bool:
        """Whether it has been idle for long enough to be closed, unless it is needed."""
        return time.monotonic() - self._progress_s > self._config.idle_timeout_s

    def abort(self) -> None:
        """Returns at once; threads that wait on the wire fail as soon as they notice."""
        with self._wire_lock:
            wire = self._wire
            if wire is not None:
                self._aborted_s = self._aborted_s or time.monotonic()
        if wire is not None:
            wire.abort()

    @property
    def aborted(self) -> bool:
        """Whether the wire has been aborted, so that its threads should end."""
        return self._aborted_s is not None

    def close_idle(self) -> None:
        """Closes a lane that no ticket needs, on the receiving end: without a goodbye."""
        self.closing_idle = self._left = True
        self.abort()

    def end(self) -> None:
        """Returns at once; the thread ends as soon as it notices."""
        self.closing.set()
        self.abort()

    def ended(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(2 * self._config.stall_s)
            if self._thread.is_alive():
                log.error("the thread of the lane to %s does not end", self.peer)

    def stats(self) -> LaneStats:
        with self._wire_lock:
            wire = self._wire
        return LaneStats(
            peer=self.peer,
            transport=wire.transport if wire else "none yet",
            state=self._state(wire),
            num_bytes=self._num_bytes,
            busy_s=self._busy_s,
            idle_s=time.monotonic() - self._progress_s,
            reason=self._quarantine or (wire.why if wire else ""),
        )

    def _state(self, wire: LaneWire | None) -> str:
        """True if a wire was aborted and its thread does not end: it hangs within a library."""
        if self._aborted_s is not None and time.monotonic() - self._aborted_s > 2 * self._config.stall_s:
            return "stuck"
        return "quarantined" if self._quarantine else "open" if wire else "opening"

    # -- on the lane's threads -----------------------------------------------------------------------------------------

    def _run(self, works: Sequence[Callable[[LaneWire], None]], lost: Lost, over: Over) -> None:
        while True:
            reason = self._live(works)
            if self.closing.is_set() or reason is None:
                if over():
                    return
                self._deadline_s = time.monotonic() + self._wait_s
            elif isinstance(reason, WireStuck) and not self._quarantine:
                self._enter_quarantine(str(reason))
                lost(reason, False)
            elif not isinstance(reason, WireStuck) or not self._may_try_again():
                lost(reason, True)
                return

    def _live(self, works: Sequence[Callable[[LaneWire], None]]) -> Exception | None:
        """Runs the wire once, from the meeting to its end. Returns the error, or None after an intended end."""
        reasons: list[Exception] = []
        wire = self._meet(reasons)
        if wire is not None:
            first, *others = works
            beside = [self._make_thread(self._work, work, wire, reasons) for work in others]
            for thread in beside:
                thread.start()
            self._work(first, wire, reasons)
            for thread in beside:
                thread.join()
        wanted = not reasons or isinstance(reasons[0], Closing | ClosedIdle) or self._left
        reason = None if wanted else reasons[0]
        self._left = False
        if wire is not None:
            self._counters.ended(
                wire.transport,
                wire.why,
                lost=reason is not None and not self.closing.is_set(),
                stuck=isinstance(reason, WireStuck),
                corrupt=isinstance(reason, PayloadCorrupted),
            )
        with self._wire_lock:
            self._wire = None  # closes the connections, which the peer notices
            self._aborted_s = None
        if wire is not None:
            wire.close()
        self.meeting.close()
        return reason

    def _meet(self, reasons: list[Exception]) -> LaneWire | None:
        self._waiting_since_s = math.inf
        try:
            wire = self.meeting.connect(self._keep_waiting)
        except Exception as error:  # as in `_work`
            self._note(error, reasons)
            return None
        log.info(
            "the lane to %s goes over %s%s", self.peer, wire.transport, f", no faster: {wire.why}" if wire.why else ""
        )
        self._counters.opened(wire.transport, wire.why)
        with self._wire_lock:
            self._wire = wire
        self._quarantine = ""
        self._progress_s = time.monotonic()
        return wire

    def _work(self, work: Callable[[LaneWire], None], wire: LaneWire, reasons: list[Exception]) -> None:
        try:
            while not (self.closing.is_set() or reasons):
                work(wire)
        except (
            Exception
        ) as error:  # the thread must always report how it ended, or tickets would hang until their lease
            self._note(error, reasons)
            if not isinstance(error, ClosedIdle):
                self.abort()

    def _note(self, error: Exception, reasons: list[Exception]) -> None:
        if not isinstance(error, WireBroken | Closing | ClosedIdle):
            log.error("the lane to %s failed", self.peer, exc_info=error)
            error = WireBroken(f"{type(error).__name__}: {error}")
        reasons.append(type(error)(*error.args))  # without the frames it came through: they would keep the wire alive

    def _enter_quarantine(self, reason: str) -> None:
        log.warning("the lane to %s is in quarantine until its ranks connect again: %s", self.peer, reason)
        self._quarantine = reason
        self._deadline_s = time.monotonic() + self._config.connect_timeout_s

    def _may_try_again(self) -> bool:
        """Whether another try may succeed: the peer did not answer, but its rendezvous server is open."""
        return not self.closing.wait(_RETRY_S) and time.monotonic() < self._deadline_s

    def _make_thread(self, target: Callable[..., None], *args: object) -> threading.Thread:
        return threading.Thread(target=target, args=args, name=f"lane {self.peer}", daemon=True)

    def _keep_waiting(self, seconds: float) -> None:
        if self.closing.wait(seconds):
            raise Closing
        if self.closing_idle and not self.num_staged_bytes:
            raise ClosedIdle
        self._waiting_since_s = min(self._waiting_since_s, time.monotonic())
        if time.monotonic() - self._waiting_since_s > self._config.stall_s:
            self._quarantine = ""
        if time.monotonic() > self._deadline_s:
            raise WireBroken(f"{self.peer} did not connect within {self._wait_s:g} s")


def end_all(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.end()
    for lane in lanes:
        lane.join()
