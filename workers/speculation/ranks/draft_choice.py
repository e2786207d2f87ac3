"""Which tokens a head drafts from its logits: on every rank the same, as all have the same logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.batch import Sample
from workers.sampling.sampler import sample


def drafted_ids(
    logits_RV: torch.Tensor, samples: Sequence[Sample], target_ids_V: torch.Tensor | None, vocab_size: int
) -> list[int]:
    """The target's id of a token for each row of float32 logits; -1 for logits that are not finite. `target_ids_V`: the
    target's id of each token of the head."""
    if all(one.params.temperature <= 0 and not one.params.logit_bias for one in samples):
        ids_R = logits_RV.argmax(dim=-1)
        return (ids_R if target_ids_V is None else target_ids_V[ids_R]).tolist()
    if target_ids_V is not None:
        whole_RV = logits_RV.new_full((len(logits_RV), vocab_size), -torch.inf)
        whole_RV[:, target_ids_V] = logits_RV
        whole_RV[logits_RV[:, 0].isnan()] = torch.nan
        logits_RV = whole_RV
    return [out.token_ids[0] if out.token_ids else -1 for out in sample(logits_RV, samples).fetch()]
