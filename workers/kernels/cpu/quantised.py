"""Products with quantised weights, packed once in panels for this processor: `quantised.cpp`.

In bfloat16, integer codes meet activations that are rounded to 8 bits with a scale for each 32 of them (each 16 where
the weight's groups are 16), or as the checkpoint says: sums of integers are exact. In float32, and of tables of floats,
each code becomes a float32 and nothing is rounded.

Legend: T tokens, I inputs, O outputs, G groups, P positions of codes (columns, and gaps where a group fills no step).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from workers.kernels.cpu.native_build import Native, native, pointers
from workers.kernels.cpu.products import PanelProduct, ProductPart, panel_order, places_of
from workers.kernels.cpu.regions import roomy_zeros
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

_PANEL = 16
_STEP = 32
_HALVES = (2, 3, 4, 6, 8)  # bits of codes whose groups may be half a step
_MOST_GAPS = 1.25  # positions for a column, beyond which a weight is better multiplied otherwise
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3, torch.int8: 4}

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class _Rounding(IntEnum):
    """`Rounding` in quantised.h."""

    NONE = 0
    INT8_OF_PIECES = 1
    INT8_OF_TOKENS = 2
    INT8_STATIC = 3
    FP8_OF_TOKENS = 4
    FP8_OF_GROUPS = 5
    FP8_STATIC = 6


class _Sums(IntEnum):
    """`Sums` in quantised.h."""

    OF_INTEGERS = 0
    OF_SMALL_TABLE = 1
    OF_FLOATS = 2
    OF_TABLE = 3
    OF_FP8 = 4


class _GroupNumbers(ctypes.Structure):
    _fields_ = (("values", _P), ("factors", _P), ("value_type", _I), ("factor_type", _I),
                *((name, _N) for name in ("num_values", "groups_per_value", "first_group")))  # fmt: skip


class _Panels(ctypes.Structure):
    _fields_ = (
        ("codes", _P), ("scale", _GroupNumbers), ("minimum", _GroupNumbers),
        *((name, _P) for name in ("zeros", "table", "inputs", "group_steps")),
        *((name, _N) for name in ("num_inputs", "num_steps", "num_groups", "rounding_group")),
        *((name, _I) for name in ("bits", "zero", "sums", "rounding", "groups_are_steps")),
        ("activation_scale", _F), ("activation_zero", _I), ("outliers_from", _F),
    )  # fmt: skip


def can_pack(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether the weight is on the CPU and has a form that compiled code multiplies with, for rows of `dtype`."""
    if weight.codes_OW.device.type != "cpu" or native(dtype) is None or 0 in (weight.num_outputs, weight.num_columns):
        return False
    kind, rounding = _sums(weight, dtype), _rounding(weight, dtype)
    if kind is None or rounding is None:
        return False
    positions = _Positions.of(weight)
    if rounding == _Rounding.FP8_OF_GROUPS and positions.has_gaps:
        return False
    halves_fit = positions.group_steps is not None or (weight.bits in _HALVES and weight.table is None)
    return halves_fit and len(positions.columns) <= _MOST_GAPS * (weight.num_columns + _STEP)


