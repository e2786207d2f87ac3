"""Settings of a decode worker's role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    headroom: float = 0.05  # share of the blocks that reservations leave to running answers
    retry_after_s: float = 0.5  # a refused reservation may be tried again after this time
    max_lease_s: float = 120.0  # longest lease of a ticket
