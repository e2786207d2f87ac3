"""Names of models in the Hugging Face hub, and the paths of its cache that they become."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@:\s]+))?(?::([^:\s]+))?", re.ASCII)
_CACHED = re.compile(r"/models--([^/]+)--([^/]+)/snapshots/([^/]+)(?:/(.+))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """`acme/tiny@main:Q4_K_M`: a repository, its `revision` ("" for the cached one, or main), and a GGUF `file`, by
    name or encoding ("" for a checkpoint's folder)."""

    repository: str
    revision: str = ""
    file: str = ""

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """Returns None for a path that exists, or that cannot be a hub's name."""
        match = _NAME.fullmatch(text)
        if match is None or Path(text).exists() or match[1].lower().endswith(".gguf"):
            return None
        return cls(repository=match[1], revision=match[2] or "", file=match[3] or "")

    @classmethod
    def of_cached(cls, path: str | Path) -> HubName | None:
        """The name, with its commit, of a path in the hub's cache; None for another path."""
        match = _CACHED.search(Path(path).absolute().as_posix())
        return match and cls(repository=f"{match[1]}/{match[2]}", revision=match[3], file=match[4] or "")

    @property
    def model(self) -> str:
        return self.repository.partition("/")[2]

    def __str__(self) -> str:
        return f"{self.repository}{self.revision and f'@{self.revision}'}{self.file and f':{self.file}'}"
