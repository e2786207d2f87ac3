"""Grouped products of experts whose weights and inputs have 8 bits, int8 or e4m3 (`quantised.one_byte`), in Triton.

A token's inputs are rounded once for all of its experts, before they are gathered. Legend as in `product`, and: G
groups of 128 inputs, M rows and N outputs of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from workers.kernels.experts.address_tables import addresses, aligned
from workers.kernels.experts.alignment import ExpertTiles
from workers.kernels.quantised.one_byte import STEP, byte_tile, scaled_once, sum_of_bytes
from workers.kernels.quantised.product_choice import ByteProduct


@triton.jit(do_not_specialize=["num_pairs"])
def _byte_experts(
    x_ptr, x_scales_ptr, weights_ptr, scales_ptr, biases_ptr, pairs_ptr, experts_ptr, like_ptr, out_ptr,
    num_pairs, slots, num_experts, num_inputs, num_outputs, x_scale_token, x_scale_group, scale_group,
    INTEGERS: tl.constexpr, DECODED: tl.constexpr, ONCE: tl.constexpr, BIAS: tl.constexpr,
    X: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert >= num_experts:
        return
    address = tl.load(weights_ptr + expert)
    if address == 0:  # an expert of another rank
        return
    weight_ptr = tl.multiple_of(address.to(like_ptr.dtype), 16)
    scale_ptr = tl.multiple_of(tl.load(scales_ptr + expert).to(x_scales_ptr.dtype), 16)
    outputs_N = tl.program_id(1) * N + tl.arange(0, N)
    pairs_M = tl.load(pairs_ptr + tile * M + tl.arange(0, M))
    inside_M, inside_N, rows_M = pairs_M < num_pairs, outputs_N < num_outputs, pairs_M // slots
    x_scale_M = x_scales_ptr + rows_M * x_scale_token
    acc_NM = sum_of_bytes(
        x_ptr + rows_M.to(tl.int64) * num_inputs, x_scale_M, inside_M, weight_ptr, scale_ptr, outputs_N, inside_N, 0,
        tl.cdiv(num_inputs, X), num_inputs, x_scale_group, scale_group, INTEGERS, DECODED, ONCE, X, N, M)  # fmt: skip
    sum_NM = scaled_once(acc_NM, x_scale_M, inside_M, scale_ptr, outputs_N, inside_N, ONCE)
    if BIAS:
        bias_ptr = tl.load(biases_ptr + expert).to(out_ptr.dtype)
        sum_NM += tl.load(bias_ptr + outputs_N, mask=inside_N, other=0.0).to(tl.float32)[:, None]
    out_NM = out_ptr + pairs_M.to(tl.int64)[None, :] * num_outputs + outputs_N[:, None]
    tl.store(out_NM, sum_NM.to(out_ptr.dtype.element_ty), mask=inside_M[None, :] & inside_N[:, None])


class ByteExperts:
    def __init__(self, products: Mapping[int, ByteProduct], *, num_experts: int) -> None:
        self._product = first = next(iter(products.values()))
        self.num_outputs, self.device = first.codes.levels_OI.shape[0], first.codes.levels_OI.device
        self._levels = {expert: aligned(product.codes.levels_OI) for expert, product in products.items()}
        self._scales = {expert: aligned(product.codes.scale_GO) for expert, product in products.items()}
        self._levels_X, self._scales_X = addresses(self._levels, num_experts), addresses(self._scales, num_experts)

    @classmethod
    def of(cls, products: Mapping[int, ByteProduct], *, num_experts: int) -> ByteExperts | None:
        """Returns None for weights of several forms, and for inputs with a stored scale per expert."""
        codes = [product.codes for product in products.values()]
        forms = {(product.levels_OI.dtype, *product.levels_OI.shape, *product.scale_GO.shape) for product in codes}
        roundings = {product.rounding for product in products.values()}
        alike = len(forms) == len(roundings) == 1 and next(iter(roundings)).scale is None
        return cls(products, num_experts=num_experts) if alike else None

    def multiply(
        self, x: torch.Tensor, slots: int, tiles: ExpertTiles, biases_X: torch.Tensor | None, out_PO: torch.Tensor
    ) -> None:
        levels_OI, scale_GO = self._product.codes.levels_OI, self._product.codes.scale_GO
        num_inputs = levels_OI.shape[1]
        assert x.shape[1] == num_inputs, f"x has {x.shape[1]} inputs, the experts {num_inputs}"
        rounded, decoded = self._product.rounded(x), levels_OI.dtype == torch.uint8
        tile, experts_B = byte_tile(tiles.rows, decoded=decoded), tiles.experts_B
        once = levels_OI.dtype == torch.int8 or (len(scale_GO) == 1 and rounded.scale_TG.shape[1] == 1)
        _byte_experts[(len(experts_B), triton.cdiv(self.num_outputs, tile.outputs))](
            rounded.levels_TI, rounded.scale_TG, self._levels_X, self._scales_X,
            self._levels_X if biases_X is None else biases_X, tiles.pairs, experts_B, levels_OI, out_PO,
            len(out_PO), slots, len(self._levels_X), num_inputs, self.num_outputs, rounded.scale_TG.shape[1],
            1 if rounded.scale_TG.shape[1] > 1 else 0, self.num_outputs if len(scale_GO) > 1 else 0,
            INTEGERS=levels_OI.dtype == torch.int8, DECODED=decoded, ONCE=once, BIAS=biases_X is not None,
            X=STEP, N=tile.outputs, M=tiles.rows, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
