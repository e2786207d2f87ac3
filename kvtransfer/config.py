"""Settings of the lanes. A value out of range raises Misconfigured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protos.errors import Misconfigured
from protos.settings import check_settings, setting

Preference = Literal["auto", "shm", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """A lane's transport, timeouts and memory.

    `auto` takes shared memory if source and destination prove that they share some, else the network.
    """

    transport: Preference = setting("auto", "What KV travels over; auto: shared memory on one host.")
    heartbeat_s: float = setting(0.5, "An idle sender sends a message this often.", above=0)
    stall_s: float = setting(5.0, "A lane on which nothing has moved for this long is lost.", above=0)
    connect_timeout_s: float = setting(120.0, "A receiver waits this long for its sender.", above=0)
    max_staged_bytes: int = setting(256 * 2**20, "Staging memory of each end of a lane.", above=0)
    message_bytes: int = setting(8 * 2**20, "Size of the messages that a payload travels in.", above=0)
    max_lanes: int = setting(64, "Lanes of each end of a worker.", above=0)
    idle_timeout_s: float = setting(300.0, "An unneeded lane is closed after this time without use.", above=0)
    checksum: bool = setting(False, "Check every payload where it arrives.")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.stall_s < 2 * self.heartbeat_s:
            raise Misconfigured(
                f"stall_s = {self.stall_s}: give at least twice heartbeat_s = {self.heartbeat_s}, else idle lanes are "
                "lost",
                param="stall_s",
            )
