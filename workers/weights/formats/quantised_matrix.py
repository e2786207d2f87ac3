"""The matrix of every quantised format: raw tensors until `pack`, then what this machine multiplies with.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache, partial
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from workers.kernels.cpu.products import PackedMatrix, PackedWeight, SideBySideWeights
from workers.kernels.cpu.quantised import PackedQuantised, can_pack
from workers.kernels.cpu.quantised_terms import PackedTerms
from workers.kernels.device_kernels import Kernels, QuantisedProduct
from workers.quantization.quantised_weight import QuantisedWeight, joined
from workers.weights.encoding import (
    LayerContext,
    Matrix,
    Projection,
    WeightEncoding,
    WeightEncodings,
    WeightShare,
)
from workers.weights.formats.float_matrix import FLOAT_ENCODING
from workers.weights.formats.stored_tensors import StoredTensors
from workers.weights.slots import Slot, row_order
from workers.weights.source import WeightSource

Settings = TypeVar("Settings", bound=Hashable)


class StoredWeight(Protocol):
    """One projection's share in one format. Its tensors are the targets of `stored`'s slots."""

    @property
    def stored(self) -> StoredTensors: ...

    def weights(self) -> Sequence[QuantisedWeight]:
        """The filled targets as one weight, or several with other inputs, whose products are added up."""
        ...


Layout = Callable[[StoredTensors], StoredWeight]
"""Allocates what a share takes in one format. Raises UnsupportedModel."""


class QuantisedEncoding:
    def __init__(self, source: WeightSource, layout: Layout) -> None:
        self._source, self._layout = source, layout

    def matrix(self, context: LayerContext, share: WeightShare, *, gated: bool = False) -> Matrix:
        stored = [self.stored(projection, share, context.device) for projection in share.projections]
        return QuantisedMatrix(stored, context.kernels, context.dtype, padding=share.padding, gated=gated)

    def stored(self, projection: Projection, share: WeightShare, device: str) -> StoredWeight:
        return self._layout(StoredTensors(projection, share, device, self._source))


def encodings_where(
    suffix: str,
    source: WeightSource,
    settings_of: Callable[[str], Settings],
    make: Callable[[StoredTensors, Settings], StoredWeight],
) -> WeightEncodings:
    """Encodes layers with a tensor NAME.suffix by their settings, others with NAME.weight as floats: files decide,
    because configs name left-out layers in several ways. Layers of equal settings share an encoding."""
    names = source.names()

    @cache
    def quantised(settings: Settings) -> WeightEncoding:
        return QuantisedEncoding(source, lambda stored: make(stored, settings))

    def encoding_of(name: str) -> WeightEncoding:
        if f"{name}.{suffix}" not in names and f"{name}.weight" in names:
            return FLOAT_ENCODING
        return quantised(settings_of(name))

    return encoding_of


class QuantisedMatrix:
    """Projections of the same form become one weight; others stay side by side."""

    def __init__(
        self,
        stored: Sequence[StoredWeight],
        kernels: Kernels,
        dtype: torch.dtype,
        *,
        padding: int = 0,
        gated: bool = False,
    ) -> None:
        self._stored = tuple(stored)
        self._kernels = kernels
        self._dtype = dtype
        self._padding = padding
        self._gated = gated
        self._parts: list[list[QuantisedProduct]] = []  # side by side; products of an inner list are added up
        self._packed: PackedMatrix | None = None

    @property
    def packed_weight(self) -> PackedWeight | None:
        return self._packed

    @property
    def device_product(self) -> QuantisedProduct | None:
        """The packed kernel for the whole weight, before the gate; None if the weight has several parts."""
        if [len(part) for part in self._parts] != [1] or self._padding:
            return None
        [[made]] = self._parts
        return None if isinstance(made, partial) else made

    def slots(self) -> Iterator[Slot]:
        assert self._stored, "packed weights cannot be read back"
        for weight in self._stored:
            yield from weight.stored.slots

    def dequantised(self) -> torch.Tensor:
        assert self._stored, "packed weights cannot be read back"
        filled = []
        for stored in self._stored:
            weights = [weight.dequantised() for weight in _converted(stored)]
            assert len(weights) == 1, "a weight in parts of other inputs"
            filled += weights
        return torch.cat(filled)

    def pack(self) -> None:
        """Frees the raw tensors, each projection's as soon as it is converted."""
        waiting, self._stored = list(self._stored), ()
        parts: list[Sequence[QuantisedWeight]] = []
        while waiting:
            parts.append(_converted(waiting.pop(0)))
        if parts and all(len(part) == 1 for part in parts):
            whole = joined([part[0] for part in parts])
            parts = parts if whole is None else [[whole]]
        if parts:
            self._packed = self._compiled(parts)
            self._parts = [] if self._packed is not None else self._products(parts)

    def _products(self, parts: list[Sequence[QuantisedWeight]]) -> list[list[QuantisedProduct]]:
        products: list[list[QuantisedProduct]] = []
        while parts:
            products.append([self._kernels.quantised_product(each) or partial(product, each) for each in parts.pop(0)])
        return products

    def _compiled(self, parts: Sequence[Sequence[QuantisedWeight]]) -> PackedMatrix | None:
        """None where compiled code does not take all parts."""
        if not all(can_pack(weight, self._dtype) for part in parts for weight in part):
            return None
        if len(parts) == len(parts[0]) == 1:
            return PackedQuantised(parts[0][0], self._dtype, gated=self._gated, padding=self._padding)
        if len(parts) == 1:
            return PackedTerms(parts[0], self._dtype, padding=self._padding)
        assert not self._padding
        return SideBySideWeights([self._packed_part(part) for part in parts])

    def _packed_part(self, weights: Sequence[QuantisedWeight]) -> PackedWeight:
        if len(weights) == 1:
            return PackedQuantised(weights[0], self._dtype)
        return PackedTerms(weights, self._dtype)

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self._stored:
            self.pack()
        if self._packed is not None:
            y_TO = self._packed(x_TI, bias_O)
            return self._kernels.silu_mul(y_TO) if self._gated and y_TO.shape[1] == self._packed.num_outputs else y_TO
        y_TO = self.before_gate(x_TI, bias_O)
        return self._kernels.silu_mul(y_TO) if self._gated else y_TO

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self._stored:
            self.pack()
        if self._packed is not None:
            return self._packed.before_gate(x_TI, bias_O)
        if len(self._parts) == len(self._parts[0]) == 1 and not self._padding:
            return self._parts[0][0](x_TI, bias_O).to(x_TI.dtype)
        outputs = [sum_of_products(part, x_TI) for part in self._parts]
        y_TO = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if self._padding:
            y_TO = F.pad(y_TO, (0, self._padding))
        return (y_TO if bias_O is None else y_TO + bias_O).to(x_TI.dtype)


