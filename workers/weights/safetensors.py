"""Weights in safetensors files: one file, or shards that an index lists. Loads torch only to read a tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from protos.errors import BadCheckpoint
from protos.hints import lfs_pointer, unusable
from protos.model_files.fields import Fields
from protos.model_files.folder import INDEX, SINGLE, FolderFiles
from protos.model_files.plain_files import open_plain
from protos.model_files.text_part import has_text_part, is_other_part, text_name
from workers.weights.source import StoredTensor, WeightSource
from workers.weights.stacked import unstacked

if TYPE_CHECKING:
    import torch


_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
"""Bits of an element, by dtype; 8 if it is not listed."""
_BARE = "embed_tokens.weight"


class SafetensorsSource:
    """Tensors of open files, each read on request."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def describe(self, name: str) -> StoredTensor:
        shape, dtype = tuple(self._tensors[name].get_shape()), self._tensors[name].get_dtype()
        return StoredTensor(shape=shape, dtype=dtype, num_bytes=math.prod(shape) * _BITS.get(dtype, 8) // 8)

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        stored = self._tensors[name]
        tensor: torch.Tensor = stored[(*[slice(None)] * dim, part)] if stored.get_shape() else stored[...]
        return tensor


@contextmanager
def open_safetensors(folder: Path, *, framework: str = "pt", as_stored: bool = False) -> Iterator[WeightSource]:
    """Reads every file's header; with framework "numpy" without torch, and then nothing else can be read.

    Unless `as_stored`, stacked experts are separate tensors (`workers.weights.stacked`), a model that reads images is
    reduced to its text part, and names are those of a decoder with a head.

    Raises BadCheckpoint for a file that is missing, truncated or damaged."""
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for name in _weight_files(folder):
            file = files.enter_context(open_tensors(folder / name, framework=framework))
            stored: list[str] = file.keys()
            tensors |= {key: file.get_slice(key) for key in stored}
        if as_stored:
            yield SafetensorsSource(tensors)
        else:
            config = FolderFiles(folder).json("config.json") or {}
            yield unstacked(SafetensorsSource(_of_decoder(tensors, config.get("tie_word_embeddings") is not False)))


def is_bare(folder: Path) -> bool:
    """True for the tensors of a decoder without a head, whose names lack the prefix "model."."""
    with open_safetensors(folder, framework="numpy", as_stored=True) as stored:
        return _BARE in stored.names()


def _of_decoder(tensors: dict[str, Any], tied: bool) -> dict[str, Any]:
    if has_text_part(frozenset(tensors)):
        tensors = {text_name(name): tensor for name, tensor in tensors.items() if not is_other_part(name)}
    if _BARE in tensors:
        tensors = {name if name.startswith("lm_head.") else f"model.{name}": each for name, each in tensors.items()}
    if tied and f"model.{_BARE}" not in tensors and "lm_head.weight" in tensors:
        tensors[f"model.{_BARE}"] = tensors.pop("lm_head.weight")
    return tensors


def open_tensors(file: Path, *, framework: str) -> Any:
    """The context of an open safetensors file. Raises BadCheckpoint."""
    try:
        open_plain(file).close()
        return safe_open(file, framework=framework, device="cpu")
    except FileNotFoundError:
        raise BadCheckpoint(f"{file} is missing: download it again") from None
    except PermissionError as error:
        raise BadCheckpoint(f"{file}: {unusable(error)}") from error
    except (SafetensorError, OSError) as error:
        damage = f"{file} is truncated or damaged ({error}): download it again"
        raise BadCheckpoint(lfs_pointer(file) or damage) from error


def _weight_files(folder: Path) -> list[str]:
    files = FolderFiles(folder)
    if (folder / INDEX).exists():
        shards = Fields.of_file(files, INDEX).raw("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
            raise BadCheckpoint(f"{folder / INDEX}: 'weight_map' must map tensor names to file names beside it")
        return sorted(set(shards.values()))
    if unindexed := files.unindexed_weights():
        return unindexed
    if pickles := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)):
        raise BadCheckpoint(
            f"{folder} holds pickled weights only ({pickles[0]}), which can run code when read: convert them with "
            "transformers' save_pretrained(other_folder)"
        )
    if gguf := sorted(p.name for p in folder.glob("*.gguf")):
        raise BadCheckpoint(f"{folder} holds {gguf[0]} and no *.safetensors: give --model {folder / gguf[0]}")
    raise BadCheckpoint(f"{folder} holds neither {SINGLE} nor {INDEX}: give a Hugging Face checkpoint folder")
