"""A weight whose inputs are shared among several quantised weights: EXL2 has one for each number of bits. Their
products are added up in float32, in their order (`multiply_terms` in quantised.cpp).

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from workers.kernels.cpu.native_build import address_of, native
from workers.kernels.cpu.products import ProductPart, ProductParts
from workers.kernels.cpu.quantised import PackedQuantised
from workers.kernels.cpu.regions import empty_rows
from workers.quantization.quantised_weight import QuantisedWeight


class PackedTerms:
    """y = x (W1 + W2 + ...)^T (+ b). Packs copies of the weights, which have the same outputs. Not gated."""

    def __init__(self, weights: Sequence[QuantisedWeight], dtype: torch.dtype, *, padding: int = 0) -> None:
        kernels = native(dtype)
        assert kernels is not None
        self._dtype, self._multiply = dtype, kernels.multiply_terms
        self._weights = [PackedQuantised(weight, dtype, padding=padding) for weight in weights]
        parts = [part for weight in self._weights for part in weight.parts()]
        self._terms = ProductParts.of(parts)
        self.num_outputs, self.depth = self._weights[0].num_outputs, self._weights[0].depth
        self._bias_O: torch.Tensor | None = None
        self._packed_bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self._weights)

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]:
        if bias_O is not None and bias_O is not self._bias_O:
            self._bias_O, self._packed_bias = bias_O, bias_O.float().contiguous()
        part = ProductPart(
            multiply=address_of(self._multiply),
            packed=ctypes.addressof(self._terms),
            bias=None if bias_O is None or self._packed_bias is None else self._packed_bias.data_ptr(),
            num_outputs=self.num_outputs,
            num_inputs=self.depth,
        )
        return [part]

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        assert x_TI.dtype == self._dtype
        assert x_TI.shape[1] == self.depth
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        [part] = self.parts(bias_O)
        out_TO = empty_rows(x_TI.shape[0], self.num_outputs, dtype=self._dtype)
        sizes = x_TI.shape[0], x_TI.stride(0), self.num_outputs, torch.get_num_threads()
        self._multiply(ctypes.byref(part), x_TI.data_ptr(), out_TO.data_ptr(), *sizes)
        return out_TO

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return self(x_TI, bias_O)
