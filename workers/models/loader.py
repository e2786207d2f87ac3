"""Reads a checkpoint's safetensors into a decoder. Every name and shape is checked before the first weight is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from workers.kernels.base import kernels_for
from workers.models.config import read_config
from workers.models.decoder import Decoder
from workers.models.layers.slots import Place, Slot
from workers.models.weights import open_weights, weight_files
from workers.parallel.group import Solo, TensorParallel

log = logging.getLogger("baton.worker")

Progress = Callable[[int, int], None]

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    parallel: TensorParallel | None = None,
    on_progress: Progress | None = None,
) -> Decoder:
    """The checkpoint folder `path` as a decoder on `device`, weights converted to `dtype` ("bfloat16", "float32").

    With `parallel` only this rank's share is read. `on_progress(done_bytes, total_bytes)` counts that share.
    Raises BadCheckpoint, UnsupportedModel or Misconfigured, each naming the file, tensor or setting and the fix.
    """
    if dtype not in _DTYPES:
        raise Misconfigured(f"dtype {dtype!r} is not served: choose one of {', '.join(_DTYPES)}", param="dtype")
    folder = Path(path)
    config = read_config(folder)
    with _open_checkpoint(folder) as tensors:
        place = Place(device=device, dtype=_DTYPES[dtype], parallel=parallel or Solo(), kernels=kernels_for(device))
        decoder = Decoder(config, place)
        slots = list(decoder.slots())
        _check(folder, slots, tensors, config.tied_embeddings)
        _fill(slots, tensors, on_progress or (lambda done, total: None))
    return decoder


@contextmanager
def _open_checkpoint(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Every tensor of the checkpoint by name, as a slice that is read only when indexed."""
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for name in weight_files(folder):
            file = files.enter_context(open_weights(folder / name, framework="pt"))
            stored: list[str] = file.keys()
            tensors |= {key: file.get_slice(key) for key in stored}
        yield tensors


def _check(folder: Path, slots: list[Slot], tensors: Mapping[str, Any], tied: bool) -> None:
    if missing := sorted({slot.name for slot in slots} - tensors.keys()):
        raise BadCheckpoint(
            f"{folder} lacks {len(missing)} tensors, the first is {missing[0]!r}: config.json belongs to another "
            "checkpoint, or a shard is missing"
        )
    for slot in slots:
        found = tuple(tensors[slot.name].get_shape())
        if found != slot.shape:
            raise BadCheckpoint(f"{folder}: tensor {slot.name!r} is {found}, config.json makes it {slot.shape}")
        if (stored := tensors[slot.name].get_dtype()) not in _ITEM_BYTES:
            raise UnsupportedModel(
                f"{folder}: tensor {slot.name!r} is stored as {stored}: quantised weights are not served"
            )
    ignored = {"lm_head.weight"} if tied else set()
    unexpected = sorted(
        name
        for name in tensors.keys() - {slot.name for slot in slots} - ignored
        if not name.endswith("rotary_emb.inv_freq")
    )
    if unexpected:
        log.warning("%s: %d tensors are not used, such as %s", folder, len(unexpected), ", ".join(unexpected[:5]))


def _fill(slots: list[Slot], tensors: Mapping[str, Any], on_progress: Progress) -> None:
    sizes = [slot.target.numel() * _ITEM_BYTES[tensors[slot.name].get_dtype()] for slot in slots]
    total, done = sum(sizes), 0
    on_progress(done, total)
    for slot, size in zip(slots, sizes, strict=True):
        part = slice(slot.start, slot.start + slot.target.shape[slot.dim])
        tensor = tensors[slot.name]
        slot.target.copy_(tensor[part] if slot.dim == 0 else tensor[:, part])
        done += size
        on_progress(done, total)
