"""Settings of the lanes. Frozen; a value nobody could move KV with raises Misconfigured where it is written."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from protos.errors import Misconfigured

Preference = Literal["auto", "shm", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """What a lane runs over, how long it waits, and how much it keeps in memory.

    `transport` is auto (shared memory where source and destination prove that they have some in common, the network
    otherwise), or one of the two by name, which is then taken or refused.

    An idle sender says so every `beat_s`; a lane on which nothing has moved for `stall_s` is lost. A receiver waits
    `expect_s` for a sender it was told to expect. Each end of a lane stages about `max_staged_bytes`; a payload
    travels in messages of `message_bytes`. Each end of a worker has at most `max_lanes`; one that nobody needs is given
    up when it has idled for `idle_s`. With `checksum` every payload is checked where it arrives.
    """

    transport: Preference = "auto"
    beat_s: float = 0.5
    stall_s: float = 5.0
    expect_s: float = 120.0
    max_staged_bytes: int = 256 * 2**20
    message_bytes: int = 8 * 2**20
    max_lanes: int = 64
    idle_s: float = 300.0
    checksum: bool = False

    def __post_init__(self) -> None:
        if self.transport not in get_args(Preference):
            raise Misconfigured(
                f"transport is {self.transport!r}: choose one of {', '.join(get_args(Preference))}", param="transport"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("transport", "checksum") and not value > 0:
                raise Misconfigured(f"{field.name} is {value}: it must be above 0", param=field.name)
        if self.stall_s < 2 * self.beat_s:
            raise Misconfigured(
                f"stall_s is {self.stall_s}: it must be at least twice beat_s = {self.beat_s}, or idle lanes get lost",
                param="stall_s",
            )
