"""GGUF files: each tensor has a type of its own, which its file lists."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_files.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    kind: str  # of most weights
    encodings: str = "workers.checkpoint.encodings.gguf:encodings"

    @property
    def label(self) -> str:
        return f"gguf-{self.kind}"


def read_gguf(config: Fields) -> GGUFFormat:
    return GGUFFormat(kind=config.text_or("type", ""))
