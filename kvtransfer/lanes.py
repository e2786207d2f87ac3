"""Which lanes a worker keeps. Pure: what lanes say of themselves, and who needs them.

A lane costs a thread, connections and staging memory at both ends, so an idle one is given up after a while, and the
least recently used one as soon as there are too many. One that a ticket needs is never given up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtransfer.config import LaneConfig
from protos.errors import Overloaded
from protos.values import LaneStats


def superfluous(lanes: Sequence[LaneStats], needed: Collection[str], config: LaneConfig) -> tuple[str, ...]:
    """Peers whose lanes should end, those that have idled longest first. `needed` names peers with a live ticket."""
    unneeded = sorted((lane for lane in lanes if lane.peer not in needed), key=lambda lane: -lane.idle_s)
    num_over = len(lanes) - config.max_lanes
    return tuple(lane.peer for index, lane in enumerate(unneeded) if index < num_over or lane.idle_s > config.idle_s)


def require_room(peer: str, needed: Collection[str], config: LaneConfig) -> None:
    """Raises Overloaded when a ticket with one more peer would need more lanes than there may be."""
    if peer not in needed and len(needed) >= config.max_lanes:
        raise Overloaded(
            f"{len(needed)} lanes are in use, of at most {config.max_lanes}: a lane to {peer} would be one too many; "
            f"try again, or raise lanes.max_lanes",
            retry_after_s=1.0,
        )
