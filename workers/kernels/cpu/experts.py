"""A mixture of experts as one weight of compiled code (experts.cpp): a table of the experts' packed products, of any
encodings.

Legend: T tokens, E = I hidden size, X experts, R rows of the router: X, and one more where the shared expert has a
gate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from workers.kernels.cpu.native_build import address_of, native, pointers
from workers.kernels.cpu.products import PackedProduct, PanelProduct, ProductPart, ProductParts, panel_order, parts_of
from workers.kernels.cpu.regions import roomy_zeros

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class RouterScores(IntEnum):
    """`Scoring` in routing.h."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProducts:
    """The products of one expert: gate and up, and down. The layer applies a gate that `gate_up` does not."""

    gate_up: PackedProduct
    down: PackedProduct


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """`Rule` in routing.h; `bias_X` and `correction_X` are float32."""

    num_experts: int
    num_chosen: int
    scores: RouterScores
    renormalised: bool
    epsilon: float
    factor: float
    num_groups: int
    num_chosen_groups: int
    by_two: bool  # a group's score is the sum of its two highest, not the highest
    bias_X: torch.Tensor | None = None
    correction_X: torch.Tensor | None = None


class _PackedExpert(ctypes.Structure):
    _fields_ = (("gate_up", ProductParts), ("down", ProductParts))


class _RoutingRule(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("num_experts", "num_chosen", "scoring", "renormalised", "num_groups",
                                  "num_chosen_groups", "by_two")),
        ("epsilon", _F), ("factor", _F), ("bias", _P), ("correction", _P),
    )  # fmt: skip


class _Experts(ctypes.Structure):
    _fields_ = (
        ("router", ctypes.POINTER(ProductPart)), ("experts", ctypes.POINTER(_PackedExpert)), ("shared", _PackedExpert),
        ("rule", _RoutingRule),
        *((name, _N) for name in ("hidden_size", "width", "shared_width", "depth", "shared_gated", "is_clamped")),
        ("alpha", _F), ("limit", _F), ("counts", _P),
    )  # fmt: skip


class PackedExperts(PanelProduct):
    """The feed-forward half of a layer as a `PackedWeight`: [T, E] to [T, E]. `router_RE` is packed, and not kept.

    `counts_X` int64 counts the tokens that chose each expert. `experts` has those of this rank, by their ids.
    """

    def __init__(
        self,
        router_RE: torch.Tensor,
        rule: RouterRule,
        experts: Mapping[int, ExpertProducts],
        *,
        width: int,
        shared: ExpertProducts | None = None,
        shared_width: int = 0,
        clamped: tuple[float, float] | None = None,
        counts_X: torch.Tensor,
    ) -> None:
        kernels = native(router_RE.dtype)
        assert kernels is not None
        self.num_outputs = self._num_inputs = router_RE.shape[1]
        self._dtype, self._gated, self._multiply = router_RE.dtype, False, kernels.multiply_experts
        self._kept: list[object] = [rule, counts_X, experts, shared]  # the structures hold only their addresses
        table = (_PackedExpert * rule.num_experts)()
        for expert, products in experts.items():
            table[expert] = self._expert(products)
        self._table = _Experts(
            router=ctypes.pointer(self._router(router_RE)),
            experts=table,
            rule=self._rule(rule),
            hidden_size=self._num_inputs,
            width=width,
            shared_width=shared_width,
            shared_gated=len(router_RE) > rule.num_experts,
            is_clamped=clamped is not None,
            counts=counts_X.data_ptr(),
        )
        if clamped is not None:
            self._table.alpha, self._table.limit = clamped
        self.depth = self._num_inputs
        if shared is not None:
            self._table.shared = self._expert(shared)
            self.depth = max(self.depth, shared.gate_up.weight.depth)
        self._kept.append(table)

    def parts(self, bias_O: torch.Tensor | None = None) -> Sequence[ProductPart]:
        assert bias_O is None, "experts have their own biases"
        return [self._part(ctypes.addressof(self._table))]

    def _router(self, router_RE: torch.Tensor) -> ProductPart:
        kernels = native(router_RE.dtype)
        assert kernels is not None
        group = 4 // router_RE.itemsize
        depth = -(-self._num_inputs // group) * group
        order = panel_order(len(router_RE))
        packed = roomy_zeros(len(order), depth, dtype=router_RE.dtype)
        rows = torch.nn.functional.pad(router_RE, (0, depth - self._num_inputs)).contiguous()
        kernels.pack(*pointers(rows, packed, order), len(order), depth, torch.get_num_threads())
        self._kept.append(packed)
        return ProductPart(
            multiply=address_of(kernels.multiply_router),
            packed=packed.data_ptr(),
            num_outputs=len(router_RE),
            num_inputs=depth,
        )

    def _rule(self, rule: RouterRule) -> _RoutingRule:
        bias, correction = pointers(rule.bias_X, rule.correction_X)
        return _RoutingRule(
            num_experts=rule.num_experts, num_chosen=rule.num_chosen, scoring=rule.scores,
            renormalised=rule.renormalised, num_groups=rule.num_groups, num_chosen_groups=rule.num_chosen_groups,
            by_two=rule.by_two, epsilon=rule.epsilon, factor=rule.factor,
            bias=bias, correction=correction,
        )  # fmt: skip

    def _expert(self, products: ExpertProducts) -> _PackedExpert:
        return _PackedExpert(gate_up=self._product(products.gate_up), down=self._product(products.down))

    def _product(self, product: PackedProduct) -> ProductParts:
        parts = parts_of(product)
        self._kept.append(parts)
        return ProductParts(parts=parts, num_parts=len(parts))
