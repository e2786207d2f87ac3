"""The files that a checkpoint's weights lie in: which they are, and whether they are whole. Without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from protos.errors import BadCheckpoint
from protos.hints import NO_GGUF, lfs_pointer, unusable
from workers.models.fields import Fields

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def check_weights(folder: Path) -> None:
    """Looks at every file's header. Raises BadCheckpoint for one that is missing, truncated or damaged."""
    for name in weight_files(folder):
        with open_weights(folder / name, framework="numpy"):
            pass


def open_weights(file: Path, *, framework: str) -> Any:
    """Tensors are read only when asked for. Raises BadCheckpoint."""
    try:
        return safe_open(file, framework=framework, device="cpu")
    except FileNotFoundError:
        raise BadCheckpoint(f"{file} is missing: download the checkpoint's shard again") from None
    except PermissionError as error:
        raise BadCheckpoint(f"{file}: {unusable(error)}") from error
    except (SafetensorError, OSError) as error:
        told = lfs_pointer(file) or f"{file} is truncated or damaged ({error}): download it again"
        raise BadCheckpoint(told) from error


def weight_files(folder: Path) -> list[str]:
    """Raises BadCheckpoint where there are none."""
    if (folder / _INDEX).exists():
        shards = Fields.of_file(folder / _INDEX).raw("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
            raise BadCheckpoint(f"{folder / _INDEX}: 'weight_map' must map tensor names to file names beside it")
        return sorted(set(shards.values()))
    if (folder / _SINGLE).exists():
        return [_SINGLE]
    if pickles := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)):
        raise BadCheckpoint(
            f"{folder} holds pickled weights only ({pickles[0]}), which can run code when read: convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    if gguf := sorted(p.name for p in folder.glob("*.gguf")):
        raise BadCheckpoint(f"{folder} holds {gguf[0]}: {NO_GGUF}")
    raise BadCheckpoint(f"{folder} holds neither {_SINGLE} nor {_INDEX}: give a Hugging Face checkpoint folder")
