"""Settings of the lanes. A value out of range raises Misconfigured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protos.errors import Misconfigured
from protos.setting import check_settings, setting

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
            raise Misconfigured(
                f"stall_s = {self.stall_s}: give at least {2 * self.heartbeat_s:g}, else idle lanes are lost",
                param="stall_s",
            )
