"""A weight whose inputs are shared among several quantised weights: EXL2 has one for each number of bits. Their
products are added up in float32, in their order (`multiply_terms` in quantised.cpp).

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from workers.kernels.cpu.native_build import native
from workers.kernels.cpu.products import PanelProduct, ProductPart, ProductParts
from workers.kernels.cpu.quantised import PackedQuantised
from workers.quantization.quantised_weight import QuantisedWeight


class PackedTerms(PanelProduct):
    """y = x (W1 + W2 + ...)^T (+ b). Packs copies of the weights, which have the same outputs. Not gated."""

    def __init__(self, weights: Sequence[QuantisedWeight], dtype: torch.dtype, *, padding: int = 0) -> None:
        kernels = native(dtype)
        assert kernels is not None
        self._dtype, self._gated, self._multiply = dtype, False, kernels.multiply_terms
        self._weights = [PackedQuantised(weight, dtype, padding=padding) for weight in weights]
        parts = [part for weight in self._weights for part in weight.parts()]
        self._terms = ProductParts.of(parts)
        self.num_outputs = self._weights[0].num_outputs
        self.depth = self._num_inputs = self._weights[0].depth
        self._bias_O: torch.Tensor | None = None
        self._packed_bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self._weights)

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]:
        if bias_O is not None and bias_O is not self._bias_O:
            self._bias_O, self._packed_bias = bias_O, bias_O.float().contiguous()
        return [self._part(ctypes.addressof(self._terms), None if bias_O is None else self._packed_bias)]
