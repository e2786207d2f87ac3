"""Which experts a token passes, and with which weights: the readable twin of `kernels/cpu/routing.h`.

Legend: T tokens, X experts, S slots: the experts of a token, from the highest score down; G groups of experts.
"""

from __future__ import annotations

import torch

from workers.models.families.experts_config import ExpertRouting


def route(
    logits_TX: torch.Tensor, routing: ExpertRouting, correction_X: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [T, S] int64, weights [T, S] float32) of float32 logits. Of equal scores the lower id comes first.

    A token with a logit that is not finite has NaN as each of its weights, and any experts.
    """
    scores_TX = _scores(logits_TX, routing)
    choice_TX = logits_TX if routing.scoring == "softmax" else scores_TX  # in the same order, and without rounding
    if correction_X is not None:
        choice_TX = choice_TX + correction_X
    if routing.num_chosen_groups < routing.num_groups:
        choice_TX = choice_TX.masked_fill(~_in_chosen_groups(choice_TX, routing), -torch.inf)
    chosen_TS = _highest(choice_TX, routing.num_chosen)
    weights_TS = scores_TX.gather(1, chosen_TS)
    if routing.scoring == "softmax-of-chosen":
        weights_TS = weights_TS.softmax(1)
    if routing.renormalised:
        weights_TS = weights_TS / (_in_order(weights_TS) + routing.epsilon)
    if routing.factor != 1.0:
        weights_TS = weights_TS * routing.factor
    broken_T = ~logits_TX.isfinite().all(1)
    return chosen_TS, weights_TS.masked_fill(broken_T.unsqueeze(1), torch.nan)


def _scores(logits_TX: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
    match routing.scoring:
        case "softmax":
            return logits_TX.softmax(1)
        case "sigmoid":
            return logits_TX.double().sigmoid().float()  # in float32 its bits depend on the place in a vector
    return logits_TX


def _in_chosen_groups(choice_TX: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
    grouped_TGM = choice_TX.view(len(choice_TX), routing.num_groups, routing.num_experts // routing.num_groups)
    if routing.group_score == "max":
        scores_TG = grouped_TGM.amax(2)
    else:
        scores_TG = grouped_TGM.sort(dim=2, descending=True).values[:, :, :2].sum(2)
    chosen_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
    chosen_TG.scatter_(1, _highest(scores_TG, routing.num_chosen_groups), value=True)
    return chosen_TG.repeat_interleave(grouped_TGM.shape[2], dim=1)


def _highest(scores_TX: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] ids. topk leaves the order of equal scores open; a stable sort keeps it."""
    return scores_TX.sort(stable=True, dim=1, descending=True).indices[:, :count]


def _in_order(values_TS: torch.Tensor) -> torch.Tensor:
    """[T, 1]: the sum, one slot after the other."""
    sum_T1 = values_TS[:, :1].clone()
    for slot in range(1, values_TS.shape[1]):
        sum_T1 += values_TS[:, slot : slot + 1]
    return sum_T1
