"""Which lanes a worker keeps. Pure: the lanes' statistics, and the peers that tickets need.

A lane costs a thread, connections and staging memory at both ends, so an idle one is closed after a while, and the
least recently used one as soon as there are too many. A lane that is still opening and that no ticket needs is closed
soon: its peer may have died before it came. A lane that a ticket needs is never closed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from protos.errors import Misconfigured, Overloaded, TransferFailed
from protos.setting import check_settings, setting
from protos.values import LaneLoad, LaneStats

OPENING_S = 0.5
"""How long a lane that no ticket needs may take to open."""
RECONNECTING_S = 1.0
"""A refused ticket may be tried again after this time: the ranks of a lane in quarantine never stop connecting."""


Preference = Literal["auto", "shm", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """A lane's transport, timeouts and memory.

    `auto` takes shared memory if source and destination prove that they share some, else the network.
    """

    transport: Preference = setting("auto", "What KV travels over; auto: shared memory on one host.")
    heartbeat_s: float = 0.5  # an idle sender sends a message this often
    stall_s: float = setting(5.0, "A lane on which nothing has moved for this long is lost.", above=0)
    connect_timeout_s: float = 120.0  # a receiver waits this long for its sender
    max_staged_bytes: int = 256 * 2**20  # staging memory of each end of a lane
    message_bytes: int = 8 * 2**20  # size of the messages that a payload travels in
    max_lanes: int = 64  # lanes of each end of a worker
    idle_timeout_s: float = 300.0  # an unneeded lane is closed after this time without use
    checksum: bool = setting(False, "Check every payload where it arrives.")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.stall_s < 2 * self.heartbeat_s:
            raise Misconfigured(f"stall_s = {self.stall_s}: give at least {2 * self.heartbeat_s:g}", param="stall_s")


def overdue(lane: LaneStats, config: LaneConfig) -> bool:
    """True if the lane should close, unless a ticket needs it."""
    return lane.idle_s > (OPENING_S if lane.state == "opening" else config.idle_timeout_s)


def superfluous(lanes: Sequence[LaneStats], needed: Collection[str], config: LaneConfig) -> tuple[str, ...]:
    """Peers whose lanes should end, the longest idle first. `needed` names peers with a live ticket."""
    unneeded = sorted((lane for lane in lanes if lane.peer not in needed), key=lambda lane: -lane.idle_s)
    num_over = len(lanes) - config.max_lanes
    return tuple(lane.peer for index, lane in enumerate(unneeded) if index < num_over or overdue(lane, config))


def require_room(peer: str, needed: Collection[str], config: LaneConfig) -> None:
    """Raises Overloaded when a ticket with one more peer would need more lanes than there may be."""
    if peer not in needed and len(needed) >= config.max_lanes:
        raise Overloaded(f"{len(needed)} lanes are in use, of at most {config.max_lanes}: try again", retry_after_s=1.0)


def require_health(peer: str, lanes: Iterable[LaneStats]) -> None:
    """Raises TransferFailed with `retry_after_s` when the lane to or from this peer is in quarantine: another worker
    may have a lane that works."""
    for lane in lanes:
        if lane.peer == peer and lane.state in ("quarantined", "stuck"):
            raise TransferFailed(
                f"the lane between here and {peer} is {lane.state}: {lane.reason or 'it does not end'}",
                retry_after_s=RECONNECTING_S,
            )


def why_unhealthy(lanes: Iterable[LaneStats]) -> str:
    """Why a worker with these lanes cannot continue; "" if it can. A peer that hangs does not count."""
    return next((f"the lane to {lane.peer} is stuck and does not end" for lane in lanes if lane.state == "stuck"), "")


def merged(loads: Iterable[LaneLoad]) -> tuple[LaneLoad, ...]:
    by_key: dict[tuple[str, str], LaneLoad] = {}
    for load in loads:
        key = load.transport, load.reason
        before = by_key.get(key)
        by_key[key] = load if before is None else _sum(before, load)
    return tuple(by_key.values())


def _sum(one: LaneLoad, other: LaneLoad) -> LaneLoad:
    names = ("num_open", "num_opened", "num_lost", "num_stuck", "num_corrupt")
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})
