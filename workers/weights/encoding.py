"""The seam between a linear layer and the format of its weight: a `WeightEncoding` makes the layer's `Matrix`.

checkpoint ── WeightSource ──▶ Slot ── Matrix.slots ◀── WeightEncoding.matrix(context, share) ◀── linear layer"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from workers.kernels.cpu.products import PackedWeight, SideBySideWeights
from workers.kernels.device_kernels import Kernels
from workers.parallel.group import TensorParallel
from workers.weights.slots import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear weight [total, inputs] of the checkpoint, of which a rank computes the outputs [start, start + size).
    Where there is an `order`, each run of so many outputs is taken in this order."""

    name: str  # without ".weight"
    total: int
    start: int
    size: int
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShare:
    """One rank's part of a linear layer: outputs of `projections`, side by side, and a range of their inputs."""

    projections: tuple[Projection, ...]
    total_inputs: int
    first_input: int
    num_inputs: int
    padding: int = 0  # outputs of weight zero behind the last projection's

    @property
    def num_outputs(self) -> int:
        return sum(projection.size for projection in self.projections) + self.padding


class Matrix(Protocol):
    """y = x W^T (+ b), with the weight in some encoding. Filled through `slots`, then packed once, then called."""

    @property
    def packed_weight(self) -> PackedWeight | None:
        """The packed weight, where compiled layers can multiply with it (`workers.kernels.cpu.layers`)."""
        ...

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor: ...

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """The product before the gate, [T, O]; without a gate, what a call returns."""
        ...

    def pack(self) -> None:
        """Lays the loaded weight out as this machine multiplies fastest. `slots` is not called afterwards."""
        ...

    def dequantised(self) -> torch.Tensor:
        """[outputs, inputs], the loaded weight, in floating point. Not called after `pack`."""
        ...

    def slots(self) -> Iterator[Slot]: ...


class EmbeddingTable(Protocol):
    """Looks rows up, [T, E] in the model's type, in a weight [V, E] that stays in its encoding."""

    def __call__(self, rows_T: torch.Tensor) -> torch.Tensor: ...

    def product(self) -> Matrix:
        """The product with the table's own tensors, for a tied head. Call it before they are filled."""
        ...

    def slots(self) -> Iterator[Slot]: ...


@runtime_checkable
class TableEncoding(Protocol):
    """An encoding that embeddings may have, too. Those of other checkpoints are in floating point."""

    def table(self, context: LayerContext, share: WeightShare) -> EmbeddingTable: ...


class WeightEncoding(Protocol):
    """The format of linear weights in a checkpoint."""

    def matrix(self, context: LayerContext, share: WeightShare, *, gated: bool = False) -> Matrix:
        """Returns an empty matrix with slots. `gated`: of two projections, silu(first) * second. Raises
        UnsupportedModel when the share cannot be cut out of this encoding."""
        ...


WeightEncodings = Callable[[str], WeightEncoding]
"""The encoding of a linear weight by its name in the checkpoint: a checkpoint may leave some layers as floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Where a layer's weights live and what it computes with: the same for every layer of a model."""

    device: str
    dtype: torch.dtype
    parallel: TensorParallel
    kernels: Kernels
    encodings: WeightEncodings
    expert_parallel: bool = False  # whole experts on ranks, in place of columns of each

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def matrix(self, share: WeightShare, *, gated: bool = False) -> Matrix:
        """The matrix of a linear layer, or one for each projection if their encodings differ."""
        encodings = [self.encodings(projection.name) for projection in share.projections]
        if all(encoding is encodings[0] for encoding in encodings):
            return encodings[0].matrix(self, share, gated=gated)
        parts = [
            encoding.matrix(self, replace(share, projections=(projection,)))
            for encoding, projection in zip(encodings, share.projections, strict=True)
        ]
        return SideBySide(parts, self.kernels, gated=gated)


class SideBySide:
    """Matrices of one input, their outputs beside one another."""

    def __init__(self, parts: Sequence[Matrix], kernels: Kernels, *, gated: bool = False) -> None:
        self.parts = tuple(parts)
        self._kernels = kernels
        self._gated = gated
        self._packed: SideBySideWeights | None = None

    @property
    def packed_weight(self) -> PackedWeight | None:
        return self._packed

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        y_TO = self.before_gate(x_TI, bias_O)
        return self._kernels.silu_mul(y_TO) if self._gated else y_TO

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x_TI, bias_O)
        y_TO = torch.cat([part(x_TI) for part in self.parts], dim=1)
        return y_TO if bias_O is None else y_TO + bias_O

    def dequantised(self) -> torch.Tensor:
        return torch.cat([part.dequantised() for part in self.parts])

    def pack(self) -> None:
        for part in self.parts:
            part.pack()
        weights = [part.packed_weight for part in self.parts]
        present = [weight for weight in weights if weight is not None]
        self._packed = SideBySideWeights(present) if len(present) == len(weights) else None

    def slots(self) -> Iterator[Slot]:
        for part in self.parts:
            yield from part.slots()
