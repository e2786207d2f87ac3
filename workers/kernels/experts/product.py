"""Grouped products of experts in Triton: each tile of rows is multiplied with the weight of its own expert.

Weights lie where they were loaded; the kernel takes a table of their addresses. Rows are gathered by index
(`alignment`) and written to the places of their pairs, so that another kernel sums a token's slots in their order.

Legend: T tokens, S slots, P = T * S pairs, E hidden size, F expert size, X experts, O outputs, I inputs; M rows, N
outputs and K inputs of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kernels.experts.alignment import aligned_pairs

_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTile:
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# Few rows of an expert are bound by its bytes: 16 rows are the least that the matrix units take, and four stages of
# 16 KiB keep loads under way. Many rows reuse what is loaded. Chosen by reasoning, not measured yet.
_FEW_ROWS = ExpertTile(rows=16, outputs=64, inputs=128, warps=4, stages=4)
_MANY_ROWS = ExpertTile(rows=64, outputs=128, inputs=64, warps=8, stages=3)


@triton.jit
def _expert_product(
    x_ptr, weights_ptr, biases_ptr, pairs_ptr, experts_ptr, out_ptr,
    num_pairs, slots, num_experts, num_inputs, num_outputs, x_stride,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one expert, and of outputs. A pair reads row pair // slots of x."""
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert >= num_experts:
        return
    address = tl.load(weights_ptr + expert)
    if address == 0:  # another rank has it
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


@triton.jit
def _sum_of_slots(made_ptr, chosen_ptr, weights_ptr, table_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    """A token's slots in their order, those of other ranks left out."""
    token = tl.program_id(0).to(tl.int64)
    columns_E = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_E = columns_E < size
    sum_E = tl.zeros([BLOCK], tl.float32)
    for slot in range(slots):
        pair = token * slots + slot
        owned = tl.load(table_ptr + tl.load(chosen_ptr + pair)) != 0
        weight = tl.load(weights_ptr + pair)
        made_E = tl.load(made_ptr + pair * size + columns_E, mask=inside_E & owned, other=0.0)
        sum_E += weight * made_E.to(tl.float32)
    tl.store(out_ptr + token * size + columns_E, sum_E, mask=inside_E)


class GroupedExperts:
    """The experts of a layer that this rank has, by their ids: weights [2 F, E] of gate and up, [E, F] of down, and
    their biases if they have any. Contiguous, of one type, and kept."""

    def __init__(
        self,
        gate_up: Mapping[int, torch.Tensor],
        down: Mapping[int, torch.Tensor],
        gate: Callable[[torch.Tensor], torch.Tensor],
        *,
        num_experts: int,
        gate_up_biases: Mapping[int, torch.Tensor] | None = None,
        down_biases: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        for weight in (*gate_up.values(), *down.values()):
            assert weight.is_contiguous(), f"an expert's weight has strides {weight.stride()}"
            assert weight.data_ptr() % 16 == 0, "an expert's weight is not aligned to 16 bytes"
        self._kept = gate_up, down, gate_up_biases, down_biases
        self._num_experts = num_experts
        self._gate = gate
        self._partial = len(gate_up) < num_experts
        first = next(iter(gate_up.values()))
        self._gate_up_size, self._down_size = first.shape[0], first.shape[1]
        self._gate_up, self._down = _addresses(gate_up, num_experts), _addresses(down, num_experts)
        self._biases = tuple(
            _addresses(biases, num_experts) if biases else None for biases in (gate_up_biases, down_biases)
        )

    def __call__(self, x_TE: torch.Tensor, chosen_TS: torch.Tensor, weights_TS: torch.Tensor) -> torch.Tensor:
        """[T, E], float32: the sum of each token's experts, by the weights of its slots."""
        (num_tokens, slots), x_TE = chosen_TS.shape, x_TE.contiguous()
        out_TE = torch.empty(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        if not num_tokens:
            return out_TE
        chosen_P = chosen_TS.flatten()
        tile = _FEW_ROWS if len(chosen_P) <= 16 * self._num_experts else _MANY_ROWS
        index = aligned_pairs(chosen_P, self._num_experts, tile.rows)
        wide_P2F = _multiply(
            x_TE, slots, self._gate_up, self._biases[0], index, self._gate_up_size, tile, partial=self._partial
        )
        made_PE = _multiply(
            self._gate(wide_P2F), 1, self._down, self._biases[1], index, self._down_size, tile, partial=self._partial
        )
        size = self._down_size
        _sum_of_slots[(num_tokens, triton.cdiv(size, _BLOCK))](
            made_PE, chosen_P, weights_TS.contiguous(), self._down, out_TE, slots, size, BLOCK=_BLOCK, num_warps=4
        )
        return out_TE


def _multiply(
    x: torch.Tensor,
    slots: int,
    weights_X: torch.Tensor,
    biases_X: torch.Tensor | None,
    index: Sequence[torch.Tensor],
    num_outputs: int,
    tile: ExpertTile,
    *,
    partial: bool,
) -> torch.Tensor:
    """[P, O]: of pair p the row p // slots of x, times its expert's weight; 0 where another rank has the expert."""
    pairs, experts_B = index
    num_pairs = x.shape[0] * slots
    make = torch.zeros if partial else torch.empty
    out_PO = make(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    _expert_product[(len(experts_B), triton.cdiv(num_outputs, tile.outputs))](
        x, weights_X, weights_X if biases_X is None else biases_X, pairs, experts_B, out_PO,
        num_pairs, slots, len(weights_X), x.shape[1], num_outputs, x.stride(0),
        BIAS=biases_X is not None, M=tile.rows, N=tile.outputs, K=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_PO


def _addresses(tensors: Mapping[int, torch.Tensor], num_experts: int) -> torch.Tensor:
    """int64 [X]; 0 where this rank has no such expert."""
    device = next(iter(tensors.values())).device
    return torch.tensor([tensors[one].data_ptr() if one in tensors else 0 for one in range(num_experts)], device=device)
