"""Lays `QuantisedWeight`s out as the kernels read them, once, when a model is loaded.

Legend: O outputs, I inputs, P positions (columns in the order of their groups, and gaps), U units, G groups, H field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.kernels.quantised.grouped_codes import FIELDS, GroupedCodes, GroupNumbers
from workers.kernels.quantised.split_sums import BLOCK_N
from workers.quantization.bit_stream import unpack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

PADDED_OUTPUTS = 2 * BLOCK_N  # whole tiles of many rows

_MOST_GAPS = 1.25  # positions for a column, beyond which a weight is better multiplied otherwise
_PLANES = {2: (2, 0), 3: (4, 0), 4: (4, 0), 5: (4, 2), 6: (4, 2), 7: (8, 0), 8: (8, 0)}
"""Bits of codes by how they are stored: 3, 5 and 7 bits take the room of 4, 6 and 8."""

_WORDS = {2: torch.int8, 4: torch.int16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """`columns_P`: the column at each position, -1 in gaps. `groups_U`: the group of each unit of positions; None where
    each `per_group` units are a group."""

    field: int
    fields: int  # of a unit
    columns_P: torch.Tensor
    groups_U: torch.Tensor | None
    per_group: int

    @property
    def size(self) -> int:
        return self.field * self.fields

    @property
    def count(self) -> int:
        """Counts columns including the padding after the last one, for which the kernel reads scales too."""
        return len(self.columns_P) // self.size


def packed_groups(weight: QuantisedWeight, num_multiprocessors: int) -> GroupedCodes | None:
    """Packs a weight in groups. None for groups so short that most positions would be gaps."""
    units = _units(weight)
    if units is None or len(units.columns_P) > _MOST_GAPS * (weight.num_columns + FIELDS * units.field):
        return None
    low_bits, high_bits = _PLANES[weight.bits]
    low, high = _words(weight, units, low_bits, high_bits)
    zero = weight.zero
    if isinstance(zero, torch.Tensor):
        zero = _of_units(zero, units)
    table = weight.table
    if table is not None:
        table = F.pad(table, (0, 2 ** (low_bits + high_bits) - len(table))).contiguous()
    return GroupedCodes(
        low=low,
        high=high,
        low_bits=low_bits,
        high_bits=high_bits,
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        field=units.field,
        fields_per_unit=units.fields,
        scale=_numbers(weight.scale, units),
        zero=zero,
        units_per_zero=units.per_group,
        minimum=None if weight.minimum is None else _numbers(weight.minimum, units),
        table=table,
        inputs_P=_inputs(weight, units),
        num_multiprocessors=num_multiprocessors,
    )


def _units(weight: QuantisedWeight) -> _Units | None:
    """Returns None for no gaps: regular groups of a power of two that begin at the first column. Others are padded to
    whole units of 32."""
    columns, device = weight.num_columns, weight.codes_OW.device
    size = weight.group_size
    if weight.group_starts is None and weight.scale.num_groups == 1:
        size, field, fields = columns, 32, FIELDS
    else:
        field = 16 if size % 32 and weight.group_starts is None else 32
        fields = max(n for n in (1, 2, FIELDS) if weight.group_starts is not None or size % (n * field) == 0 or n == 1)
    unit = field * fields
    regular = weight.group_starts is None and (weight.scale.num_groups == 1 or size % unit == 0)
    if regular and (weight.scale.num_groups == 1 or weight.group_offset % unit == 0):
        padded = -(-columns // (FIELDS * field)) * FIELDS * field
        columns_P = F.pad(torch.arange(columns, device=device), (0, padded - columns), value=-1)
        if weight.scale.num_groups == 1:
            return _Units(field=field, fields=fields, columns_P=columns_P, groups_U=None, per_group=padded // unit)
        groups_U = (torch.arange(padded // unit, device=device) * unit + weight.group_offset) // size
        groups_U = groups_U.clamp(max=weight.scale.num_groups - 1)  # behind the last column
        if weight.group_offset == 0:
            return _Units(field=field, fields=fields, columns_P=columns_P, groups_U=None, per_group=size // unit)
        return _Units(field=field, fields=fields, columns_P=columns_P, groups_U=groups_U, per_group=1)
    return _stretched(weight, 1 if weight.group_starts is None else fields)


def _stretched(weight: QuantisedWeight, fields: int) -> _Units | None:
    device = weight.codes_OW.device
    counts_G = torch.bincount(weight.group_of_column(), minlength=weight.scale.num_groups)
    for field, per_unit in ((32, FIELDS), (32, 2), (32, 1), (16, 1)):
        unit = field * per_unit
        units_G = (counts_G + unit - 1) // unit
        total = int(units_G.sum()) * unit
        padded = -(-total // (FIELDS * field)) * FIELDS * field
        if padded <= 1.05 * (weight.num_columns + FIELDS * field) or (field, per_unit) == (16, 1):
            break
    groups = torch.arange(len(counts_G), device=device)
    groups_U = F.pad(torch.repeat_interleave(groups, units_G), (0, (padded - total) // unit))
    starts_G = F.pad(units_G.cumsum(0) * unit, (1, 0))[:-1]
    first_G = F.pad(counts_G.cumsum(0), (1, 0))[:-1]
    columns = torch.arange(weight.num_columns, device=device)
    group_I = weight.group_of_column()
    columns_P = torch.full((padded,), -1, dtype=torch.int64, device=device)
    columns_P[starts_G[group_I] + columns - first_G[group_I]] = columns
    return _Units(field=field, fields=per_unit, columns_P=columns_P, groups_U=groups_U, per_group=1)


def _inputs(weight: QuantisedWeight, units: _Units) -> torch.Tensor | None:
    columns_P = units.columns_P
    in_order = torch.arange(len(columns_P), device=columns_P.device)
    if weight.order_I is None and torch.equal(columns_P[: weight.num_columns], in_order[: weight.num_columns]):
        return None
    inputs_P = columns_P if weight.order_I is None else weight.order_I[columns_P.clamp(min=0)]
    return torch.where(columns_P >= 0, inputs_P, weight.num_inputs)


def _words(
    weight: QuantisedWeight, units: _Units, low_bits: int, high_bits: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    blocks = -(-weight.num_outputs // PADDED_OUTPUTS) * PADDED_OUTPUTS // BLOCK_N
    steps = len(units.columns_P) // (FIELDS * units.field)
    planes = (FIELDS,) if low_bits == 8 else ()
    device = weight.codes_OW.device
    shape = blocks, steps, *planes, BLOCK_N, units.field
    low = torch.zeros(shape, dtype=_WORDS.get(low_bits, torch.int8), device=device)
    high = torch.zeros(shape, dtype=torch.int8, device=device) if high_bits else None
    for block, codes_NP in enumerate(_blocks_of_codes(weight, units)):
        codes = codes_NP.view(BLOCK_N, steps, FIELDS, units.field)
        if low_bits == 8:
            low[block] = (codes ^ 128).view(torch.int8).permute(1, 2, 0, 3)
            continue
        low[block] = _fields(codes & (2**low_bits - 1), low_bits).to(low.dtype)
        if high is not None:
            high[block] = _fields(codes >> low_bits, high_bits).to(torch.int8)
    return low, high


def _fields(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[steps, N, H] words of the four fields of [N, steps, 4, H]."""
    wide = codes.to(torch.int32)
    return sum(wide[:, :, field] << (field * bits) for field in range(FIELDS)).permute(1, 0, 2)  # type: ignore[union-attr]


