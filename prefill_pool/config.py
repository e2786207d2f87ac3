"""Settings of a prefill worker's role."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import Misconfigured


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """`chunk_bytes` bounds what one push copies, and so how long it keeps the engine from its next step."""

    chunk_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise Misconfigured(f"chunk_bytes is {self.chunk_bytes}: it must be at least 1", param="chunk_bytes")
