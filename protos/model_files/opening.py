"""A model path is a Hugging Face folder, a GGUF file, or a folder that holds one GGUF model."""

from __future__ import annotations

import re
from pathlib import Path

from protos.errors import BadCheckpoint
from protos.hints import listed
from protos.model_files.files_seam import ModelFiles
from protos.model_files.folder import FolderFiles
from protos.model_files.gguf.gguf_file import MAGIC, first_shard
from protos.model_files.gguf.gguf_files import GGUFFiles
from protos.model_files.hub_name import HubName
from protos.model_files.plain_files import open_plain

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def open_model(path: str | Path) -> ModelFiles:
    """Raises BadCheckpoint where there is no model, or its GGUF header is damaged."""
    path = Path(path)
    if path.is_dir():
        return _in_folder(path)
    if not path.exists():
        raise BadCheckpoint(f"there is no folder or file {path}: give --model a checkpoint's folder or a .gguf file")
    if not is_gguf(path):
        raise BadCheckpoint(f"{path} is a file: give --model the folder that it lies in, or a .gguf file")
    return GGUFFiles.open(path)


def model_name(path: str | Path) -> str:
    """The name of a model without one: its folder's or GGUF file's; in Hugging Face's cache
    (models--Acme--Tiny/snapshots/HASH) the repository's."""
    if (named := HubName.of(str(path))) is not None:
        return named.model
    place = Path(path).resolve()
    if place.parent.name == "blobs":
        place = Path(path).absolute()
    cached = HubName.of_cached(place)
    name = cached.model if cached is not None and not cached.file else place.name
    return _SHARD.sub("", name[: -len(".gguf")]) if name.lower().endswith(".gguf") else name


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file, by name or by its first bytes: download programs may name files by their hash."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open_plain(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _in_folder(folder: Path) -> ModelFiles:
    if (folder / "config.json").is_file():
        return FolderFiles(folder)
    shards = {first_shard(file) for file in folder.glob("*.gguf") if not file.name.startswith("mmproj")}
    if len(shards) == 1:
        return GGUFFiles.open(shards.pop())
    if shards:
        names = listed(sorted(file.name for file in shards))
        raise BadCheckpoint(f"{folder} holds several GGUF models ({names}): give one of these files")
    if snapshots := sorted((folder / "snapshots").glob("*")):
        raise BadCheckpoint(
            f"{folder} is a repository of Hugging Face's cache: give {listed(list(map(str, snapshots)))}"
        )
    raise BadCheckpoint(
        f"{folder} has no config.json, so it is no checkpoint's folder: give the one that holds config.json "
        "and the weights (*.safetensors), or a .gguf file"
    )
