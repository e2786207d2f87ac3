"""Messages between a supervisor and a rank's process, over the socket at which the process listens.

supervisor ─▶ rank     RankSpec (once), or AttachRank; then StopRank, RankContact
rank ─▶ supervisor     Attached; then Loading, Serving, Logged, Ended"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.supervision.rank import Ended, Loading, Logged, RankSpec, Serving
from protos.codec import Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRank:
    """From a new supervisor, to a rank that has its spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRank:
    """Stop. Answered by Ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContact:
    """The rank's cluster is alive: without this message a rank on another node ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttached:
    """The first answer. `has_orders`: a supervisor has sent the rank its spec."""

    pid: int
    has_orders: bool


RANK_MESSAGES = Messages.of(RankSpec, AttachRank, StopRank, RankContact, RankAttached, Loading, Serving, Logged, Ended)
