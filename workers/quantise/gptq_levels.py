"""GPTQ (https://arxiv.org/abs/2210.17323): inputs are rounded one after the other, and the error of each is compensated
in those that are not rounded yet, as the second moments of the layer's inputs tell.

Scales are those of rounding to nearest, and inputs with the largest second moment are rounded first: nothing of that
order is left in the stored weight. Legend: O outputs, I inputs, G groups, T tokens.
"""

from __future__ import annotations

import torch

from protos.errors import Misconfigured
from workers.weights.group_rounding import GroupRounding

_BLOCK = 128  # inputs whose errors one product compensates in the others
_DAMPING = (0.01, 0.1, 1.0)  # of the mean second moment, the next where the matrix is still not positive definite


class SecondMoments:
    """Sum of x x^T over the inputs of a layer."""

    def __init__(self, num_inputs: int) -> None:
        self.moments_II = torch.zeros(num_inputs, num_inputs)

    def add(self, x_TI: torch.Tensor) -> None:
        self.moments_II.addmm_(x_TI.T, x_TI)


def gptq_levels(
    weight_OI: torch.Tensor, moments_II: torch.Tensor, rounding: GroupRounding, scale_OG: torch.Tensor
) -> torch.Tensor:
    """Levels [O, I], float32, of the weight for these scales."""
    num_inputs = weight_OI.shape[1]
    order_I = moments_II.diagonal().argsort(descending=True)
    factor_II = _inverse_factor(moments_II[order_I][:, order_I])
    weight_OI = weight_OI.float()[:, order_I]
    scale_OI = rounding.spread(scale_OG, num_inputs)[:, order_I]
    levels_OI = torch.empty_like(weight_OI)
    for start in range(0, num_inputs, _BLOCK):
        stop = min(start + _BLOCK, num_inputs)
        errors_OB = torch.empty_like(weight_OI[:, start:stop])
        for column in range(start, stop):
            w_O, scale_O, row_I = weight_OI[:, column], scale_OI[:, column], factor_II[column]
            levels_OI[:, column] = rounding.levels(w_O, scale_O)
            error_O = (w_O - levels_OI[:, column] * scale_O) / row_I[column]
            weight_OI[:, column + 1 : stop].addr_(error_O, row_I[column + 1 : stop], alpha=-1)
            errors_OB[:, column - start] = error_O
        weight_OI[:, stop:].addmm_(errors_OB, factor_II[start:stop, stop:], alpha=-1)
    ordered = torch.empty_like(levels_OI)
    ordered[:, order_I] = levels_OI
    return ordered


def _inverse_factor(moments_II: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse, damped. An input that is always 0 gets the moment 1."""
    diagonal_I = moments_II.diagonal()
    damped = moments_II + torch.diag((diagonal_I == 0).float())
    for damping in _DAMPING:
        damped.diagonal().add_(damping * diagonal_I.mean())
        factor, info = torch.linalg.cholesky_ex(damped)
        if not info:
            upper: torch.Tensor
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not info:
                return upper
    raise Misconfigured(
        "the calibration text hardly varies a layer's inputs: give a longer, more varied one", param="calibrate"
    )
