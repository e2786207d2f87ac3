"""The seam between a model path and those that read its small files: `protos.model_files.opening` opens either kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class ModelFiles(Protocol):
    """The small files of a model, by their names in a Hugging Face folder.

    Both getters raise BadCheckpoint for content that is damaged, and return None where the model has no such file."""

    @property
    def path(self) -> Path:
        """The user's path, resolved to the folder or file that holds the model."""
        ...

    @property
    def created_s(self) -> int:
        """Seconds since the epoch."""
        ...

    def where(self, name: str) -> str: ...

    def has(self, name: str) -> bool: ...

    def json(self, name: str) -> Mapping[str, Any] | None: ...

    def text(self, name: str) -> str | None: ...

    def token_id(self, text: str) -> int | None: ...

    def weight_files(self) -> list[Path]:
        """In their order; empty where only the small files are."""
        ...

    def fingerprint(self) -> str:
        """Changes when answers may change: made from the small files and the sizes of weight files."""
        ...
