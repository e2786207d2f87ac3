"""The one form that every quantised format becomes in memory: integer codes, and scales of groups of inputs.

    w[o, i] = scale(o, group of i) * level(code[o, i]) - minimum(o, group of i)

Legend: O outputs, I columns of codes (one for each input), W bytes of a row of codes, G groups of columns, B blocks of
groups (the K-quants' super-blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.bit_stream import select_columns, tiles_of, unpack_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValues:
    """A number for each group of each output: `value_OB` itself, or that of the group's block times `factor_OG`."""

    value_OB: torch.Tensor  # float16, bfloat16 or float32, as stored; without factors B = G
    factor_OG: torch.Tensor | None = None  # int8 or uint8; G is a multiple of B

    @property
    def num_groups(self) -> int:
        return self.value_OB.shape[1] if self.factor_OG is None else self.factor_OG.shape[1]

    @property
    def groups_per_block(self) -> int:
        return self.num_groups // self.value_OB.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.value_OB, self.factor_OG) if tensor is not None)

    def of_groups(self, rows: slice = slice(None)) -> torch.Tensor:
        """The values by group, [O, G] in float32. With factors, they are the products, rounded once."""
        value_OG = self.value_OB[rows].float()
        if self.factor_OG is None:
            return value_OG
        return value_OG.repeat_interleave(self.groups_per_block, dim=1) * self.factor_OG[rows].float()

    def outputs(self, rows: slice | torch.Tensor) -> GroupValues:
        return GroupValues(value_OB=self.value_OB[rows], factor_OG=_rows(self.factor_OG, rows))

    def blocks(self, blocks: slice) -> GroupValues:
        """Values of some blocks; without factors a block is a group."""
        size = self.groups_per_block
        factors = None
        if self.factor_OG is not None:
            factors = self.factor_OG[:, blocks.start * size : blocks.stop * size].contiguous()
        return GroupValues(value_OB=self.value_OB[:, blocks].contiguous(), factor_OG=factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """One projection's share, or several of one input side by side. Tensors are on one device and are not changed.

    Column j of the codes is input j, or input `order_I[j]` where there is an order; an input without a column has
    weight zero. Column j is in group (j + group_offset) // group_size; or, where `group_starts` [G + 1] is given, in
    the group g with group_starts[g] <= j < group_starts[g + 1], and group_size has no meaning.
    """

    bits: int  # 2 to 8
    codes_OW: torch.Tensor  # uint8 [O, ceil(I * bits / 8)]: a row is a dense little-endian stream (`bit_stream`)
    num_inputs: int
    scale: GroupValues
    group_size: int
    group_offset: int = 0  # of the first column from the first group's start; may be several groups, within a block
    zero: int | torch.Tensor = 0  # a tensor is uint8 [O, G]; level = code - zero
    table: torch.Tensor | None = None  # float32 [2**bits]: level = table[code], and no zero
    minimum: GroupValues | None = None
    order_I: torch.Tensor | None = None  # int64
    group_starts: torch.Tensor | None = None  # int64
    activations: ActivationRounding | None = None

    @property
    def num_outputs(self) -> int:
        return self.codes_OW.shape[0]

    @property
    def num_columns(self) -> int:
        return self.num_inputs if self.order_I is None else self.order_I.shape[0]

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes_OW, self.zero, self.table, self.order_I, self.group_starts)
        plain = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        return plain + self.scale.num_bytes + (self.minimum.num_bytes if self.minimum is not None else 0)

    def group_of_column(self) -> torch.Tensor:
        """int64 [I]."""
        columns = torch.arange(self.num_columns, device=self.codes_OW.device)
        if self.group_starts is not None:
            return torch.searchsorted(self.group_starts[1:].contiguous(), columns, right=True)
        return (columns + self.group_offset) // self.group_size

    def levels(self, rows: slice = slice(None)) -> torch.Tensor:
        """[O, I], float32, in the order of the columns."""
        codes_OI = unpack_bits(self.codes_OW[rows], self.bits, self.num_columns)
        if self.table is not None:
            return self.table[codes_OI.int()]
        if isinstance(self.zero, int):
            return codes_OI.float().sub_(self.zero)
        return codes_OI.float().sub_(self.zero[rows][:, self.group_of_column()])

    def columns(self, rows: slice = slice(None)) -> torch.Tensor:
        """Weights [O, I], float32, in the order of the columns."""
        group_I = self.group_of_column()
        weight_OI = self.levels(rows).mul_(self.scale.of_groups(rows)[:, group_I])
        if self.minimum is not None:
            weight_OI.sub_(self.minimum.of_groups(rows)[:, group_I])
        return weight_OI

    def dequantised(self, rows: slice = slice(None)) -> torch.Tensor:
        """Weights [O, num_inputs], float32, in the order of the inputs: the reference of every fast product."""
        weight_OI = self.columns(rows)
        if self.order_I is None:
            return weight_OI
        ordered = weight_OI.new_zeros(weight_OI.shape[0], self.num_inputs)
        ordered[:, self.order_I] = weight_OI
        return ordered

    def row_tiles(self) -> list[slice]:
        return tiles_of(self.num_outputs, self.num_columns)

    def outputs(self, rows: slice | torch.Tensor) -> QuantisedWeight:
        """The weight of some outputs: a slice, or int64 indices."""
        return replace(
            self,
            codes_OW=self.codes_OW[rows],
            scale=self.scale.outputs(rows),
            minimum=None if self.minimum is None else self.minimum.outputs(rows),
            zero=self.zero if isinstance(self.zero, int) else self.zero[rows],
        )

    def in_groups_from(self, first: int) -> QuantisedWeight:
        """Drops the groups without inputs here: the codes are of inputs [first, first + I) of a layer, the groups those
        of the whole layer."""
        offset, groups = self._groups_touched(first, self.num_columns)
        return replace(self, group_offset=offset, **groups)

    def cut_inputs(self, start: int, size: int) -> QuantisedWeight:
        """Cuts out the columns of inputs [start, start + size). A group or block at an edge stays whole."""
        if self.order_I is not None:
            return self._cut_ordered(start, size)
        codes = select_columns(self.codes_OW, self.bits, slice(start, start + size), self.num_columns)
        if self.group_starts is not None:
            starts = (self.group_starts - start).clamp(0, size)
            return replace(self, codes_OW=codes, num_inputs=size, group_starts=starts)
        offset, groups = self._groups_touched(self.group_offset + start, size)
        return replace(self, codes_OW=codes, num_inputs=size, group_offset=offset, **groups)

    def _groups_touched(self, first: int, size: int) -> tuple[int, dict[str, Any]]:
        """Returns the groups of columns [first, first + size), counted from the first group's start: their
        `group_offset`, and the changed fields."""
        per_block = self.scale.groups_per_block
        width = self.group_size * per_block
        blocks = slice(first // width, -(-(first + size) // width))
        groups = slice(blocks.start * per_block, blocks.stop * per_block)
        return first - blocks.start * width, {
            "scale": self.scale.blocks(blocks),
            "minimum": None if self.minimum is None else self.minimum.blocks(blocks),
            "zero": self.zero if isinstance(self.zero, int) else self.zero[:, groups].contiguous(),
        }

    def _cut_ordered(self, start: int, size: int) -> QuantisedWeight:
        """Keeps every group: the order spreads a range of inputs over all of them."""
        assert self.order_I is not None
        columns = ((self.order_I >= start) & (self.order_I < start + size)).nonzero().squeeze(1)
        counts = torch.bincount(self.group_of_column()[columns], minlength=self.scale.num_groups)
        return replace(
            self,
            codes_OW=select_columns(self.codes_OW, self.bits, columns, self.num_columns),
            num_inputs=size,
            order_I=self.order_I[columns] - start,
            group_starts=_starts(counts),
        )


def sorted_by_group(weight: QuantisedWeight, group_I: torch.Tensor | None, first: int) -> QuantisedWeight:
    """Sorts `weight`, of inputs [first, first + I) of a layer and with all of its groups, by the inputs' groups
    `group_I`. None, or only numbers below 0: the inputs are in order."""
    if group_I is None or bool((group_I < 0).any()):
        return weight.in_groups_from(first)
    regular = torch.arange(first, first + weight.num_columns, device=group_I.device) // weight.group_size
    if torch.equal(group_I.long(), regular):
        return weight.in_groups_from(first)
    order_I = torch.argsort(group_I, stable=True)
    return replace(
        weight,
        codes_OW=select_columns(weight.codes_OW, weight.bits, order_I, weight.num_columns),
        order_I=order_I,
        group_starts=_starts(torch.bincount(group_I, minlength=weight.scale.num_groups)),
    )


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Joins weights with the same input along their outputs; None if they differ in anything else."""
    first, *others = weights
    if not others:
        return first
    alike = ("bits", "num_inputs", "group_size", "group_offset", "table", "order_I", "group_starts", "activations")
    values = [[w.scale for w in weights], [w.minimum for w in weights if w.minimum is not None]]
    if any(not _equal(getattr(first, name), getattr(other, name)) for name in alike for other in others):
        return None
    if len(values[1]) not in (0, len(weights)) or not all(_same_form(several) for several in values):
        return None
    zeros = [w.zero for w in weights]
    zero: int | torch.Tensor = zeros[0]
    if any(isinstance(z, torch.Tensor) for z in zeros) or len({z for z in zeros if isinstance(z, int)}) > 1:
        zero = torch.cat([_spread_zero(w) for w in weights])
    return replace(
        first,
        codes_OW=torch.cat([w.codes_OW for w in weights]),
        scale=_stacked(values[0]),
        minimum=_stacked([minimum for minimum in values[1] if minimum is not None]) if values[1] else None,
        zero=zero,
    )


def _spread_zero(weight: QuantisedWeight) -> torch.Tensor:
    if isinstance(weight.zero, torch.Tensor):
        return weight.zero
    shape = weight.num_outputs, weight.scale.num_groups
    return torch.full(shape, weight.zero, dtype=torch.uint8, device=weight.codes_OW.device)


def _stacked(values: Sequence[GroupValues | None]) -> GroupValues:
    present = [value for value in values if value is not None]
    factors = [value.factor_OG for value in present if value.factor_OG is not None]
    return GroupValues(
        value_OB=torch.cat([value.value_OB for value in present]),
        factor_OG=torch.cat(factors) if factors else None,
    )


def _same_form(values: Sequence[GroupValues | None]) -> bool:
    forms = {
        tuple((t.dtype, t.shape[1]) if t is not None else None for t in (v.value_OB, v.factor_OG))
        for v in values
        if v is not None
    }
    return len(forms) <= 1


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _rows(tensor: torch.Tensor | None, rows: slice | torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]
