"""The folder that a quantised checkpoint is written to: shards, their index, and the small files of the model it was
made from. It has its name only when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file

from protos.errors import Misconfigured
from protos.model_files.folder import TEMPLATES

_SHARD_BYTES = 1 << 30
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_REPLACED = {"config.json", "model.safetensors.index.json"}


class QuantisedFolder:
    """A context: at its regular end the folder is renamed to `path`, after an error it is removed."""

    def __init__(self, path: Path, source: Path) -> None:
        """Raises Misconfigured where there is something at `path`, or no folder to put it into."""
        if path.exists():
            raise Misconfigured(f"{path} is there already: give another OUT, or remove it first", param="out")
        if not path.parent.is_dir():
            raise Misconfigured(f"there is no folder {path.parent}: make it, or give another OUT", param="out")
        self._path, self._source = path, source
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []

    def __enter__(self) -> QuantisedFolder:
        self._partial.mkdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name] = tensor.contiguous()
            self._num_bytes += tensor.nbytes
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= _SHARD_BYTES:
            self._write_shard()

    def finish(self, config: Mapping[str, Any]) -> None:
        """Writes the rest, `config` as config.json, and copies the small files."""
        self._write_shard()
        names = [f"model-{place + 1:05}-of-{len(self._shards):05}.safetensors" for place in range(len(self._shards))]
        if len(names) == 1:
            names = ["model.safetensors"]
        else:
            where = {tensor: name for name, (_, held) in zip(names, self._shards, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": where}
            self._write_json("model.safetensors.index.json", index)
        for name, (shard, _) in zip(names, self._shards, strict=True):
            shard.rename(self._partial / name)
        self._write_json("config.json", config)
        for file in sorted(self._source.iterdir()):
            if file.is_file() and file.suffix not in _WEIGHTS and file.name not in _REPLACED:
                shutil.copyfile(file, self._partial / file.name)
        if (self._source / TEMPLATES).is_dir():
            shutil.copytree(self._source / TEMPLATES, self._partial / TEMPLATES)
        self._partial.rename(self._path)

    def _write_shard(self) -> None:
        if not self._tensors:
            return
        shard = self._partial / f"shard-{len(self._shards)}.safetensors"
        save_file(self._tensors, shard, metadata={"format": "pt"})
        self._shards.append((shard, list(self._tensors)))
        self._tensors = {}

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        (self._partial / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
