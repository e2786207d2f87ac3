"""The files of a Hugging Face checkpoint's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.model_files.plain_files import read_object, read_plain, read_text
from protos.model_files.text_part import text_part
from protos.model_files.tokenizers.converted import has_other_tokenizer, other_tokenizer
from protos.model_files.tokenizers.special_tokens import token_id, with_named

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEMPLATES = "additional_chat_templates"
_OTHERS = ("output*.safetensors", "gptq_model*.safetensors")  # of exllamav2 and AutoGPTQ, without an index


@dataclass(frozen=True, slots=True)
class FolderFiles:
    path: Path

    @property
    def created_s(self) -> int:
        return int((self.path / "config.json").stat().st_mtime)

    def where(self, name: str) -> str:
        return str(self.path / name)

    def has(self, name: str) -> bool:
        made = name == "tokenizer.json" and has_other_tokenizer(self.path)
        return made or (self.path / name).is_file()

    def json(self, name: str) -> Mapping[str, Any] | None:
        """Reads a JSON file. config.json of a model that also reads images is that of its text part."""
        content = read_object(self.path / name)
        return text_part(content) if name == "config.json" and content is not None else content

    def text(self, name: str) -> str | None:
        text = read_text(self.path / name)
        if name != "tokenizer.json":
            return text
        text = other_tokenizer(self.path, self.json) if text is None else text
        return None if text is None else with_named(text, self.json, self.where(name))

    def token_id(self, text: str) -> int | None:
        tokenizer = self.text("tokenizer.json")
        return None if tokenizer is None else token_id(tokenizer, text)

    def weight_files(self) -> list[Path]:
        """The weight files to read. Others may be beside them, such as a consolidated copy."""
        shards = (read_object(self.path / INDEX) or {}).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) else self.unindexed_weights()
        files = sorted(path for name in names if (path := self.path / str(name)).is_file())
        return files or sorted(self.path.glob("*.safetensors"))

    def unindexed_weights(self) -> list[str]:
        """Names of weight files without an index."""
        if (self.path / SINGLE).exists():
            return [SINGLE]
        return sorted(file.name for pattern in _OTHERS for file in self.path.glob(pattern))

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=6)
        small = ("*.json", "*.jinja", f"{TEMPLATES}/*.jinja", "tokenizer.model", "tiktoken.model", "merges.txt")
        for path in (path for pattern in small for path in sorted(self.path.glob(pattern))):
            digest.update(read_plain(path))
        for path in self.weight_files():
            digest.update(f"{path.name} {path.stat().st_size}".encode())
        return digest.hexdigest()
