"""The small files of a model that is one GGUF file: each is made from the metadata when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from protos.model_files.gguf.gguf_config import config_of, generation_of
from protos.model_files.gguf.gguf_file import GGUFFile
from protos.model_files.gguf.gguf_tokenizer import GGUFVocabulary, tokenizer_config_of, tokenizer_of

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class GGUFFiles:
    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf

    @classmethod
    def open(cls, path: Path) -> GGUFFiles:
        """Raises BadCheckpoint or UnsupportedModel."""
        return cls(GGUFFile(path))

    @property
    def path(self) -> Path:
        return self.gguf.path

    @property
    def created_s(self) -> int:
        return int(self.path.stat().st_mtime)

    def where(self, name: str) -> str:
        return f"{self.path} (as {name})"

    def has(self, name: str) -> bool:
        return name == "config.json" or (name in _FILES and "tokenizer.ggml.tokens" in self.gguf.metadata)

    def json(self, name: str) -> Mapping[str, Any] | None:
        if not self.has(name):
            return None
        match name:
            case "config.json":
                return config_of(self.gguf)
            case "generation_config.json":
                return generation_of(self.gguf, self._vocabulary.end_ids())
            case "tokenizer_config.json":
                return tokenizer_config_of(self.gguf, self._vocabulary)
        return None

    def text(self, name: str) -> str | None:
        if name != "tokenizer.json" or not self.has(name):
            return None
        return tokenizer_of(self.gguf, self._vocabulary)

    def token_id(self, text: str) -> int | None:
        return self._vocabulary.tokens.find(text)

    def weight_files(self) -> list[Path]:
        return list(self.gguf.paths)

    def fingerprint(self) -> str:
        return self.gguf.fingerprint()

    @cached_property
    def _vocabulary(self) -> GGUFVocabulary:
        return GGUFVocabulary.of(self.gguf)
