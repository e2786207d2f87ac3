"""Settings of a prefill worker's role."""

from __future__ import annotations

from dataclasses import dataclass

from protos.settings import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    chunk_bytes: int = setting(32 * 2**20, "Most bytes that one push copies before the engine's next step.", least=1)
    group_bytes: int = setting(2**20, "A prompt's last step pushes groups of layers of about this size.", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
