"""Files of a published head: config.json, and tensors in safetensors under the names of one of its formats."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.hints import listed
from workers.checkpoint.safetensors import SafetensorsSource
from workers.checkpoint.slots import Slot, in_order
from workers.checkpoint.source import StoredTensor, WeightSource

log = logging.getLogger("baton.worker")


class RenamedSource:
    """`source` with other names for its tensors."""

    def __init__(self, source: WeightSource, rename: Callable[[str], str]) -> None:
        self._source = source
        self._stored = {rename(name): name for name in source.names()}

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def describe(self, name: str) -> StoredTensor:
        return self._source.describe(self._stored[name])

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        return self._source.read(self._stored[name], dim, part)


@contextmanager
def open_head(path: str, rename: Callable[[str], str]) -> Iterator[WeightSource]:
    """All safetensors files of the folder. Raises BadCheckpoint where there are none, or one is damaged."""
    folder = Path(path)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickles:
            raise BadCheckpoint(
                f"{folder} holds pickled weights only ({pickles[0]}), which can run code when read: find a copy in "
                "safetensors, or write one with safetensors.torch.save_file where you trust the file"
            )
        raise BadCheckpoint(f"{folder} holds no *.safetensors: give the folder of a head's checkpoint")
    tensors: dict[str, Any] = {}
    with ExitStack() as files:
        for file in found:
            try:
                opened = files.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise BadCheckpoint(f"{file} is truncated or damaged ({error}): download it again") from error
            tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        yield RenamedSource(SafetensorsSource(tensors), rename)


def digest_of(path: str) -> str:
    """Of config.json and the tensors: heads of which it is equal make the same KV."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*Path(path).glob("*.safetensors"), Path(path) / "config.json"]):
        with file.open("rb") as opened:
            while part := opened.read(2**20):
                digest.update(part)
    return digest.hexdigest()


def fill_head(path: str, slots: Sequence[Slot], source: WeightSource, *, unused: Collection[str] = ()) -> None:
    """Fills the slots. Raises BadCheckpoint for a tensor that is missing or has another shape, UnsupportedModel for one
    of another type. Tensors that are neither wanted nor in `unused` are logged."""
    names = set(source.names())
    if missing := sorted({slot.name for slot in slots} - names):
        raise BadCheckpoint(
            f"{path} lacks {len(missing)} tensors, the first is {missing[0]!r}: its config.json belongs to another "
            "head, or a shard is missing"
        )
    for slot in slots:
        stored = source.describe(slot.name)
        if stored.shape != slot.shape:
            raise BadCheckpoint(f"{path}: tensor {slot.name!r} is {stored.shape}, its place is {slot.shape}")
        if stored.dtype not in slot.dtypes:
            raise UnsupportedModel(
                f"{path}: tensor {slot.name!r} is stored as {stored.dtype}: it must be one of "
                f"{', '.join(sorted(slot.dtypes))}"
            )
    if others := sorted(names - {slot.name for slot in slots} - set(unused)):
        log.warning("%s: %d tensors are not used: %s", path, len(others), listed(others[:5]))
    for slot in slots:
        read = in_order(source.read(slot.name, slot.dim, slot.part), slot.order)
        if slot.consume is not None:
            slot.consume(read)
        else:
            slot.target.copy_(read)
        if slot.check is not None:
            slot.check(f"{path}: tensor {slot.name!r}", slot.target)
