"""Products with weights that were packed once for this processor: on tiles (AMX, `products_tiles.cpp`) or in panels for
its vector units (`products.cpp`).

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from workers.kernels.cpu.native_build import address_of, native, native_tiles
from workers.kernels.cpu.regions import apart, empty_rows, roomy_zeros

_PANEL = 32
_TILE_DEPTH = 32
_WORTH_PADDING = 8 * _TILE_DEPTH
_P, _N = ctypes.c_void_p, ctypes.c_int64


class ProductPart(ctypes.Structure):
    """`Part` in products.h. It holds addresses of memory that the weight keeps alive."""

    _fields_ = (
        *((name, _P) for name in ("multiply", "packed", "bias")),
        *((name, _N) for name in ("num_outputs", "num_inputs", "gated")),
    )


class ProductParts(ctypes.Structure):
    """`Product` in products.h."""

    _fields_ = (("parts", ctypes.POINTER(ProductPart)), ("num_parts", _N))

    @classmethod
    def of(cls, parts: Sequence[ProductPart]) -> ProductParts:
        return cls(parts=(ProductPart * len(parts))(*parts), num_parts=len(parts))


class PackedWeight(Protocol):
    """A weight that compiled code multiplies with: parts side by side, each of which makes its columns of the output.

    A gated weight has one part that applies the gate, or several that leave it to the caller.
    """

    @property
    def num_outputs(self) -> int: ...

    @property
    def depth(self) -> int:
        """Inputs that are read of a row: zeros beyond the weight's own."""
        ...

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]: ...

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor: ...


class PackedMatrix(PackedWeight, Protocol):
    """A packed weight of one linear layer, whose gate may be left to the caller."""

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """[T, O]."""
        ...


@runtime_checkable
class PackedRows(Protocol):
    """A packed weight whose rows can be read, so that an embedding with a tied head needs no copy."""

    def rows(self, rows_T: torch.Tensor) -> torch.Tensor:
        """[T, I], in the model's type."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProduct:
    """A linear layer's product, for compiled layers."""

    weight: PackedWeight
    bias_O: torch.Tensor | None = None


Parts = ctypes.Array[ProductPart]


def parts_of(product: PackedProduct | None) -> Parts:
    parts = product.weight.parts(product.bias_O) if product is not None else []
    return (ProductPart * len(parts))(*parts)


def can_pack(weight_OI: torch.Tensor) -> bool:
    """Is the weight on the CPU, with compiled code for its dtype?"""
    return weight_OI.device.type == "cpu" and min(weight_OI.shape) > 0 and native(weight_OI.dtype) is not None


def takes_tiles(weight_OI: torch.Tensor) -> bool:
    """Whether this machine has tiles that take this weight. Inputs that fill no tile are padded, unless most of the
    padded inputs would be padding."""
    deep = weight_OI.shape[1] % _TILE_DEPTH == 0 or weight_OI.shape[1] >= _WORTH_PADDING
    return can_pack(weight_OI) and weight_OI.dtype == torch.bfloat16 and deep and native_tiles() is not None


