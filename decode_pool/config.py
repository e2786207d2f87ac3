"""Settings of a decode worker's role."""

from __future__ import annotations

from dataclasses import dataclass

from protos.settings import CheckedSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(CheckedSettings):
    headroom: float = setting(0.05, "Share of the blocks that reservations leave to running answers.", least=0, below=1)
    retry_after_s: float = setting(0.5, "A refused reservation may be tried again after this time.", above=0)
    max_lease_s: float = setting(120.0, "Longest lease of a ticket.", above=0)