def _blocks_of_codes(weight: QuantisedWeight, units: _Units) -> Iterator[torch.Tensor]:
    """uint8 [64, P] of each block of outputs, zeros in gaps."""
    in_gap_P = units.columns_P < 0
    columns_P = units.columns_P.clamp(min=0)
    for start in range(0, weight.num_outputs, BLOCK_N):
        rows = slice(start, min(start + BLOCK_N, weight.num_outputs))
        codes_NP = unpack_bits(weight.codes_OW[rows], weight.bits, weight.num_columns)[:, columns_P]
        codes_NP = codes_NP.masked_fill(in_gap_P, 0)
        yield F.pad(codes_NP, (0, 0, 0, BLOCK_N - codes_NP.shape[0])).contiguous()


def _numbers(values: GroupValues, units: _Units) -> GroupNumbers:
    factors = values.factor_OG
    if units.groups_U is not None:
        value_OU = values.value_OB[:, units.groups_U // values.groups_per_block]
        return GroupNumbers(
            values_VO=_by_outputs(value_OU), factors_GO=None if factors is None else _of_units(factors, units)
        )
    units_per_value = units.per_group * values.groups_per_block
    return GroupNumbers(
        values_VO=_by_outputs(values.value_OB, -(-units.count // units_per_value)),
        factors_GO=None if factors is None else _by_outputs(factors, -(-units.count // units.per_group)),
        units_per_value=units_per_value,
        units_per_factor=units.per_group,
    )


def _of_units(values_OG: torch.Tensor, units: _Units) -> torch.Tensor:
    if units.groups_U is not None:
        return _by_outputs(values_OG[:, units.groups_U])
    return _by_outputs(values_OG, -(-units.count // units.per_group))


def _by_outputs(values_OG: torch.Tensor, num: int = 0) -> torch.Tensor:
    """[G, O padded], zeros for groups up to `num`."""
    num_outputs, num_groups = values_OG.shape
    return F.pad(values_OG.T, (0, -num_outputs % PADDED_OUTPUTS, 0, max(0, num - num_groups))).contiguous()
