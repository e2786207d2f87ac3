"""The seam between the loader and the files that weights lie in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as the files have it, before it is read. `dtype` is safetensors' name, such as "BF16" or "I32"."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class WeightSource(Protocol):
    """The tensors of one checkpoint by their names, which are those of Hugging Face's modules. Without torch until
    `read`."""

    def names(self) -> Collection[str]: ...

    def describe(self, name: str) -> StoredTensor: ...

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        """Reads a part of dimension `dim`, whole in the others, into host memory, and at most that from the
        disk."""
        ...
