"""Settings of a prefill worker's role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    chunk_bytes: int = 32 * 2**20  # most bytes that one push copies before the engine's next step
    group_bytes: int = 2**20  # a prompt's last step pushes groups of layers of about this size
