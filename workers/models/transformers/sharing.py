"""How several ranks share a model of transformers: by the plan that transformers has for it (`_tp_plan`).

colwise, rowwise, packed_colwise        a linear layer's outputs, inputs, or outputs of both halves
the same for a parameter of experts     columns of each expert; the ranks' outputs are added up (moe_tp_experts)
colwise_gather_output, rowwise_split_input   the layer is cut, what goes in and out is whole
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from workers.models.transformers.transformers_config import AttentionCall
from workers.models.transformers.transformers_linear import (
    COLUMNS,
    COLUMNS_GATHERED,
    PACKED_COLUMNS,
    ROWS,
    ROWS_OF_WHOLE,
    MatrixLinear,
)
from workers.parallel.group import TensorParallel
from workers.weights.encoding import LayerContext

_WHOLE = frozenset({
    "", "embedding_rowwise", "embedding_colwise", "local_params", "mla_kv_a_proj", "replicate",
    "replicated_with_grad_allreduce",
})  # fmt: skip
"""Styles for which every rank has all: embeddings are small beside the layers, the others are about gradients."""
_SUMMED = "moe_tp_experts"
_OPTIONAL = COLUMNS_GATHERED + ROWS_OF_WHOLE  # a layer that is not cut gives the same


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCut:
    """A rank's part of dimension `dim` of a parameter, taken from each of its `halves`."""

    dim: int
    halves: int

    def size(self, whole: torch.Tensor) -> int:
        return whole.shape[self.dim] // self.halves

    def of(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        parts = [half.chunk(size, dim=self.dim)[rank] for half in whole.chunk(self.halves, dim=self.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


class CannotShare(Exception):
    """Why several ranks cannot share a model."""


def style_of(plan: Mapping[str, str], name: str) -> str:
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return ""


def plan_of(model: Any) -> Mapping[str, str]:
    """By module or parameter, `*` for the number of a layer. Raises CannotShare."""
    plan = getattr(model, "_tp_plan", None) or {}
    if not any(style in COLUMNS + ROWS + PACKED_COLUMNS + _OPTIONAL for style in plan.values()):
        raise CannotShare("transformers has no plan to share this architecture over ranks")
    styles_served = _WHOLE | {_SUMMED, *COLUMNS, *ROWS, *PACKED_COLUMNS, *_OPTIONAL}
    if unknown := sorted(set(plan.values()) - styles_served):
        raise CannotShare(f"transformers' plan to share it has {', '.join(unknown)}, which Baton does not have")
    return plan


def unit_of(model: Any, calls: Collection[AttentionCall], linears: Collection[str]) -> int:
    """The number that the number of ranks must divide. `linears` can be cut. Raises CannotShare."""
    plan = plan_of(model)
    unit = gcd(*(call.num_heads for call in calls), *(call.num_kv_heads for call in calls))
    for name, module in model.named_modules():
        style = style_of(plan, name)
        if style in _WHOLE or style == _SUMMED:
            continue
        if name not in linears:
            if style in _OPTIONAL:
                continue
            raise CannotShare(f"{name} is to be shared, and is no linear layer of its own")
        unit = gcd(unit, _cut_of(style, module.weight).size(module.weight))
    for name, cut in parameter_cuts(model).items():
        unit = gcd(unit, cut.size(model.get_parameter(name)))
    return unit


def parameter_cuts(model: Any) -> dict[str, ParameterCut]:
    """Cuts of the experts' parameters, which the plan names."""
    plan = plan_of(model)
    styles = {}
    for name, parameter in model.named_parameters():
        style = style_of(plan, name)
        if style not in _WHOLE:
            styles[name] = _cut_of(style, parameter)
    return styles


def _cut_of(style: str, parameter: torch.Tensor) -> ParameterCut:
    if style in PACKED_COLUMNS:
        return ParameterCut(dim=max(parameter.dim() - 2, 0), halves=2)
    if style in ROWS + ROWS_OF_WHOLE:
        return ParameterCut(dim=parameter.dim() - 1, halves=1)
    if style in COLUMNS + COLUMNS_GATHERED:
        return ParameterCut(dim=max(parameter.dim() - 2, 0), halves=1)
    raise CannotShare(f"{style} is for modules, and the plan has it for a parameter")


def replace_linears(model: Any, context: LayerContext, names: Collection[str], styles: Mapping[str, str]) -> None:
    """Puts a MatrixLinear in place of each named linear layer."""
    for name in names:
        old = model.get_submodule(name)
        outputs, inputs = old.weight.shape
        new = MatrixLinear(context, name, inputs, outputs, bias=old.bias is not None, style=styles.get(name, ""))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new.train(old.training))


def sum_experts(model: Any, parallel: TensorParallel) -> None:
    """Adds up, over the ranks, outputs of experts that are cut by columns."""
    plan = plan_of(model)
    for name, module in model.named_modules():
        if style_of(plan, name) == _SUMMED:
            module.register_forward_hook(lambda module, inputs, output: parallel.all_reduce(output.contiguous()))
