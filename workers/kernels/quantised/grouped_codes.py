"""Products with weights of 2 to 8 bits and scales of groups, in Triton: 1 to 16 rows from memory as fast as the codes
come, more rows in larger tiles of the same order of work.

    codes of 64 outputs   [ step 0 | step 1 | ... ]     a step is four fields of H inputs; a word has one code of each
    a program             64 outputs, a share of the steps, 16 rows:   acc[N, M] += scale[N] * (levels[N, H] @ x[H, M])

A code becomes a float by two operations on bits: below the implicit bit of 128 (bfloat16) or 1024 (float16). The matrix
units multiply that, exactly, and the sum over a group is scaled in float32. What the levels have too much, that 128
and the zero point, is taken off times the sum of the group's inputs, as a K-quant's minimum is. The weight is the left
operand, which stays in registers on Hopper. Legend: T tokens, O outputs, I inputs, P positions of codes (inputs in the
order of the groups, and gaps), N outputs of a tile, M rows of a tile, H positions of a field, G groups, V values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kernels.quantised.split_sums import BLOCK_N, add_shares, arrivals, splits_of, work_space
from workers.kernels.this_device import has_tensor_memory

FIELDS = 4
FEW_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """A number of each group and output: `values_VO`, times a factor where `factors_GO` are given."""

    values_VO: torch.Tensor  # float16, bfloat16 or float32 [V, outputs]
    factors_GO: torch.Tensor | None = None  # int8 or uint8 [G, outputs]
    units_per_value: int = 1  # a unit is the positions that are scaled at once
    units_per_factor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCodes:
    """A weight as `_grouped` reads it. Outputs are padded to blocks of 64, of scale zero.

    Codes of `low_bits` + `high_bits`: `low` is [blocks, steps, 64, H] int16 (4 bits) or int8 (2 bits), a word's field f
    that of position step * 4 H + f * H + h; of 8 bits [blocks, steps, 4, 64, H], int8, codes less 128. `high` as `low`.
    """

    low: torch.Tensor
    high: torch.Tensor | None
    low_bits: int
    high_bits: int
    num_outputs: int
    num_inputs: int
    field: int  # H
    fields_per_unit: int
    scale: GroupNumbers
    zero: int | torch.Tensor  # uint8 [G, outputs], groups of `units_per_zero` units
    units_per_zero: int
    minimum: GroupNumbers | None
    table: torch.Tensor | None  # float32 [2**bits]
    inputs_P: torch.Tensor | None  # int64: the input at each position, `num_inputs` in gaps; None: position i has i
    num_multiprocessors: int

    @property
    def num_bytes(self) -> int:
        numbers = [self.scale, *([self.minimum] if self.minimum else [])]
        tensors = [self.low, self.high, *(t for each in numbers for t in (each.values_VO, each.factors_GO))]
        tensors += [self.zero] if isinstance(self.zero, torch.Tensor) else []
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def num_steps(self) -> int:
        return self.low.shape[1]

    @property
    def num_positions(self) -> int:
        return self.num_steps * FIELDS * self.field

    @property
    def padded_outputs(self) -> int:
        return self.low.shape[0] * BLOCK_N


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """`outputs` by `rows`, loaded `stages` - 1 steps ahead by programs of `warps` warps."""

    outputs: int
    rows: int
    warps: int
    stages: int


_PAIR = "{ .reg .b32 shifted; shr.u32 shifted, $1, %d; lop3.b32 $0, shifted, 0x000f000f, 0x43004300, 0xea; }"
_SIGNED_PAIR = """{ .reg .b32 t, one, less; shr.u32 t, $1, %d; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
mov.b32 one, 0x3f803f80; mov.b32 less, 0xc308c308; fma.rn.bf16x2 $0, t, one, less; }"""
_MIDDLE = 8
_ROOM = tl.constexpr(16)
_PAIR_0, _PAIR_1, _PAIR_2, _PAIR_3 = (tl.constexpr(_PAIR % shift) for shift in (0, 4, 8, 12))
_SIGNED_0, _SIGNED_1, _SIGNED_2, _SIGNED_3 = (tl.constexpr(_SIGNED_PAIR % shift) for shift in (0, 4, 8, 12))


@triton.jit
def _pairs(low_NH, FIELD: tl.constexpr, SIGNED: tl.constexpr):
    """Levels of two codes of 4 bits at a time: `code & 15 | 0x4300`, which is 128 + the code. SIGNED codes, around
    8, have 136 taken off at once, exactly, and need no sums of inputs. Triton's own takes three times as many
    instructions, more than a multiprocessor has while memory gives the codes."""
    if SIGNED:
        ASM: tl.constexpr = (
            _SIGNED_0 if FIELD == 0 else _SIGNED_1 if FIELD == 1 else _SIGNED_2 if FIELD == 2 else _SIGNED_3
        )
        return tl.inline_asm_elementwise(ASM, "=r,r", [low_NH], dtype=tl.bfloat16, is_pure=True, pack=2)
    PLAIN: tl.constexpr = _PAIR_0 if FIELD == 0 else _PAIR_1 if FIELD == 1 else _PAIR_2 if FIELD == 2 else _PAIR_3
    return tl.inline_asm_elementwise(PLAIN, "=r,r", [low_NH], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _level(low_NH, high_NH, table_ptr, FIELD: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
           TABLE: tl.constexpr, PAIRS: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """[N, H] of one field: the code in TYPE plus `_offset`, or the table's entry for it."""
    if LOW == 8:
        level_NH = tl.load(table_ptr + low_NH.to(tl.int32) + 128).to(TYPE) if TABLE else low_NH.to(TYPE)
    elif PAIRS:
        level_NH = _pairs(low_NH, FIELD, PAIRS == 2)
    else:
        code_NH = ((low_NH >> (FIELD * LOW)) & (2**LOW - 1)).to(tl.int16)
        if HIGH:
            code_NH = code_NH | (((high_NH >> (FIELD * HIGH)) & (2**HIGH - 1)).to(tl.int16) << LOW)
        if TABLE:
            level_NH = tl.load(table_ptr + code_NH.to(tl.int32)).to(TYPE)
        elif tl.bfloat16 == TYPE:
            level_NH = (code_NH | 0x4300).to(tl.bfloat16, bitcast=True)
        elif tl.float16 == TYPE:
            level_NH = (code_NH | 0x6400).to(tl.float16, bitcast=True)
        else:
            level_NH = code_NH.to(TYPE)
    return level_NH