def _converted(weight: StoredWeight) -> Sequence[QuantisedWeight]:
    weight.stored.slots.clear()  # a bound method as check would keep the weight's tensors alive in a cycle
    converted, order = weight.weights(), weight.stored.projection.order
    if not order:
        return converted
    return [each.outputs(row_order(each.num_outputs, order, each.codes_OW.device)) for each in converted]


def sum_of_products(products: Sequence[QuantisedProduct], x_TI: torch.Tensor) -> torch.Tensor:
    """[T, O], float32."""
    first_TO, *others = (multiply(x_TI).float() for multiply in products)
    for other_TO in others:
        first_TO = first_TO + other_TO
    return first_TO


def product(weight: QuantisedWeight, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T (+ b), [T, O], float32: the reference path, on any device. Dequantises one tile of outputs at a time.

    Where the checkpoint rounds activations the sums are made in float64, which is exact for integer levels.
    """
    if weight.order_I is not None:
        x_TI = x_TI[:, weight.order_I]
    rounding = weight.activations
    if rounding is None:
        x_TI = x_TI.float()
        tiles = [F.linear(x_TI, weight.columns(rows)) for rows in weight.row_tiles()]
        y_TO = torch.cat(tiles, dim=1)
        return y_TO if bias_O is None else y_TO + bias_O
    levels_TI, scale = rounding.rounded(x_TI)
    outliers_TI = rounding.outliers(x_TI)
    one_scale = scale.shape[1] == 1
    given_TI = (levels_TI if one_scale else levels_TI * scale).double()
    exact = weight.scale.num_groups == 1 and weight.minimum is None
    tiles = []
    for rows in weight.row_tiles():
        if exact:
            y_TO = F.linear(given_TI, weight.levels(rows).double()) * weight.scale.of_groups(rows).double().T
        else:
            y_TO = F.linear(given_TI, weight.columns(rows).double())
        if one_scale:
            y_TO = y_TO * scale.double()
        if outliers_TI is not None:
            y_TO = y_TO + F.linear(outliers_TI.double(), weight.columns(rows).double())
        tiles.append(y_TO.float())
    y_TO = torch.cat(tiles, dim=1)
    return y_TO if bias_O is None else y_TO + bias_O
