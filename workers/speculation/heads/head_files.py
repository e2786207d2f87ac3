"""Files of a published head: config.json, and tensors in safetensors under the names of one of its formats."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protos.errors import BadCheckpoint
from protos.model_files.plain_files import open_plain
from workers.weights.safetensors import SafetensorsSource, open_tensors
from workers.weights.source import StoredTensor, WeightSource

if TYPE_CHECKING:
    import torch


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
def open_head(path: str, rename: Callable[[str], str], *, framework: str = "pt") -> Iterator[WeightSource]:
    """All safetensors files of the folder. Raises BadCheckpoint where there are none, or one is damaged. With framework
    "numpy" without torch: then tensors can be described, and not read."""
    folder = Path(path)
    tensor_files = sorted(folder.glob("*.safetensors"))
    if not tensor_files:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickles:
            raise BadCheckpoint(
                f"{folder} holds pickled weights only ({pickles[0]}), which can run code when read: find or write "
                "a copy in safetensors"
            )
        raise BadCheckpoint(f"{folder} holds no *.safetensors: give the folder of a head's checkpoint")
    tensors: dict[str, Any] = {}
    with ExitStack() as files:
        for file in tensor_files:
            opened = files.enter_context(open_tensors(file, framework=framework))
            tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        yield RenamedSource(SafetensorsSource(tensors), rename)


def digest_of(path: str) -> str:
    """A digest of config.json and the tensors: heads with equal digests make the same KV."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*Path(path).glob("*.safetensors"), Path(path) / "config.json"]):
        with open_plain(file) as opened:
            while part := opened.read(2**20):
                digest.update(part)
    return digest.hexdigest()