@triton.jit
def _of_unit(step, UNIT: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr):
    """Which of several numbers a step's unit uses, if PER units share one; a number for a whole step is loaded once."""
    return (step * UNITS + (0 if PER % UNITS == 0 else UNIT)) // PER


@triton.jit
def _numbers(values_ptr, factors_ptr, step, outputs_N, stride, UNIT: tl.constexpr, UNITS: tl.constexpr,
             PER_VALUE: tl.constexpr, PER_FACTOR: tl.constexpr, FACTORS: tl.constexpr):  # fmt: skip
    value_N = tl.load(values_ptr + _of_unit(step, UNIT, UNITS, PER_VALUE) * stride + outputs_N).to(tl.float32)
    if FACTORS:
        value_N *= tl.load(factors_ptr + _of_unit(step, UNIT, UNITS, PER_FACTOR) * stride + outputs_N).to(tl.float32)
    return value_N


@triton.jit
def _add_unit(
    acc_NM, part_NM, sums_NM, step, outputs_N, rows_M, sums_stride, padded_outputs, scales_ptr, scale_factors_ptr,
    zeros_ptr, minimums_ptr, minimum_factors_ptr, sums_ptr, UNIT: tl.constexpr, UNITS: tl.constexpr,
    PER_SCALE: tl.constexpr, PER_SCALE_FACTOR: tl.constexpr, PER_ZERO: tl.constexpr, PER_MINIMUM: tl.constexpr,
    PER_MINIMUM_FACTOR: tl.constexpr, OFFSET: tl.constexpr, SCALE_FACTORS: tl.constexpr, ZEROS: tl.constexpr,
    MINIMUMS: tl.constexpr, MINIMUM_FACTORS: tl.constexpr, SUMS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    scale_N = _numbers(scales_ptr, scale_factors_ptr, step, outputs_N, padded_outputs, UNIT, UNITS, PER_SCALE,
                       PER_SCALE_FACTOR, SCALE_FACTORS)  # fmt: skip
    acc_NM += part_NM * scale_N[:, None]
    if SUMS:
        offset_N = scale_N * OFFSET
        if ZEROS:
            zeros_row_ptr = zeros_ptr + _of_unit(step, UNIT, UNITS, PER_ZERO) * padded_outputs
            offset_N += scale_N * tl.load(zeros_row_ptr + outputs_N).to(tl.float32)
        if MINIMUMS:
            offset_N += _numbers(minimums_ptr, minimum_factors_ptr, step, outputs_N, padded_outputs, UNIT, UNITS,
                                 PER_MINIMUM, PER_MINIMUM_FACTOR, MINIMUM_FACTORS)  # fmt: skip
        if SUMMED:
            sums_row_ptr = sums_ptr + (step * UNITS + UNIT) * sums_stride
            acc_NM -= tl.load(sums_row_ptr + rows_M, mask=rows_M < sums_stride, other=0.0)[None, :] * offset_N[:, None]
        else:
            acc_NM -= sums_NM * offset_N[:, None]
    return acc_NM


@triton.jit
def sum_of_steps(
    x_row_M, inside_M, rows_M, low_ptr, high_ptr, scales_ptr, scale_factors_ptr, zeros_ptr, minimums_ptr,
    minimum_factors_ptr, table_ptr, order_ptr, sums_ptr, outputs_N, first, last, num_rows, num_inputs, padded_outputs,
    num_steps, PER_SCALE: tl.constexpr, PER_SCALE_FACTOR: tl.constexpr, PER_ZERO: tl.constexpr,
    PER_MINIMUM: tl.constexpr, PER_MINIMUM_FACTOR: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OFFSET: tl.constexpr, SCALE_FACTORS: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr,
    MINIMUM_FACTORS: tl.constexpr, TABLE: tl.constexpr, PAIRS: tl.constexpr, ORDER: tl.constexpr, SUMS: tl.constexpr,
    SUMMED: tl.constexpr, PER_UNIT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """[N, M], float32: of rows of inputs, by address, over the steps [first, last) of a weight. With an `order` a
    position's input is looked up in it; rows of x are in the order of positions otherwise."""
    lanes_H = tl.arange(0, H)
    sums_stride = tl.cdiv(num_rows, _ROOM) * _ROOM
    UNITS: tl.constexpr = 4 // PER_UNIT
    PLANES: tl.constexpr = 4 if LOW == 8 else 1
    word_N = (outputs_N // BLOCK).to(tl.int64) * num_steps * BLOCK * H
    words_NH = word_N[:, None] * PLANES + (outputs_N % BLOCK)[:, None] * H + lanes_H[None, :]
    high_words_NH = word_N[:, None] + (outputs_N % BLOCK)[:, None] * H + lanes_H[None, :]
    acc_NM = tl.zeros([N, M], tl.float32)
    ones_NH = tl.full([N, H], 1.0, TYPE)
    for step in range(first, last):
        low_NH = tl.load(low_ptr + words_NH + step * (PLANES * BLOCK * H)) if LOW < 8 else 0
        high_NH = tl.load(high_ptr + high_words_NH + step * (BLOCK * H)) if HIGH else 0
        part_NM = tl.zeros([N, M], tl.float32)
        sums_NM = tl.zeros([N, M], tl.float32)
        for field in tl.static_range(4):
            inputs_H = (step * 4 + field) * H + lanes_H
            if ORDER:
                inputs_H = tl.load(order_ptr + inputs_H).to(tl.int32)
            inside_HM = inside_M[None, :] & (inputs_H < num_inputs)[:, None]
            x_HM = tl.load(x_row_M[None, :] + inputs_H[:, None], mask=inside_HM, other=0.0)
            if LOW == 8:
                low_NH = tl.load(low_ptr + words_NH + (step * 4 + field) * (BLOCK * H))
            level_NH = _level(low_NH, high_NH, table_ptr, field, LOW, HIGH, TABLE, PAIRS, TYPE)
            part_NM = tl.dot(level_NH, x_HM, acc=part_NM, input_precision=PRECISION)
            if SUMS and not SUMMED:
                sums_NM = tl.dot(ones_NH, x_HM, acc=sums_NM, input_precision=PRECISION)
            if field % PER_UNIT == PER_UNIT - 1:
                acc_NM = _add_unit(
                    acc_NM, part_NM, sums_NM, step, outputs_N, rows_M, sums_stride, padded_outputs, scales_ptr,
                    scale_factors_ptr, zeros_ptr, minimums_ptr, minimum_factors_ptr, sums_ptr, field // PER_UNIT, UNITS,
                    PER_SCALE, PER_SCALE_FACTOR, PER_ZERO, PER_MINIMUM, PER_MINIMUM_FACTOR, OFFSET, SCALE_FACTORS,
                    ZEROS, MINIMUMS, MINIMUM_FACTORS, SUMS, SUMMED)  # fmt: skip
                part_NM = tl.zeros([N, M], tl.float32)
                sums_NM = tl.zeros([N, M], tl.float32)
    return acc_NM


@triton.jit(do_not_specialize=["num_rows"])
def _grouped(
    x_ptr, low_ptr, high_ptr, scales_ptr, scale_factors_ptr, zeros_ptr, minimums_ptr, minimum_factors_ptr, table_ptr,
    sums_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, num_rows, num_inputs, num_outputs, padded_outputs, x_stride,
    num_steps, steps_per_split, PER_SCALE: tl.constexpr, PER_SCALE_FACTOR: tl.constexpr, PER_ZERO: tl.constexpr,
    PER_MINIMUM: tl.constexpr, PER_MINIMUM_FACTOR: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OFFSET: tl.constexpr, SCALE_FACTORS: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr,
    MINIMUM_FACTORS: tl.constexpr, TABLE: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr,
    SUMMED: tl.constexpr, SPLIT: tl.constexpr, PER_UNIT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    outputs_N = block * N + tl.arange(0, N)
    rows_M = tl.program_id(2) * M + tl.arange(0, M)
    inside_M = rows_M < num_rows
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, num_steps)
    acc_NM = sum_of_steps(
        x_ptr + rows_M.to(tl.int64) * x_stride, inside_M, rows_M, low_ptr, high_ptr, scales_ptr, scale_factors_ptr,
        zeros_ptr, minimums_ptr, minimum_factors_ptr, table_ptr, low_ptr, sums_ptr, outputs_N, first, last, num_rows,
        num_inputs, padded_outputs, num_steps, PER_SCALE, PER_SCALE_FACTOR, PER_ZERO, PER_MINIMUM, PER_MINIMUM_FACTOR,
        LOW, HIGH, OFFSET, SCALE_FACTORS, ZEROS, MINIMUMS, MINIMUM_FACTORS, TABLE, PAIRS, False, SUMS, SUMMED, PER_UNIT,
        PRECISION, BLOCK, TYPE, N, M, H)  # fmt: skip
    if SPLIT:
        is_last, acc_NM = add_shares(acc_NM, partial_ptr, arrived_ptr, block, tl.num_programs(0), N, M)
        if not is_last:
            return
    if BIAS:
        acc_NM += tl.load(bias_ptr + outputs_N, mask=outputs_N < num_outputs, other=0.0).to(tl.float32)[:, None]
    written_NM = rows_M.to(tl.int64)[None, :] * num_outputs + outputs_N[:, None]
    inside_NM = inside_M[None, :] & (outputs_N < num_outputs)[:, None]
    tl.store(out_ptr + written_NM, acc_NM.to(TYPE), mask=inside_NM)


_UNSIGNED_PAIRS, _SIGNED_PAIRS = 1, 2


def _pairs_of(weight: GroupedCodes, dtype: torch.dtype) -> int:
    """`_SIGNED_PAIRS` for codes around 8, else `_UNSIGNED_PAIRS`; 0 if `_pairs` does not compute the levels."""
    if weight.low_bits + weight.high_bits != 4 or weight.table is not None or dtype != torch.bfloat16:
        return 0
    return _SIGNED_PAIRS if isinstance(weight.zero, int) and weight.zero == _MIDDLE else _UNSIGNED_PAIRS


def _offset(weight: GroupedCodes, dtype: torch.dtype) -> int:
    """The surplus of levels in registers over the codes' own: the conversion's 128 and the constant zero."""
    if weight.table is not None:
        return 0
    zero = weight.zero if isinstance(weight.zero, int) else 0
    if weight.low_bits == 8:
        return zero - 128
    if _pairs_of(weight, dtype) == _SIGNED_PAIRS:
        return 0
    return zero + {torch.bfloat16: 128, torch.float16: 1024}.get(dtype, 0)


def unit_sums(x_TP: torch.Tensor, weight: GroupedCodes) -> torch.Tensor:
    """[U, T], float32: the sum of each row's inputs over each unit, for tiles of many rows. Those of few rows take it
    from the matrix units, which have nothing else to do, and so need no second launch. Rows of zeros are added up to a
    multiple of 16, so that several sums are loaded at once whatever T is."""
    x_TP = torch.nn.functional.pad(x_TP, (0, weight.num_positions - x_TP.shape[1], 0, -len(x_TP) % _ROOM.value))
    parts_TUX = x_TP.unflatten(1, (-1, weight.fields_per_unit * weight.field))
    sums_TU: torch.Tensor = parts_TUX.sum(dim=2, dtype=torch.float32)
    return sums_TU.T.contiguous()


def grouped_tile(num_rows: int, dtype: torch.dtype, weight: GroupedCodes) -> ProductTile:
    """Up to 16 rows: 128 outputs and four stages, 24 KiB of codes of 4 bits under way in each of four programs on a
    multiprocessor. Codes in two words, of 8 bits, and minimums take half of it: on an H200 a row by 28,672 x 4,096 took
    33 us (4 bits), 64 (8 bits; 69 with 128 outputs) and 76 (Q4_K; 166), bfloat16 68. More rows: a code that is unpacked
    serves 64 or 128 rows. Tensor memory has room for two programs of 64 rows on a multiprocessor, and for none of 128
    by 128."""
    wide, few_columns = dtype == torch.float32, has_tensor_memory()
    if num_rows <= FEW_ROWS:
        eight = weight.low_bits == 8
        outputs = BLOCK_N if weight.high_bits or weight.minimum is not None or eight else 2 * BLOCK_N
        return ProductTile(outputs=outputs, rows=FEW_ROWS, warps=4, stages=2 if wide else 3 if eight else 4)
    if num_rows <= 256 or wide or weight.minimum is not None or few_columns:
        return ProductTile(outputs=BLOCK_N, rows=64, warps=8 if few_columns else 4, stages=2 if wide else 4)
    return ProductTile(outputs=2 * BLOCK_N, rows=128, warps=8, stages=3)


def tensors_of(weight: GroupedCodes) -> tuple[torch.Tensor, ...]:
    """The tensors in the order of the kernel's arguments; any other one stands for a missing one."""
    scale, minimum = weight.scale, weight.minimum or weight.scale
    return (
        weight.low,
        weight.low if weight.high is None else weight.high,
        scale.values_VO,
        scale.values_VO if scale.factors_GO is None else scale.factors_GO,
        weight.zero if isinstance(weight.zero, torch.Tensor) else weight.low,
        minimum.values_VO,
        minimum.values_VO if minimum.factors_GO is None else minimum.factors_GO,
        weight.low if weight.table is None else weight.table,
    )


def constants_of(weight: GroupedCodes, dtype: torch.dtype) -> dict[str, int | bool | str]:
    minimum, zeros, offset = (
        weight.minimum or weight.scale,
        isinstance(weight.zero, torch.Tensor),
        _offset(weight, dtype),
    )
    return {
        "PER_SCALE": weight.scale.units_per_value,
        "PER_SCALE_FACTOR": weight.scale.units_per_factor,
        "PER_ZERO": weight.units_per_zero,
        "PER_MINIMUM": minimum.units_per_value,
        "PER_MINIMUM_FACTOR": minimum.units_per_factor,
        "LOW": weight.low_bits,
        "HIGH": weight.high_bits,
        "OFFSET": offset,
        "SCALE_FACTORS": weight.scale.factors_GO is not None,
        "ZEROS": zeros,
        "MINIMUMS": weight.minimum is not None,
        "MINIMUM_FACTORS": minimum.factors_GO is not None,
        "TABLE": weight.table is not None,
        "PAIRS": _pairs_of(weight, dtype),
        "SUMS": offset != 0 or zeros or weight.minimum is not None,
        "PER_UNIT": weight.fields_per_unit,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "BLOCK": BLOCK_N,
        "H": weight.field,
    }


def grouped_product(
    x_TI: torch.Tensor,
    weight: GroupedCodes,
    bias_O: torch.Tensor | None = None,
    *,
    tile: ProductTile | None = None,
) -> torch.Tensor:
    """[T, O] in x's type: `reference.grouped_product`. A row's bits do not depend on the others' among 1 to 16 rows."""
    assert x_TI.dim() == 2, f"x is {tuple(x_TI.shape)}"
    assert x_TI.shape[1] == weight.num_inputs, f"x has {x_TI.shape[1]} inputs, the weight {weight.num_inputs}"
    assert x_TI.dtype in (torch.bfloat16, torch.float16, torch.float32), f"x is {x_TI.dtype}"
    num_rows = x_TI.shape[0]
    out_TO = torch.empty(num_rows, weight.num_outputs, dtype=x_TI.dtype, device=x_TI.device)
    if num_rows == 0:
        return out_TO
    if weight.inputs_P is not None:
        x_TI = torch.nn.functional.pad(x_TI, (0, 1)).index_select(1, weight.inputs_P)
    assert x_TI.stride(1) == 1, f"x has strides {x_TI.stride()}"
    tile = tile or grouped_tile(num_rows, x_TI.dtype, weight)
    assert tile.outputs % BLOCK_N == 0, f"tiles of {tile.outputs} outputs"
    blocks, row_blocks = triton.cdiv(weight.padded_outputs, tile.outputs), triton.cdiv(num_rows, tile.rows)
    splits, per_split = splits_of(blocks, row_blocks, weight.num_steps, weight.num_multiprocessors)
    constants = constants_of(weight, x_TI.dtype)
    summed = bool(constants["SUMS"]) and tile.rows > FEW_ROWS
    _grouped[(blocks, splits, row_blocks)](
        x_TI, *tensors_of(weight), unit_sums(x_TI, weight) if summed else out_TO, out_TO if bias_O is None else bias_O,
        out_TO, work_space(splits, blocks * tile.outputs, tile.rows, out_TO), arrivals(out_TO.device),
        num_rows, x_TI.shape[1], weight.num_outputs, weight.padded_outputs, x_TI.stride(0), weight.num_steps, per_split,
        **constants, BIAS=bias_O is not None, SUMMED=summed, SPLIT=splits > 1, N=tile.outputs, M=tile.rows,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_TO
