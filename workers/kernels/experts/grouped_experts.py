"""The sum of each token's experts in Triton: each tile of rows is multiplied with the weight of its own expert.

Weights lie where they were loaded; a kernel takes a table of their addresses. Rows are gathered by index (`alignment`)
and written to the places of their pairs, so that another kernel sums a token's slots in their order. Gate and up may
have another encoding than down: floating point (`floats`), codes in groups (`codes`), or bytes (`bytes8`).

Legend: T tokens, S slots, P = T * S pairs, E hidden size, F expert size, X experts, B tiles, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import triton
import triton.language as tl

from workers.kernels.device_kernels import ExpertWeight
from workers.kernels.experts.address_tables import addresses
from workers.kernels.experts.alignment import ExpertTiles
from workers.kernels.experts.bytes8 import ByteExperts
from workers.kernels.experts.codes import CodeExperts
from workers.kernels.experts.floats import FloatExperts
from workers.kernels.quantised.product_choice import ByteProduct, GroupedProduct

_BLOCK = 1024


class ExpertMatrices(Protocol):
    """One linear layer of all experts of this rank."""

    num_outputs: int
    device: torch.device

    def multiply(
        self, x: torch.Tensor, slots: int, tiles: ExpertTiles, biases_X: torch.Tensor | None, out_PO: torch.Tensor
    ) -> None:
        """Writes for pair p the row p // slots of x times its expert's weight, plus the expert's bias. Pairs of another
        rank's experts stay as they are."""
        ...


@triton.jit
def _sum_of_slots(made_ptr, chosen_ptr, weights_ptr, present_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns_E = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_E = columns_E < size
    sum_E = tl.zeros([BLOCK], tl.float32)
    for slot in range(slots):
        pair = token * slots + slot
        owned = tl.load(present_ptr + tl.load(chosen_ptr + pair)) != 0
        weight = tl.load(weights_ptr + pair)
        made_E = tl.load(made_ptr + pair * size + columns_E, mask=inside_E & owned, other=0.0)
        sum_E += weight * made_E.to(tl.float32)
    tl.store(out_ptr + token * size + columns_E, sum_E, mask=inside_E)


class GroupedExperts:
    """This rank's experts of a layer: [2 F, E] of gate and up, [E, F] of down, and their biases by ids."""

    def __init__(
        self,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        gate: Callable[[torch.Tensor], torch.Tensor],
        *,
        present_X: torch.Tensor,
        partial: bool,
        gate_up_biases: Mapping[int, torch.Tensor] | None = None,
        down_biases: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self._present_X, self._partial = present_X, partial
        self._kept = gate_up_biases, down_biases
        self._biases = tuple(
            addresses(biases, len(present_X)) if biases else None for biases in (gate_up_biases, down_biases)
        )

    def __call__(self, x_TE: torch.Tensor, chosen_TS: torch.Tensor, weights_TS: torch.Tensor) -> torch.Tensor:
        """[T, E], float32: the sum of each token's experts, by the weights of its slots."""
        (num_tokens, slots), x_TE = chosen_TS.shape, x_TE.contiguous()
        out_TE = torch.empty(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        if not num_tokens:
            return out_TE
        chosen_P = chosen_TS.flatten()
        tiles = ExpertTiles.of(chosen_P, len(self._present_X))
        wide_P2F = self._product(self._gate_up, x_TE, slots, tiles, self._biases[0])
        made_PE = self._product(self._down, self._gate(wide_P2F), 1, tiles, self._biases[1])
        size = self._down.num_outputs
        _sum_of_slots[(num_tokens, triton.cdiv(size, _BLOCK))](
            made_PE, chosen_P, weights_TS.contiguous(), self._present_X, out_TE, slots, size, BLOCK=_BLOCK, num_warps=4
        )
        return out_TE

    def _product(
        self, matrices: ExpertMatrices, x: torch.Tensor, slots: int, tiles: ExpertTiles, biases_X: torch.Tensor | None
    ) -> torch.Tensor:
        """[P, O], in x's type; 0 where another rank has the expert."""
        make = torch.zeros if self._partial else torch.empty
        out_PO = make(x.shape[0] * slots, matrices.num_outputs, dtype=x.dtype, device=x.device)
        matrices.multiply(x, slots, tiles, biases_X, out_PO)
        return out_PO


def grouped_experts(
    gate_up: Mapping[int, ExpertWeight],
    down: Mapping[int, ExpertWeight],
    gate: Callable[[torch.Tensor], torch.Tensor],
    *,
    num_experts: int,
    gate_up_biases: Mapping[int, torch.Tensor] | None = None,
    down_biases: Mapping[int, torch.Tensor] | None = None,
) -> GroupedExperts | None:
    """Returns None for weights without a kernel: experts of several forms, and plain floats on torch."""
    first, second = _matrices(gate_up, num_experts), _matrices(down, num_experts)
    if first is None or second is None:
        return None
    present = [int(expert in gate_up) for expert in range(num_experts)]
    return GroupedExperts(
        first,
        second,
        gate,
        present_X=torch.tensor(present, device=first.device),
        partial=len(gate_up) < num_experts,
        gate_up_biases=gate_up_biases,
        down_biases=down_biases,
    )


def _matrices(weights: Mapping[int, ExpertWeight], num_experts: int) -> ExpertMatrices | None:
    floats = {expert: weight for expert, weight in weights.items() if isinstance(weight, torch.Tensor)}
    codes = {expert: weight.codes for expert, weight in weights.items() if isinstance(weight, GroupedProduct)}
    levels = {expert: weight for expert, weight in weights.items() if isinstance(weight, ByteProduct)}
    if floats and len(floats) == len(weights):
        return FloatExperts(floats, num_experts=num_experts)
    if codes and len(codes) == len(weights):
        return CodeExperts.of(codes, num_experts=num_experts)
    if levels and len(levels) == len(weights):
        return ByteExperts.of(levels, num_experts=num_experts)
    return None
