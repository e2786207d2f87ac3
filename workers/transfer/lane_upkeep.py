"""Keeps the lanes of one end of a worker in number and in health. The engine's thread calls, between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvtransfer.lane_config import LaneConfig
from kvtransfer.lane_rules import overdue, require_health, require_room, superfluous
from protos.values import LaneStats

PERIOD_S = 1.0


class LaneUpkeep:
    """`lanes` returns the open lanes, `close_lane(peer)` closes one without a loss, on every rank.

    The caller names the peers that are needed: those with live tickets.
    """

    def __init__(
        self, lanes: Callable[[], Sequence[LaneStats]], close_lane: Callable[[str], None], config: LaneConfig
    ) -> None:
        self._lanes = lanes
        self._close_lane = close_lane
        self._config = config
        self._next_look_s = 0.0

    def require(self, peer: str, needed: Collection[str]) -> None:
        """Before a ticket with a peer. Raises TransferFailed when the lane is in quarantine, and Overloaded when it
        would be one too many."""
        require_health(peer, self._lanes())
        require_room(peer, needed, self._config)

    def overdue(self) -> bool:
        """True if `close_unneeded` has a lane to check, now or soon."""
        return any(lane.state == "opening" or overdue(lane, self._config) for lane in self._lanes())

    def close_unneeded(self, now: float, needed: Callable[[], Collection[str]]) -> None:
        """Closes the lanes of peers that are not needed. Looks at them once a second, however often it is called."""
        if now < self._next_look_s:
            return
        self._next_look_s = now + PERIOD_S
        lanes = self._lanes()
        if lanes:
            for peer in superfluous(lanes, needed(), self._config):
                self._close_lane(peer)