class PanelProduct:
    """y = x W^T (+ b), or, gated, silu(gate) * up of the two halves of y, with a weight in panels.

    A row's product does not depend on the other rows, nor on the number of threads.
    """

    num_outputs: int
    depth: int  # inputs that the product reads
    _num_inputs: int
    _dtype: torch.dtype
    _gated: bool
    _order: torch.Tensor
    _places_O: torch.Tensor
    _multiply: Callable[..., None]

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]:
        raise NotImplementedError

    def _part(self, packed: int, bias: torch.Tensor | None = None) -> ProductPart:
        address = None if bias is None else bias.data_ptr()
        return ProductPart(address_of(self._multiply), packed, address, self.num_outputs, self.depth, self._gated)

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, O], or [T, O / 2] when gated: then the rows have the stride of the next product."""
        width = self.num_outputs // 2 if self._gated else self.num_outputs
        [part] = self.parts(bias_O)
        return self._multiplied(part, x_TI, width, apart(width, self._dtype) if self._gated else width)

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """[T, O]. Of a gated weight the panels are multiplied as one without a gate, and put into order."""
        if not self._gated:
            return self(x_TI, bias_O)
        [part] = self.parts(bias_O)
        part.gated, part.num_outputs = 0, len(self._order)
        return self._multiplied(part, x_TI, len(self._order), len(self._order))[:, self._places_O]

    def _multiplied(self, part: ProductPart, x_TI: torch.Tensor, width: int, stride: int) -> torch.Tensor:
        assert x_TI.dtype == self._dtype
        assert x_TI.shape[1] == self._num_inputs
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        x_TI = self._padded(x_TI)
        out_TO = empty_rows(x_TI.shape[0], width, dtype=self._dtype, stride=stride)
        sizes = x_TI.shape[0], x_TI.stride(0), stride, torch.get_num_threads()
        self._multiply(ctypes.byref(part), x_TI.data_ptr(), out_TO.data_ptr(), *sizes)
        return out_TO

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        if self.depth == self._num_inputs:
            return rows
        padded = empty_rows(rows.shape[0], self.depth, dtype=rows.dtype, stride=apart(self.depth, rows.dtype))
        padded[:, : self._num_inputs] = rows
        padded[:, self._num_inputs :] = 0
        return padded


class PackedFloats(PanelProduct):
    """Packs a copy of the weight, [O, I]. Each output is one sum, in one order."""

    def __init__(self, weight_OI: torch.Tensor, *, gated: bool = False) -> None:
        assert can_pack(weight_OI)
        self.num_outputs, self._num_inputs = weight_OI.shape
        self._dtype = weight_OI.dtype
        self._gated = gated
        self._tiled = takes_tiles(weight_OI)
        kernels = native_tiles() if self._tiled else native(weight_OI.dtype)
        assert kernels is not None
        group = self._group = _TILE_DEPTH if self._tiled else 4 // self._dtype.itemsize
        self._multiply: Callable[..., None] = kernels.multiply
        self.depth = -(-self._num_inputs // group) * group
        self._order = panel_order(self.num_outputs, gated)
        self._packed = roomy_zeros(len(self._order), self.depth, dtype=self._dtype)
        self._places_O = places_of(self._order) if gated else torch.empty(0)
        self._bias_O: torch.Tensor | None = None
        self._packed_bias = torch.empty(0)
        weight_OI = self._padded(weight_OI).contiguous()
        sizes = len(self._order), self.depth, torch.get_num_threads()
        kernels.pack(weight_OI.data_ptr(), self._packed.data_ptr(), self._order.data_ptr(), *sizes)

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]:
        if bias_O is not None and bias_O is not self._bias_O:
            self._bias_O, self._packed_bias = bias_O, bias_O.float()[self._order.clamp(min=0)]
        return [self._part(self._packed.data_ptr(), None if bias_O is None else self._packed_bias)]

    def rows(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, [T, I]. Not of a gated one."""
        assert not self._gated
        panel_T, lane_T = rows_T // _PANEL, rows_T % _PANEL
        if self._tiled:
            packed = self._packed.view(-1, self.depth // _TILE_DEPTH, 2, _TILE_DEPTH // 2, _PANEL // 2, 2)
            rows = packed[panel_T, :, lane_T // (_PANEL // 2), :, lane_T % (_PANEL // 2)]
        else:
            rows = self._packed.view(-1, self.depth // self._group, _PANEL, self._group)[panel_T, :, lane_T]
        return rows.reshape(len(rows_T), self.depth)[:, : self._num_inputs].contiguous()


class SideBySideWeights:
    """Weights with the same input, with their outputs side by side. Not gated."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = tuple(weights)
        self.num_outputs = sum(weight.num_outputs for weight in weights)
        self.depth = max(weight.depth for weight in weights)
        self._bias_O: torch.Tensor | None = None
        self._biases: tuple[torch.Tensor | None, ...] = (None,) * len(self._weights)

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]:
        """Returns the parts. They keep only the last bias alive, as the weights do."""
        return [part for weight, bias in self._with_biases(bias_O) for part in weight.parts(bias)]

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([weight(x_TI, bias) for weight, bias in self._with_biases(bias_O)], dim=1)

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return self(x_TI, bias_O)

    def _with_biases(self, bias_O: torch.Tensor | None) -> Iterator[tuple[PackedWeight, torch.Tensor | None]]:
        if bias_O is None:
            return zip(self._weights, (None,) * len(self._weights), strict=True)
        if bias_O is not self._bias_O:
            self._bias_O = bias_O
            self._biases = torch.split(bias_O, [weight.num_outputs for weight in self._weights])
        return zip(self._weights, self._biases, strict=True)


def places_of(order: torch.Tensor) -> torch.Tensor:
    """The place of each output in panels of this order, int64 [O]."""
    places, outputs = torch.nonzero(order >= 0).flatten(), order[order >= 0]
    rows = torch.empty(len(outputs), dtype=torch.int64)
    rows[outputs] = places
    return rows


def panel_order(num_outputs: int, gated: bool = False, panel: int = _PANEL) -> torch.Tensor:
    """The output at each place of the panels, -1 at an empty place. If gated, half a panel of gate precedes its half of
    up."""
    num_columns, width = (num_outputs // 2, panel // 2) if gated else (num_outputs, panel)
    columns = torch.arange(-(-num_columns // width) * width).view(-1, 1, width)
    outputs = torch.cat([columns, columns + num_columns], dim=1) if gated else columns
    return torch.where(columns < num_columns, outputs, -1).flatten()
