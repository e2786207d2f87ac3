"""Products of weights and inputs of 8 bits, int8 or fp8 (e4m3), in Triton.

int8: sums of integers on the matrix units, exact, scaled once at the end. fp8: the sum over each 128 inputs is added
in float32, as DeepSeek-V3 does, because Hopper's own sums of fp8 keep about 14 bits. It is scaled before that where
weights have scales of blocks or inputs those of groups of 128, at the end where scales are of tensors, outputs and
tokens. Cards without fp8 units (8.0) make float16 of the bytes, which is exact. Tiles and shares of sums are those of
`grouped`. Legend:
T tokens, O outputs, I inputs, N outputs of a tile, M rows of a tile, X inputs of a step, G groups of 128 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kernels.quantised.activations import RoundedInputs
from workers.kernels.quantised.grouped_codes import FEW_ROWS, ProductTile
from workers.kernels.quantised.split_sums import BLOCK_N, add_shares, arrivals, splits_of, work_space

STEP = 128  # inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCodes:
    """A weight as `_bytes` reads it: rows of the checkpoint's own bytes."""

    levels_OI: torch.Tensor  # int8 or float8_e4m3fn; uint8 with the bytes of float8_e4m3fn for cards without its units
    scale_GO: torch.Tensor  # float32; G is 1, or one for each 128 inputs
    row_sums_O: torch.Tensor | None  # int32: of int8 levels, where inputs have a zero
    num_multiprocessors: int

    @property
    def num_bytes(self) -> int:
        return self.levels_OI.nbytes + self.scale_GO.nbytes


