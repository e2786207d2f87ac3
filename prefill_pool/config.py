"""Settings of a prefill worker's role."""

from __future__ import annotations

from dataclasses import dataclass

from protos.settings import CheckedSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(CheckedSettings):
    chunk_bytes: int = setting(32 * 2**20, "Most bytes that one push copies before the engine's next step.", least=1)
    group_bytes: int = setting(2**20, "A prompt's last step pushes groups of layers of about this size.", least=1)
