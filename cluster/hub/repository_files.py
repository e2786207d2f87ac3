"""Which files of a repository are served. Pure: names in, names out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from protos.errors import BadCheckpoint
from protos.hints import listed
from protos.model_files.folder import INDEX, SINGLE, TEMPLATES
from protos.model_files.hub_name import HubName

_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_ENCODING = re.compile(r"[-._]((?:UD-)?(?:I?Q\d|T?Q\d|B?F16|F32|MXFP4)\w*)$", re.IGNORECASE)

ReadIndex = Callable[[], Mapping[str, Any]]


def served_files(names: Sequence[str], name: HubName, read_index: ReadIndex, *, weights: bool = True) -> list[str]:
    """The files of `name` among those of its repository: a checkpoint's small files and, with `weights`, safetensors,
    or the shards of one GGUF model, in their order, and its chat templates. Raises BadCheckpoint if there are none, or
    GGUF files to choose from."""
    models = _gguf_models(names)
    if name.file:
        wanted = _SHARD.sub("", name.file).lower()
        chosen = [model for model in models if _is_named(model.lower(), wanted)]
    else:
        if stored := _weights(names, read_index):
            if missing := sorted(set(stored) - set(names)):
                raise BadCheckpoint(f"{name}: {INDEX} names {listed(missing)}, which it has not", param="model")
            return _small(names, name) + stored * weights
        chosen = list(models)
    if len(chosen) == 1:
        shards = models[chosen[0]]
        if (number := _SHARD.search(shards[0])) and len(shards) != int(number[1]):
            raise BadCheckpoint(f"{name} has {len(shards)} of the {number[1]} files of {chosen[0]}", param="model")
        return shards + _beside(names, shards[0], (".jinja",))
    if models:
        shown = listed([_encoding(model) for model in chosen or models], 40)
        raise BadCheckpoint(
            f"{name}: {'several' if chosen or not name.file else 'no'} GGUF models fit. GGUF files: {shown}; give "
            f"{name.repository}:FILE",
            param="model",
        )
    raise BadCheckpoint(
        f"{name} has no weights that are served, safetensors or GGUF: name another repository. It has "
        f"{listed(sorted(names)) or 'no files'}",
        param="model",
    )


def _small(names: Sequence[str], name: HubName) -> list[str]:
    """Raises BadCheckpoint without a configuration."""
    if not {"config.json", "adapter_config.json"} & set(names):
        raise BadCheckpoint(
            f"{name} has no config.json, so it is no checkpoint: name another repository. "
            f"It has {listed(sorted(names))}",
            param="model",
        )
    return _beside(names, "config.json", _SMALL)


def _beside(names: Sequence[str], weights: str, suffixes: tuple[str, ...]) -> list[str]:
    """Small files in the folder of the weights, and chat templates in a folder below it."""
    folders = (PurePosixPath(weights).parent, PurePosixPath(weights).parent / TEMPLATES)
    return [name for name in names if name.endswith(suffixes) and PurePosixPath(name).parent in folders]


def _weights(names: Sequence[str], read_index: ReadIndex) -> list[str]:
    """Chooses like `FolderFiles.weight_files`, without consolidated copies."""
    if INDEX in names and (indexed := set(read_index().get("weight_map", {}).values())) & set(names):
        return sorted(indexed)
    if SINGLE in names:
        return [SINGLE]
    at_top = [one for one in names if one.endswith(".safetensors") and "/" not in one]
    return sorted(one for one in at_top if not one.startswith("consolidated"))


def _gguf_models(names: Sequence[str]) -> dict[str, list[str]]:
    """The shards of each GGUF model, by its name without the shard's number."""
    models: dict[str, list[str]] = {}
    for one in sorted(names):
        if one.lower().endswith(".gguf") and not PurePosixPath(one).name.startswith("mmproj"):
            models.setdefault(_SHARD.sub("", one), []).append(one)
    return models


def _is_named(model: str, wanted: str) -> bool:
    path = PurePosixPath(model)
    return wanted in (model, path.name, path.stem) or path.stem.endswith(tuple(f"{mark}{wanted}" for mark in "-._"))


def _encoding(model: str) -> str:
    """Q4_K_M of tiny-Q4_K_M.gguf; the file's name if it shows none."""
    shown = _ENCODING.search(PurePosixPath(model).stem)
    return shown[1] if shown else PurePosixPath(model).name