class PackedQuantised(PanelProduct):
    """Packs a copy of the weight. `padding` adds outputs of zero."""

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype, *, gated: bool = False, padding: int = 0) -> None:
        kernels, kind, rounding = native(dtype), _sums(weight, dtype), _rounding(weight, dtype)
        assert kernels is not None
        assert kind is not None
        assert rounding is not None
        assert not (gated and padding)
        self.num_outputs = weight.num_outputs + padding
        self.depth = self._num_inputs = weight.num_inputs
        self._dtype, self._gated, self._multiply = dtype, gated, kernels.multiply_quantised
        self._read = kernels.read_quantised
        order = panel_order(self.num_outputs, gated, _PANEL)
        self._order = torch.where(order < weight.num_outputs, order, -1)
        self._places_O = places_of(self._order) if gated else torch.empty(0)
        self._kept: list[torch.Tensor] = []  # the structure holds only their addresses
        self._bias_O: torch.Tensor | None = None
        self._shift_O = _shift(weight)
        self._packed_bias = self._in_order(self._shift_O) if self._shift_O is not None else None
        self._panels = self._describe(weight, kernels, kind, rounding)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]:
        if bias_O is not None and bias_O is not self._bias_O:
            self._bias_O = bias_O
            shift_O = self._shift_O if self._shift_O is not None else 0.0
            self._packed_bias = self._in_order(bias_O.float() + shift_O)
        assert bias_O is not None or self._bias_O is None, "a weight's products all have its bias, or none has"
        return [self._part(ctypes.addressof(self._panels), self._packed_bias)]

    def rows(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, [T, I]: those of `QuantisedWeight.dequantised`. Not of a gated one."""
        assert not self._gated
        read_TI = torch.zeros(len(rows_T), self.depth)
        pointers = ctypes.byref(self._panels), rows_T.contiguous().data_ptr(), read_TI.data_ptr()
        self._read(*pointers, len(rows_T), torch.get_num_threads())
        return read_TI.to(self._dtype)

    def _describe(self, weight: QuantisedWeight, kernels: Native, kind: _Sums, rounding: _Rounding) -> _Panels:
        positions = _Positions.of(weight)
        halves, num_steps = positions.group_steps is None, len(positions.columns) // _STEP
        first_group = weight.group_offset // weight.group_size if halves else 0
        num_groups = 2 * num_steps if halves else weight.scale.num_groups
        groups = slice(first_group, first_group + num_groups)
        scale, zero, table = weight.scale, weight.zero, weight.table
        if kind == _Sums.OF_SMALL_TABLE:
            assert table is not None
            levels, factor = _small_table(table)
            table, zero = (levels + 128).to(torch.uint8), 128
            scale = GroupValues(value_OB=_times(scale.value_OB, 1 / factor), factor_OG=scale.factor_OG)
        elif kind == _Sums.OF_FP8:
            scale, table = GroupValues(value_OB=scale.value_OB.float() * 256, factor_OG=scale.factor_OG), None
        rounded = weight.activations
        panels = _Panels(
            codes=self._keep(self._codes(weight, kernels, positions, by_position=kind == _Sums.OF_FP8)),
            scale=self._numbers(scale, groups, num_groups),
            minimum=_GroupNumbers() if weight.minimum is None else self._numbers(weight.minimum, groups, num_groups),
            table=None if table is None else self._keep(table.contiguous()),
            inputs=None if positions.inputs is None else self._keep(positions.inputs),
            group_steps=None if positions.group_steps is None else self._keep(positions.group_steps),
            num_inputs=weight.num_inputs, num_steps=num_steps, num_groups=num_groups, bits=weight.bits,
            sums=kind, rounding=rounding, groups_are_steps=positions.has_steps_as_groups,
        )  # fmt: skip
        if isinstance(zero, torch.Tensor):
            panels.zeros = self._keep(self._of_groups(zero[:, groups], num_groups))
        else:
            panels.zero = zero
        if rounded is not None:
            panels.activation_scale, panels.activation_zero = rounded.scale or 1.0, rounded.zero
            panels.rounding_group, panels.outliers_from = rounded.group or 0, rounded.outliers_from or 0.0
        return panels

    def _codes(
        self, weight: QuantisedWeight, kernels: Native, positions: _Positions, *, by_position: bool
    ) -> torch.Tensor:
        num_steps = len(positions.columns) // _STEP
        packed = roomy_zeros(len(self._order), num_steps * _STEP * weight.bits // 8, dtype=torch.uint8)
        codes_OW = weight.codes_OW if weight.codes_OW.stride(1) == 1 else weight.codes_OW.contiguous()
        sizes = len(self._order), weight.num_columns, num_steps, weight.bits, by_position, torch.get_num_threads()
        tensors = pointers(packed, self._order, positions.columns)
        kernels.pack_codes(codes_OW.data_ptr(), codes_OW.stride(0), *tensors, *sizes)
        return packed

    def _numbers(self, numbers: GroupValues, groups: slice, num_groups: int) -> _GroupNumbers:
        factors_OG = numbers.factor_OG
        if factors_OG is None:  # else all blocks, of which `groups` may begin within the first
            values = self._of_groups(numbers.value_OB[:, groups], num_groups)
            return _GroupNumbers(
                values=self._keep(values),
                value_type=_TYPES[values.dtype],
                num_values=num_groups,
                groups_per_value=1,
            )
        values = self._of_groups(numbers.value_OB, numbers.value_OB.shape[1])
        return _GroupNumbers(
            values=self._keep(values),
            factors=self._keep(self._of_groups(factors_OG[:, groups], num_groups)),
            value_type=_TYPES[values.dtype],
            factor_type=_TYPES[factors_OG.dtype],
            num_values=numbers.value_OB.shape[1],
            groups_per_value=numbers.groups_per_block,
            first_group=groups.start,
        )

    def _of_groups(self, numbers_OG: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Reshapes to [panels, num_groups, 16], padded with zeros."""
        packed = roomy_zeros(len(self._order) // _PANEL, num_groups, _PANEL, dtype=numbers_OG.dtype)
        there_O = self._order >= 0
        rows = torch.zeros(len(self._order), numbers_OG.shape[1], dtype=numbers_OG.dtype)
        rows[there_O] = numbers_OG[self._order[there_O]]
        packed[:, : numbers_OG.shape[1]] = rows.view(-1, _PANEL, numbers_OG.shape[1]).transpose(1, 2)
        return packed

    def _in_order(self, numbers_O: torch.Tensor) -> torch.Tensor:
        return torch.where(self._order < 0, 0.0, numbers_O[self._order.clamp(min=0)].float())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Positions:
    """Where columns of codes stand in steps."""

    columns: torch.Tensor  # int32 [P]: -1 for an empty place
    inputs: torch.Tensor | None  # int32 [P]; None: in order
    group_steps: torch.Tensor | None  # int32 [G]; None: each group is half a step

    @property
    def has_gaps(self) -> bool:
        """Between columns, not only behind them."""
        used = (self.columns >= 0).nonzero()
        return int(used[-1]) + 1 > len(used)

    @property
    def has_steps_as_groups(self) -> bool:
        return self.group_steps is not None and self.group_steps.tolist() == [1] * len(self.group_steps)

    @classmethod
    def of(cls, weight: QuantisedWeight) -> _Positions:
        if (
            weight.group_starts is None
            and weight.group_size == _STEP // 2
            and weight.group_offset % weight.group_size == 0
        ):
            sizes, group_steps = [weight.num_columns], None
        else:
            sizes = torch.bincount(weight.group_of_column(), minlength=weight.scale.num_groups).tolist()
            group_steps = torch.tensor([-(-size // _STEP) for size in sizes], dtype=torch.int32)
        columns = torch.full((sum(-(-size // _STEP) for size in sizes) * _STEP,), -1, dtype=torch.int32)
        position = column = 0
        for size in sizes:
            columns[position : position + size] = torch.arange(column, column + size)
            position, column = position - (-size // _STEP) * _STEP, column + size
        positions = cls(columns=columns, inputs=None, group_steps=group_steps)
        if weight.order_I is None and not positions.has_gaps:
            return positions
        order_I = torch.arange(weight.num_columns) if weight.order_I is None else weight.order_I
        inputs = torch.where(columns < 0, -1, order_I[columns.long().clamp(min=0)]).int()
        return cls(columns=columns, inputs=inputs, group_steps=group_steps)


def _sums(weight: QuantisedWeight, dtype: torch.dtype) -> _Sums | None:
    exact = dtype == torch.float32 if weight.activations is None else weight.activations.levels == "fp8"
    if weight.table is None:
        return _Sums.OF_FLOATS if exact else _Sums.OF_INTEGERS
    if weight.bits == 8 and torch.equal(weight.table.nan_to_num(0.0), _e4m3().nan_to_num(0.0)):
        return _Sums.OF_FP8
    if weight.bits == 4 and not exact and _small_table(weight.table)[1]:
        return _Sums.OF_SMALL_TABLE
    return _Sums.OF_TABLE if weight.bits in (4, 8) else None


def _rounding(weight: QuantisedWeight, dtype: torch.dtype) -> _Rounding | None:
    rounding = weight.activations
    if rounding is None:
        kind = _sums(weight, dtype)
        return _Rounding.INT8_OF_PIECES if kind in (_Sums.OF_INTEGERS, _Sums.OF_SMALL_TABLE) else _Rounding.NONE
    if rounding.outliers_from is not None:
        whole = weight.bits == 8 and weight.scale.num_groups == 1 and weight.minimum is None and weight.table is None
        by_token = rounding.levels == "int8" and rounding.scale is None and rounding.group is None
        return _Rounding.INT8_OF_TOKENS if whole and by_token and isinstance(weight.zero, int) else None
    if rounding.levels == "fp8":
        if rounding.scale is not None:
            return _Rounding.FP8_STATIC
        return _Rounding.FP8_OF_TOKENS if rounding.group is None else _Rounding.FP8_OF_GROUPS
    if weight.table is not None:
        return None
    if rounding.scale is not None:
        return _Rounding.INT8_STATIC
    return _Rounding.INT8_OF_TOKENS if rounding.group is None else None


def _shift(weight: QuantisedWeight) -> torch.Tensor | None:
    """The term that a static zero of the activations adds to every row: float32 [O], negative."""
    rounding = weight.activations
    if rounding is None or rounding.scale is None or not rounding.zero:
        return None
    sums = [weight.columns(rows).double().sum(1) for rows in weight.row_tiles()]
    return (torch.cat(sums) * -(rounding.scale * rounding.zero)).float()


def _small_table(table: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The table as 8-bit integers, and their factor; 0 if they do not fit."""
    for factor in (1, 2, 4, 8):
        levels = table * factor
        if torch.equal(levels, levels.round()) and levels.min() >= -128 and levels.max() <= 127:
            return levels, factor
    return table, 0


def _times(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiplies in the tensor's dtype if that is exact, else in float32."""
    products = values.float() * factor
    return products.to(values.dtype) if torch.equal(products.to(values.dtype).float(), products) else products


def _e4m3() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
