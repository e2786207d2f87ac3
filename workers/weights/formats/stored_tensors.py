"""Targets for the tensors that a format stores of one projection's share."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod
from typing import TypedDict, Unpack

import torch

from protos.errors import BadCheckpoint
from workers.weights.encoding import Projection, WeightShare
from workers.weights.slots import Slot
from workers.weights.source import FLOATS, StoredTensor, WeightSource

WORDS = frozenset({"I32", "U32"})
BYTES = frozenset({"I8", "U8"})

_FLOAT_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


class TensorCut(TypedDict, total=False):
    dim: int
    part: range | None  # of `dim`; None: all
    check: Callable[[str, torch.Tensor], None] | None


class StoredTensors:
    """Allocates tensors and lists their slots, one per method: [the part's length in `dim`, whole in other
    dimensions]."""

    def __init__(self, projection: Projection, share: WeightShare, device: str, source: WeightSource) -> None:
        self.projection = projection
        self.share = share
        self.slots: list[Slot] = []
        self._names = source.names()
        self._source = source
        self.device = device

    @property
    def by_inputs(self) -> bool:
        return self.share.num_inputs < self.share.total_inputs

    @property
    def outputs(self) -> range:
        return range(self.projection.start, self.projection.start + self.projection.size)

    @property
    def inputs(self) -> range:
        return range(self.share.first_input, self.share.first_input + self.share.num_inputs)

    def __contains__(self, suffix: str) -> bool:
        return f"{self.projection.name}.{suffix}" in self._names

    def tensor(
        self,
        suffix: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        dtypes: frozenset[str],
        *,
        dim: int = 0,
        part: range | None = None,
        check: Callable[[str, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        part = range(shape[dim]) if part is None and shape else part or range(0)
        sizes = [len(part) if place == dim else size for place, size in enumerate(shape)]
        target = torch.empty(sizes, dtype=dtype, device=self.device)
        self.slots.append(
            Slot(
                name=f"{self.projection.name}.{suffix}",
                shape=shape,
                target=target,
                dim=dim,
                start=part.start,
                dtypes=dtypes,
                check=check,
            )
        )
        return target

    def words(self, suffix: str, shape: tuple[int, ...], **cut: Unpack[TensorCut]) -> torch.Tensor:
        return self.tensor(suffix, shape, torch.int32, WORDS, **cut)

    def floats(self, suffix: str, shape: tuple[int, ...], **cut: Unpack[TensorCut]) -> torch.Tensor:
        """float16 or bfloat16 as stored, any other type as float32."""
        stored = self.described(suffix)
        dtype = _FLOAT_TYPES.get(stored.dtype if stored else "", torch.float32)
        return self.tensor(suffix, shape, dtype, FLOATS | {"F8_E8M0"}, **cut)

    def group_indices(self, suffix: str, num_groups: int) -> torch.Tensor | None:
        """The group of each input of the share; None if it is not stored. All are -1 if groups are in order."""

        def check(where: str, groups_I: torch.Tensor) -> None:
            least, largest = (int(edge) for edge in groups_I.aminmax())
            if largest >= num_groups or (least < 0 and (least, largest) != (-1, -1)):
                raise BadCheckpoint(
                    f"{where} has groups {least} to {largest}, and scales of {num_groups} groups are stored"
                )

        if suffix not in self:
            return None
        return self.words(suffix, (self.share.total_inputs,), part=self.inputs, check=check)

    def shape(self, suffix: str) -> tuple[int, ...] | None:
        stored = self.described(suffix)
        return None if stored is None else stored.shape

    def shape_of_one(self, suffix: str) -> tuple[int, ...]:
        shape = self.shape(suffix)
        return shape if shape is not None and prod(shape) == 1 else (1,)

    def described(self, suffix: str) -> StoredTensor | None:
        name = f"{self.projection.name}.{suffix}"
        return self._source.describe(name) if name in self._names else None


def covering_words(values: range, bits: int) -> tuple[range, int]:
    """Returns the range of 32-bit words that hold these values of a dense stream, starting at a word that begins with a
    value; and the number of values before the first."""
    values_of_unit = 32 // gcd(32, bits)
    first = values.start // values_of_unit * values_of_unit
    return range(first * bits // 32, -(-values.stop * bits // 32)), values.start - first


def bytes_of_words(words: torch.Tensor) -> torch.Tensor:
    """uint8 [.., 4 W] of int32 [.., W]: a stream of bits, little-endian."""
    return words.contiguous().view(torch.uint8)
