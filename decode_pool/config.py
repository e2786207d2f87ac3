"""Settings of a decode worker's role."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import Misconfigured


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """`headroom` is the part of all blocks that reservations leave to running answers. A refused reservation may be
    tried again after `retry_after_s`; nobody gets a longer lease than `max_lease_s`."""

    headroom: float = 0.05
    retry_after_s: float = 0.5
    max_lease_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.headroom < 1.0:
            raise Misconfigured(f"headroom is {self.headroom}: it must be at least 0 and below 1", param="headroom")
        for name in ("retry_after_s", "max_lease_s"):
            if not getattr(self, name) > 0:
                raise Misconfigured(f"{name} is {getattr(self, name)}: it must be above 0", param=name)
