"""What a supervisor and a rank's process send each other, over the socket at which the process listens.

    supervisor ─▶ rank     RankSpec (once), or AttachRank; then StopRank, RankContact
    rank ─▶ supervisor     Attached; then Loading, Serving, Logged, Ended

A rank has one supervisor at a time: a new one takes the place of the one before it, and receives the rank's present
state first.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.supervision.rank import Ended, Loading, Logged, RankSpec, Serving
from protos.codec import Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRank:
    """From a supervisor that is new to a rank which has its orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRank:
    """End now. Answered by Ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContact:
    """The cluster that the rank belongs to is there: a rank on a node of its own ends without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttached:
    """The first answer. `has_orders`: the rank has been started, by this supervisor or one before it."""

    pid: int
    has_orders: bool


RANK_MESSAGES = Messages(
    {
        kind.__name__: kind
        for kind in (RankSpec, AttachRank, StopRank, RankContact, RankAttached, Loading, Serving, Logged, Ended)
    }
)
