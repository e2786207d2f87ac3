"""Grouped products of experts in floating point, in Triton. Legend as in `product`, and: M rows, N outputs and K inputs
of a tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kernels.experts.address_tables import addresses, aligned
from workers.kernels.experts.alignment import FEW_ROWS, ExpertTiles


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    outputs: int
    inputs: int  # of two bytes; half as many of four
    warps: int
    stages: int


# Few rows of an expert are bound by its bytes: four stages of 16 KiB keep loads under way. Many rows reuse what is
# loaded. Chosen by reasoning, not measured yet.
_FEW = _Tile(outputs=64, inputs=128, warps=4, stages=4)
_MANY = _Tile(outputs=128, inputs=64, warps=8, stages=3)


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_product(
    x_ptr, weights_ptr, biases_ptr, pairs_ptr, experts_ptr, out_ptr,
    num_pairs, slots, num_experts, num_inputs, num_outputs, x_stride,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert >= num_experts:
        return
    address = tl.load(weights_ptr + expert)
    if address == 0:  # an expert of another rank
        return
    weight_ptr = tl.multiple_of(address.to(x_ptr.dtype), 16)
    outputs_N, lanes_K = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, K)
    pairs_M = tl.load(pairs_ptr + tile * M + tl.arange(0, M))
    inside_M, inside_N = pairs_M < num_pairs, outputs_N < num_outputs
    x_MK = x_ptr + ((pairs_M // slots).to(tl.int64)[:, None] * x_stride + lanes_K[None, :])
    weight_KN = weight_ptr + (outputs_N.to(tl.int64)[None, :] * num_inputs + lanes_K[:, None])
    acc_MN = tl.zeros([M, N], tl.float32)
    for first in range(0, num_inputs, K):
        here_K = first + lanes_K < num_inputs
        input_MK = tl.load(x_MK + first, mask=inside_M[:, None] & here_K[None, :], other=0.0)
        part_KN = tl.load(weight_KN + first, mask=here_K[:, None] & inside_N[None, :], other=0.0)
        acc_MN = tl.dot(input_MK, part_KN, acc=acc_MN, input_precision="ieee")
    if BIAS:
        bias_ptr = tl.load(biases_ptr + expert).to(x_ptr.dtype)
        acc_MN += tl.load(bias_ptr + outputs_N, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    out_MN = out_ptr + pairs_M.to(tl.int64)[:, None] * num_outputs + outputs_N[None, :]
    tl.store(out_MN, acc_MN.to(out_ptr.dtype.element_ty), mask=inside_M[:, None] & inside_N[None, :])


class FloatExperts:
    """Weights [O, I] by their ids, contiguous and of one type."""

    def __init__(self, weights: Mapping[int, torch.Tensor], *, num_experts: int) -> None:
        for weight in weights.values():
            assert weight.is_contiguous(), f"an expert's weight has strides {weight.stride()}"
        self._kept = {expert: aligned(weight) for expert, weight in weights.items()}
        first = next(iter(weights.values()))
        (self.num_outputs, self._num_inputs), self.device = first.shape, first.device
        self._addresses_X = addresses(self._kept, num_experts)

    def multiply(
        self, x: torch.Tensor, slots: int, tiles: ExpertTiles, biases_X: torch.Tensor | None, out_PO: torch.Tensor
    ) -> None:
        assert x.shape[1] == self._num_inputs, f"x has {x.shape[1]} inputs, the experts {self._num_inputs}"
        tile = _FEW if tiles.rows == FEW_ROWS else _MANY
        weights_X = self._addresses_X
        _expert_product[(len(tiles.experts_B), triton.cdiv(self.num_outputs, tile.outputs))](
            x, weights_X, weights_X if biases_X is None else biases_X, tiles.pairs, tiles.experts_B, out_PO,
            len(out_PO), slots, len(weights_X), x.shape[1], self.num_outputs, x.stride(0),
            BIAS=biases_X is not None, M=tiles.rows, N=tile.outputs, K=tile.inputs * 2 // x.element_size(),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
