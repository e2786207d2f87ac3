"""Settings of a prefill worker's role."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import Misconfigured


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """`chunk_bytes` bounds what one push copies, and so how long it keeps the engine from its next step. What the last
    step of a prompt computes is pushed by groups of layers, of about `group_bytes` or more each."""

    chunk_bytes: int = 32 * 2**20
    group_bytes: int = 2**20

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "group_bytes"):
            if getattr(self, name) < 1:
                raise Misconfigured(f"{name} is {getattr(self, name)}: it must be at least 1", param=name)
