"""Grouped products of experts whose weights are codes of 2 to 8 bits in groups (`quantised.grouped`), in Triton.

The experts of a layer have one form: bits, groups, and sizes. Their tensors are found by a table of addresses, one row
for each tensor of a weight. Legend as in `product`, and: V tensors of a weight, M rows and N outputs of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
import triton
import triton.language as tl

from workers.kernels.experts.address_tables import addresses, aligned
from workers.kernels.experts.alignment import FEW_ROWS, ExpertTiles
from workers.kernels.quantised.grouped_codes import (
    GroupedCodes,
    GroupNumbers,
    constants_of,
    grouped_tile,
    sum_of_steps,
    tensors_of,
    unit_sums,
)


@triton.jit
def _tensor(table_ptr, expert, num_experts, like_ptr, ROW: tl.constexpr):
    return tl.multiple_of(tl.load(table_ptr + ROW * num_experts + expert).to(like_ptr.dtype), 16)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _code_experts(
    x_ptr, table_ptr, low_ptr, high_ptr, scales_ptr, scale_factors_ptr, zeros_ptr, minimums_ptr, minimum_factors_ptr,
    levels_ptr, order_ptr, sums_ptr, biases_ptr, pairs_ptr, experts_ptr, out_ptr,
    num_pairs, slots, num_experts, num_rows, num_inputs, num_outputs, padded_outputs, x_stride, num_steps,
    PER_SCALE: tl.constexpr, PER_SCALE_FACTOR: tl.constexpr, PER_ZERO: tl.constexpr,
    PER_MINIMUM: tl.constexpr, PER_MINIMUM_FACTOR: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OFFSET: tl.constexpr, SCALE_FACTORS: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr,
    MINIMUM_FACTORS: tl.constexpr, TABLE: tl.constexpr, PAIRS: tl.constexpr, ORDER: tl.constexpr, BIAS: tl.constexpr,
    SUMS: tl.constexpr, SUMMED: tl.constexpr, PER_UNIT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert >= num_experts:
        return
    if tl.load(table_ptr + expert) == 0:  # an expert of another rank
        return
    outputs_N = tl.program_id(1) * N + tl.arange(0, N)
    pairs_M = tl.load(pairs_ptr + tile * M + tl.arange(0, M))
    inside_M, rows_M = pairs_M < num_pairs, pairs_M // slots
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    acc_NM = sum_of_steps(
        x_ptr + rows_M.to(tl.int64) * x_stride, inside_M, rows_M,
        _tensor(table_ptr, expert, num_experts, low_ptr, 0),
        _tensor(table_ptr, expert, num_experts, high_ptr, 1),
        _tensor(table_ptr, expert, num_experts, scales_ptr, 2),
        _tensor(table_ptr, expert, num_experts, scale_factors_ptr, 3),
        _tensor(table_ptr, expert, num_experts, zeros_ptr, 4),
        _tensor(table_ptr, expert, num_experts, minimums_ptr, 5),
        _tensor(table_ptr, expert, num_experts, minimum_factors_ptr, 6),
        _tensor(table_ptr, expert, num_experts, levels_ptr, 7),
        _tensor(table_ptr, expert, num_experts, order_ptr, 8),
        sums_ptr, outputs_N, 0, num_steps, num_rows, num_inputs, padded_outputs, num_steps,
        PER_SCALE, PER_SCALE_FACTOR, PER_ZERO, PER_MINIMUM, PER_MINIMUM_FACTOR, LOW, HIGH, OFFSET, SCALE_FACTORS,
        ZEROS, MINIMUMS, MINIMUM_FACTORS, TABLE, PAIRS, ORDER, SUMS, SUMMED, PER_UNIT, PRECISION, BLOCK, TYPE, N, M, H,
    )  # fmt: skip
    inside_N = outputs_N < num_outputs
    if BIAS:
        bias_ptr = tl.load(biases_ptr + expert).to(x_ptr.dtype)
        acc_NM += tl.load(bias_ptr + outputs_N, mask=inside_N, other=0.0).to(tl.float32)[:, None]
    out_NM = out_ptr + pairs_M.to(tl.int64)[None, :] * num_outputs + outputs_N[:, None]
    tl.store(out_NM, acc_NM.to(TYPE), mask=inside_M[None, :] & inside_N[:, None])


class CodeExperts:
    def __init__(self, weights: Mapping[int, GroupedCodes], *, num_experts: int) -> None:
        first = next(iter(weights.values()))
        self.num_outputs, self.device = first.num_outputs, first.low.device
        self._form = first
        self._tensors = {expert: [aligned(tensor) for tensor in _all_tensors(each)] for expert, each in weights.items()}
        columns = range(len(_all_tensors(first)))
        self._table_VX = torch.stack(
            [
                addresses({expert: held[index] for expert, held in self._tensors.items()}, num_experts)
                for index in columns
            ]
        )

    @classmethod
    def of(cls, weights: Mapping[int, GroupedCodes], *, num_experts: int) -> CodeExperts | None:
        """None for weights of several forms."""
        forms = {str(_form(each)) for each in weights.values()}
        return cls(weights, num_experts=num_experts) if len(forms) == 1 else None

    def multiply(
        self, x: torch.Tensor, slots: int, tiles: ExpertTiles, biases_X: torch.Tensor | None, out_PO: torch.Tensor
    ) -> None:
        form = self._form
        assert x.shape[1] == form.num_inputs, f"x has {x.shape[1]} inputs, the experts {form.num_inputs}"
        tile = grouped_tile(tiles.rows, x.dtype, form)
        constants, ordered = constants_of(form, x.dtype), form.inputs_P is not None
        summed = bool(constants["SUMS"]) and tiles.rows > FEW_ROWS and not ordered
        experts_B, like = tiles.experts_B, next(iter(self._tensors.values()))
        _code_experts[(len(experts_B), triton.cdiv(form.padded_outputs, tile.outputs))](
            x, self._table_VX, *like, unit_sums(x, form) if summed else out_PO,
            self._table_VX if biases_X is None else biases_X, tiles.pairs, experts_B, out_PO,
            len(out_PO), slots, self._table_VX.shape[1], x.shape[0], x.shape[1], form.num_outputs, form.padded_outputs,
            x.stride(0), form.num_steps,
            **constants, ORDER=ordered, BIAS=biases_X is not None, SUMMED=summed, N=tile.outputs, M=tiles.rows,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _all_tensors(weight: GroupedCodes) -> tuple[torch.Tensor, ...]:
    return (*tensors_of(weight), weight.low if weight.inputs_P is None else weight.inputs_P)


def _form(weight: GroupedCodes) -> list[object]:
    form: list[object] = []
    for field in fields(weight):
        value = getattr(weight, field.name)
        parts = [getattr(value, each.name) for each in fields(value)] if isinstance(value, GroupNumbers) else [value]
        form += [(each.dtype, tuple(each.shape)) if isinstance(each, torch.Tensor) else each for each in parts]
    return form
