"""Repetition, presence and frequency penalties, applied on the device, which has the token of the step before already.

Legend: R rows, Q penalised rows, P pairs of one of these and a token id of its prompt or answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workers.batch import Sample, is_penalised
from workers.kernels.this_device import to_device

NONE = -1
"""In `latest_R`: all of the row's tokens are known."""

Ints = NDArray[np.int64]


def penalise(logits_RV: torch.Tensor, samples: Sequence[Sample], latest_R: torch.Tensor | None) -> None:
    """Penalises in place. Repetition counts prompt and output, as in transformers; the others the output, as in
    OpenAI's API. `latest_R` has the output token after those of the `Sample` for a row that depends on another row;
    NONE elsewhere."""
    rows = [row for row, one in enumerate(samples) if is_penalised(one.params)]
    if not rows:
        return
    penalised = [samples[row] for row in rows]
    counted = [_known(one) for one in penalised]
    owners = np.repeat(np.arange(len(rows)), [len(ids) for ids, _ in counted])
    pairs = np.stack((owners, *(np.concatenate(arrays) for arrays in zip(*counted, strict=True))))
    owners_P, ids_P, counts_P = to_device(pairs, logits_RV.device)
    rows_Q = to_device(np.array(rows), logits_RV.device)
    penalties = _Penalties.of(penalised, logits_RV.device)
    if latest_R is None:
        penalties.apply(logits_RV, rows_Q, owners_P, ids_P, counts_P)
        return
    latest_Q = latest_R.index_select(0, rows_Q)
    again_P = (ids_P == latest_Q[owners_P]).long()
    penalties.apply(logits_RV, rows_Q, owners_P, ids_P, counts_P + again_P)
    new_Q = (latest_Q != NONE) & (torch.zeros_like(latest_Q).scatter_add_(0, owners_P, again_P) == 0)
    everyone_Q = torch.arange(len(rows), device=logits_RV.device)
    once_Q = torch.ones_like(latest_Q)
    penalties.apply(logits_RV, rows_Q, everyone_Q, latest_Q.clamp(min=0), once_Q, only_P=new_Q)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Penalties:
    """float64, but `repetition_Q` float32, as logits are."""

    repetition_Q: torch.Tensor
    presence_Q: torch.Tensor
    frequency_Q: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> _Penalties:
        params = [one.params for one in samples]
        penalties = [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in params]
        repetition_Q, presence_Q, frequency_Q = to_device(np.array(penalties, dtype=np.float64).T.copy(), device)
        return cls(repetition_Q=repetition_Q.float(), presence_Q=presence_Q, frequency_Q=frequency_Q)

    def apply(
        self,
        logits_RV: torch.Tensor,
        rows_Q: torch.Tensor,
        owners_P: torch.Tensor,
        ids_P: torch.Tensor,
        counts_P: torch.Tensor,
        only_P: torch.Tensor | None = None,
    ) -> None:
        """Penalises logits of ids that occur `counts_P` times in the output. Pairs (row, id) are unique."""
        rows_P, repetition_P = rows_Q[owners_P], self.repetition_Q[owners_P]
        old_P = logits_RV[rows_P, ids_P]
        repeated_P = torch.where(old_P > 0, old_P / repetition_P, old_P * repetition_P)
        counted_P = (self.presence_Q[owners_P] + self.frequency_Q[owners_P] * counts_P).float()
        new_P = repeated_P - counted_P.masked_fill_(counts_P == 0, 0.0)
        logits_RV[rows_P, ids_P] = new_P if only_P is None else torch.where(only_P, new_P, old_P)


def _known(one: Sample) -> tuple[Ints, Ints]:
    output_ids, counts = np.unique(np.array(one.output_ids, dtype=np.int64), return_counts=True)
    if one.params.repetition_penalty == 1.0:
        return output_ids, counts
    ids = np.union1d(np.array(one.prompt_ids, dtype=np.int64), output_ids)
    all_counts = np.zeros_like(ids)
    all_counts[np.searchsorted(ids, output_ids)] = counts
    return ids, all_counts
