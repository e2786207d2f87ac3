"""Logprobs of given tokens, and the most likely ones beside them: found on the device, put into words on the host.

Tokens are ranked as `sampler` ranks them: by logit, equal ones by lower id. Legend: T positions, V vocabulary, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from protos.values import Logprobs, TokenLogprob
from workers.kernels.this_device import Landing, to_device


class TokenScores:
    """The log-softmax of `logits_TV` at one token of each position, at the `nums_top` most likely ones there, and at
    its `labels`."""

    def __init__(
        self,
        logits_TV: torch.Tensor,
        token_ids_T: torch.Tensor,
        nums_top: Sequence[int],
        labels: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._nums_top = nums_top
        self._labels = labels or [()] * len(nums_top)
        logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        chosen_T = logprobs_TV.gather(1, token_ids_T.unsqueeze(1)).squeeze(1)
        ranks_T = _ranks(logprobs_TV, token_ids_T, chosen_T)
        best_ids_TK = _best(logprobs_TV, min(max(nums_top), logits_TV.shape[1]))
        self._num_best = best_ids_TK.shape[1]
        if num_labels := max(map(len, labels), default=0):
            padded = np.array([[*ids, *[0] * (num_labels - len(ids))] for ids in labels])
            best_ids_TK = torch.cat((best_ids_TK, to_device(padded, logits_TV.device)), dim=1)
        self._landing = Landing(token_ids_T, chosen_T, ranks_T, best_ids_TK, logprobs_TV.gather(1, best_ids_TK))

    def fetch(self) -> list[Logprobs]:
        ids, chosen, ranks, best_ids, best = (tensor.tolist() for tensor in self._landing.wait())
        return [
            Logprobs(
                chosen=TokenLogprob(token_id=token_id, logprob=logprob),
                top=tuple(
                    TokenLogprob(token_id=ids_K[place], logprob=top_K[place])
                    for place in (
                        *range(min(num_top, self._num_best)),
                        *range(self._num_best, self._num_best + len(label)),
                    )
                ),
                rank=rank,
            )
            for token_id, logprob, rank, ids_K, top_K, num_top, label in zip(
                ids, chosen, ranks, best_ids, best, self._nums_top, self._labels, strict=True
            )
        ]


def _ranks(values_TV: torch.Tensor, token_ids_T: torch.Tensor, chosen_T: torch.Tensor) -> torch.Tensor:
    """The rank of each row's token, from 1, in one pass without sorting."""
    ids_V = torch.arange(values_TV.shape[1], device=values_TV.device)
    chosen_T1, earlier_TV = chosen_T.unsqueeze(1), ids_V < token_ids_T.unsqueeze(1)
    return 1 + ((values_TV > chosen_T1) | ((values_TV == chosen_T1) & earlier_TV)).sum(dim=1)


def _best(values_TV: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` highest values of each row, best first. [T, count] int64.

    `topk` promises no order among equal values, so keys are unique: the float's bits, then the id's complement."""
    vocab_size = values_TV.shape[1]
    bits_TV = (values_TV + 0.0).view(torch.int32)  # + 0 turns -0 into 0, its equal
    ordered_TV = (bits_TV ^ ((bits_TV >> 31) & 0x7FFFFFFF)).long()
    from_last_V = torch.arange(vocab_size - 1, -1, -1, device=values_TV.device)
    ranks_TK = ((ordered_TV << 32) | from_last_V).topk(count, dim=-1).values
    return vocab_size - 1 - (ranks_TK & 0xFFFFFFFF)