@triton.jit
def _float16_of(bytes_NX):
    """The values of e4m3 bytes, exactly: their exponent is 8 less than float16's, also below the first normal."""
    wide_NX = bytes_NX.to(tl.int16)
    bits_NX = ((wide_NX & 0x80) << 8) | ((wide_NX & 0x7F) << 7)
    return bits_NX.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def sum_of_bytes(
    x_row_M, x_scale_M, inside_M, weight_ptr, scales_ptr, outputs_N, inside_N, first, last, num_inputs, x_scale_group,
    scale_group, INTEGERS: tl.constexpr, DECODED: tl.constexpr, ONCE: tl.constexpr, X: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Returns [N, M] from rows of levels and scales, both by address, over the steps [first, last) of a weight: int32
    or float32. With ONCE the result is not scaled yet."""
    lanes_X = tl.arange(0, X)
    weight_NX = weight_ptr + outputs_N.to(tl.int64)[:, None] * num_inputs + lanes_X[None, :]
    x_XM = x_row_M[None, :] + lanes_X[:, None]
    acc_NM = tl.zeros([N, M], tl.int32 if INTEGERS else tl.float32)
    for step in range(first, last):
        here_X = step * X + lanes_X < num_inputs
        level_NX = tl.load(weight_NX + step * X, mask=inside_N[:, None] & here_X[None, :], other=0.0)
        input_XM = tl.load(x_XM + step * X, mask=inside_M[None, :] & here_X[:, None], other=0.0)
        if INTEGERS:
            acc_NM = tl.dot(level_NX, input_XM, acc=acc_NM, out_dtype=tl.int32)
        else:
            part_NM = tl.dot(_float16_of(level_NX), input_XM) if DECODED else tl.dot(level_NX, input_XM)
            if not ONCE:
                scale_N = tl.load(scales_ptr + step * scale_group + outputs_N, mask=inside_N, other=0.0)
                scale_M = tl.load(x_scale_M + step * x_scale_group, mask=inside_M, other=0.0)
                part_NM = part_NM * scale_N[:, None] * scale_M[None, :]
            acc_NM += part_NM
    return acc_NM


@triton.jit
def scaled_once(acc_NM, x_scale_M, inside_M, scales_ptr, outputs_N, inside_N, ONCE: tl.constexpr):
    """Multiplies sums by both scales, unless they are scaled already."""
    sum_NM = acc_NM.to(tl.float32)
    if ONCE:
        scale_N = tl.load(scales_ptr + outputs_N, mask=inside_N, other=0.0)
        sum_NM = sum_NM * scale_N[:, None] * tl.load(x_scale_M, mask=inside_M, other=0.0)[None, :]
    return sum_NM


@triton.jit(do_not_specialize=["num_rows"])
def _bytes(
    x_ptr, weight_ptr, x_scales_ptr, scales_ptr, row_sums_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    num_rows, num_inputs, num_outputs, steps_per_split, x_scale_token, x_scale_group, scale_group, zero,
    INTEGERS: tl.constexpr, DECODED: tl.constexpr, ONCE: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    SPLIT: tl.constexpr, X: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    outputs_N = block * N + tl.arange(0, N)
    rows_M = tl.program_id(2) * M + tl.arange(0, M)
    inside_N, inside_M = outputs_N < num_outputs, rows_M < num_rows
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, tl.cdiv(num_inputs, X))
    x_scale_M = x_scales_ptr + rows_M * x_scale_token
    acc_NM = sum_of_bytes(
        x_ptr + rows_M.to(tl.int64) * num_inputs, x_scale_M, inside_M, weight_ptr, scales_ptr, outputs_N, inside_N,
        first, last, num_inputs, x_scale_group, scale_group, INTEGERS, DECODED, ONCE, X, N, M)  # fmt: skip
    if SPLIT:
        is_last, acc_NM = add_shares(acc_NM, partial_ptr, arrived_ptr, block, tl.num_programs(0), N, M)
        if not is_last:
            return
    if ZERO:
        acc_NM -= zero * tl.load(row_sums_ptr + outputs_N, mask=inside_N, other=0)[:, None]
    sum_NM = scaled_once(acc_NM, x_scale_M, inside_M, scales_ptr, outputs_N, inside_N, ONCE)
    if BIAS:
        sum_NM += tl.load(bias_ptr + outputs_N, mask=inside_N, other=0.0).to(tl.float32)[:, None]
    written_NM = rows_M.to(tl.int64)[None, :] * num_outputs + outputs_N[:, None]
    tl.store(out_ptr + written_NM, sum_NM.to(out_ptr.dtype.element_ty), mask=inside_N[:, None] & inside_M[None, :])


def byte_tile(num_rows: int, *, decoded: bool = False) -> ProductTile:
    """Few rows: 8 KiB of weights a stage, three under way in each of three programs on a multiprocessor. Many rows:
    128 x 128 on two of Hopper's warpgroups; three stages (96 KiB) fit the 99 KiB of 8.6 and 8.9. Decoded
    bytes leave registers for half a tile. Chosen by reasoning,
    not measured yet."""
    if num_rows <= FEW_ROWS:
        return ProductTile(outputs=BLOCK_N, rows=FEW_ROWS, warps=4, stages=4)
    if num_rows <= 256 or decoded:
        return ProductTile(outputs=BLOCK_N, rows=64, warps=4, stages=4)
    return ProductTile(outputs=2 * BLOCK_N, rows=128, warps=8, stages=3)


def _check(x: RoundedInputs, weight: ByteCodes) -> None:
    levels_TI, scale_TG, num_inputs = x.levels_TI, x.scale_TG, x.levels_TI.shape[1]
    integers, decoded = weight.levels_OI.dtype == torch.int8, weight.levels_OI.dtype == torch.uint8
    wanted = torch.int8 if integers else torch.float16 if decoded else torch.float8_e4m3fn
    assert levels_TI.dtype == wanted, f"levels of x are {levels_TI.dtype}, of the weight {weight.levels_OI.dtype}"
    assert weight.levels_OI.shape[1] == num_inputs, f"x has {num_inputs} inputs, {tuple(weight.levels_OI.shape)}"
    assert len(scale_TG) == len(levels_TI), f"{len(scale_TG)} scales of {len(levels_TI)} rows"
    assert scale_TG.is_contiguous(), f"scales of x have strides {scale_TG.stride()}"
    assert levels_TI.is_contiguous(), f"levels of x have strides {levels_TI.stride()}"
    assert weight.levels_OI.is_contiguous(), f"levels of the weight have strides {weight.levels_OI.stride()}"
    groups = triton.cdiv(num_inputs, STEP)
    for name, count in (("x", scale_TG.shape[1]), ("the weight", len(weight.scale_GO))):
        assert count in (1,) if integers else count in (1, groups), f"{name} has {count} scales of {groups} groups"


def byte_product(
    x: RoundedInputs,
    weight: ByteCodes,
    bias_O: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    zero: int = 0,
    tile: ProductTile | None = None,
) -> torch.Tensor:
    """[T, O] in `dtype`: `reference.byte_product`. Sums of int8 are exact, so that a row has the same bits in every
    batch; those of fp8 have them among 1 to 16 rows. `zero` is what the inputs' levels have too much."""
    levels_TI, scale_TG = x.levels_TI, x.scale_TG
    (num_rows, num_inputs), num_outputs = levels_TI.shape, weight.levels_OI.shape[0]
    integers = weight.levels_OI.dtype == torch.int8
    decoded = weight.levels_OI.dtype == torch.uint8
    _check(x, weight)
    assert zero == 0 or weight.row_sums_O is not None, "inputs with a zero need the weight's row sums"
    out_TO = torch.empty(num_rows, num_outputs, dtype=dtype, device=levels_TI.device)
    if num_rows == 0:
        return out_TO
    groups = triton.cdiv(num_inputs, STEP)
    tile = tile or byte_tile(num_rows, decoded=decoded)
    blocks, row_blocks = triton.cdiv(num_outputs, tile.outputs), triton.cdiv(num_rows, tile.rows)
    splits, per_split = splits_of(blocks, row_blocks, groups, weight.num_multiprocessors)
    partial = work_space(splits, blocks * tile.outputs, tile.rows, out_TO)
    _bytes[(blocks, splits, row_blocks)](
        levels_TI,
        weight.levels_OI,
        scale_TG,
        weight.scale_GO,
        weight.scale_GO if weight.row_sums_O is None else weight.row_sums_O,
        out_TO if bias_O is None else bias_O,
        out_TO,
        partial.view(torch.int32) if integers else partial,
        arrivals(out_TO.device),
        num_rows,
        num_inputs,
        num_outputs,
        per_split,
        scale_TG.shape[1],
        1 if scale_TG.shape[1] > 1 else 0,
        num_outputs if len(weight.scale_GO) > 1 else 0,
        zero,
        INTEGERS=integers,
        DECODED=decoded,
        ONCE=integers or (len(weight.scale_GO) == 1 and scale_TG.shape[1] == 1),
        ZERO=zero != 0,
        BIAS=bias_O is not None,
        SPLIT=splits > 1,
        X=STEP,
        N=tile.outputs,
        M=tile.rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_TO
