"""Chooses the next token of each row from its logits. A row's choice depends on its own logits and `Sample` alone.

Order of the steps, as in vLLM (v1/sample/sampler.py): logprobs of the raw logits; banned ids; logit bias; penalties
(`penalties`); the masks of grammars; then argmax when the temperature is 0, or temperature, min-p, top-k, top-p and one
draw by inverse CDF.

Tokens are ranked by logit, equal logits by lower id first: everywhere, so that top-k 1 is greedy.
Legend: R rows, V vocabulary, P adjusted (row, id) pairs, T rows with logprobs, C constrained rows, W words of a mask.
Probabilities are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

import numpy as np
import torch

from protos.errors import NotFinite
from protos.values import SamplingParams
from protos.wire import error_info
from workers.batch import RowOutput, Sample, is_penalised
from workers.grammar.grammar_seam import Mask
from workers.kernels.this_device import Landing, to_device
from workers.sampling.penalties import penalise
from workers.sampling.philox import uniforms
from workers.sampling.token_scores import TokenScores

_BROKEN = -1  # in place of a token
_NOT_FINITE = error_info(
    NotFinite(
        "the model's numbers are not finite for this prompt: a router of experts or another layer overflowed. Send "
        "another prompt; if all prompts fail, use worker.dtype = float32, or download the checkpoint again"
    )
)
_NUCLEUS = 1024
"""Top-p looks at this many best tokens before it sorts the whole vocabulary."""


class Drawn:
    """A token for each row, on the way to the host; `ids_R`: the same on the device, for the next step. A row with
    `broken_R` logits ends with an error."""

    def __init__(
        self, ids_R: torch.Tensor, broken_R: torch.Tensor, logprobs: Mapping[int, int], scores: TokenScores | None
    ) -> None:
        self.ids_R = ids_R.masked_fill(broken_R, 0)  # the embedding reads it if a step in flight follows
        self._logprobs = logprobs
        self._scores = scores
        self._landing = Landing(ids_R.masked_fill(broken_R, _BROKEN))

    def fetch(self) -> list[RowOutput]:
        (ids_R,) = self._landing.wait()
        logprobs = self._scores.fetch() if self._scores is not None else []
        return [
            RowOutput(token_ids=(token_id,), logprobs=(logprobs[self._logprobs[row]],) if row in self._logprobs else ())
            if token_id != _BROKEN
            else RowOutput(error=_NOT_FINITE)
            for row, token_id in enumerate(ids_R.tolist())
        ]


def sample(
    logits_RV: torch.Tensor,
    samples: Sequence[Sample],
    latest_R: torch.Tensor | None = None,
    masks: Mapping[int, Mask] | None = None,
) -> Drawn:
    """One token per row of the float32 logits, with the logprobs of its parameters. Does not wait for a GPU.

    `latest_R` as in `penalties.penalise`; `masks` of the rows that have a grammar. Logprobs are those of the model: the
    log-softmax of the logits before penalties, bias, masks, temperature and filters.
    """
    adjusted_RV = _adjust(logits_RV, samples, latest_R, masks or {})
    ids_R = _choose_on_gpu(adjusted_RV, samples) if logits_RV.is_cuda else _choose(adjusted_RV, samples)
    scored = [(row, each.params.logprobs) for row, each in enumerate(samples) if each.params.logprobs is not None]
    broken_R = logits_RV[:, 0].isnan()  # a hidden state that is not finite makes all logits NaN
    if not scored:
        return Drawn(ids_R, broken_R, {}, None)
    rows, nums_top = zip(*scored, strict=True)
    rows_T = to_device(np.array(rows), logits_RV.device)
    labels = [samples[row].params.label_token_ids for row in rows]
    scores = TokenScores(logits_RV.index_select(0, rows_T), ids_R.index_select(0, rows_T), nums_top, labels)
    return Drawn(ids_R, broken_R, {row: place for place, row in enumerate(rows)}, scores)


def _adjust(
    logits_RV: torch.Tensor, samples: Sequence[Sample], latest_R: torch.Tensor | None, masks: Mapping[int, Mask]
) -> torch.Tensor:
    """Logits after bans, bias, penalties and masks: the same tensor when there are none, a copy otherwise."""
    # Banned ids of rows with a grammar are in their masks, which always allow a token.
    banned = _pairs(samples, lambda each: ((token_id, 0.0) for token_id in each.banned_ids if not each.params.grammar))
    biased = _pairs(samples, lambda each: each.params.logit_bias)
    if not (banned or biased or masks or any(is_penalised(each.params) for each in samples)):
        return logits_RV
    logits_RV = logits_RV.clone()
    device = logits_RV.device
    if banned:
        rows_P, ids_P, _ = _columns(banned, device)
        logits_RV[rows_P, ids_P] = -torch.inf
    if biased:
        rows_P, ids_P, values_P = _columns(biased, device)
        logits_RV[rows_P, ids_P] += values_P
    penalise(logits_RV, samples, latest_R)
    if masks:
        _mask(logits_RV, masks)
    return logits_RV


def _mask(logits_RV: torch.Tensor, masks: Mapping[int, Mask]) -> None:
    """Sets ids that the masks do not allow to -inf, in place."""
    if logits_RV.device.type != "cpu":
        _mask_on_device(logits_RV, masks)
        return
    for row, words_W in masks.items():  # by NumPy: too little work to wake torch's threads for
        allowed_V = np.unpackbits(words_W.view(np.uint8), count=logits_RV.shape[1], bitorder="little")
        np.putmask(logits_RV[row].numpy(), allowed_V == 0, -np.inf)


def _mask_on_device(logits_RV: torch.Tensor, masks: Mapping[int, Mask]) -> None:
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    rows_C = to_device(np.array(list(masks)), device)
    words_CW = to_device(np.stack(list(masks.values())), device)
    bits_32 = torch.arange(32, dtype=torch.int32, device=device)
    refused_CV = ((words_CW.unsqueeze(2) >> bits_32) & 1).flatten(1)[:, :vocab_size] == 0
    logits_RV[rows_C] = logits_RV[rows_C].masked_fill_(refused_CV, -torch.inf)


def _pairs(
    samples: Sequence[Sample], of: Callable[[Sample], Iterable[tuple[int, float]]]
) -> list[tuple[int, int, float]]:
    return [(row, token_id, value) for row, each in enumerate(samples) for token_id, value in of(each)]


def _columns(
    pairs: Sequence[tuple[int, int, float]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, ids, values = zip(*pairs, strict=True)
    return (
        to_device(np.array(rows), device),
        to_device(np.array(ids), device),
        to_device(np.array(values, dtype=np.float32), device),
    )


def _choose(logits_RV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    ids_R = logits_RV.argmax(dim=-1)  # documented to return the first of equal maxima
    drawn = [row for row, each in enumerate(samples) if each.params.temperature > 0]
    if drawn:
        ids_R[drawn] = _draw(logits_RV[drawn], [samples[row] for row in drawn])
    return ids_R


def _choose_on_gpu(logits_RV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    kernel = import_module("workers.kernels.draw")  # imports triton
    params = [each.params for each in samples]
    draws = kernel.Draws.pack(
        temperatures=[each.temperature for each in params],
        min_ps=[each.min_p for each in params],
        top_ks=[each.top_k for each in params],
        top_ps=[each.top_p for each in params],
        seeds=[each.seed for each in params],
        indices=[each.index for each in samples],
        vocab_size=logits_RV.shape[1],
        device=logits_RV.device,
    )
    ids_R: torch.Tensor = kernel.draw(logits_RV, draws)
    return ids_R


def _draw(logits_RV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    device = logits_RV.device
    params = [each.params for each in samples]
    temperature_R = torch.tensor([each.temperature for each in params], dtype=torch.float64, device=device)
    scaled_RV = logits_RV.double()
    scaled_RV -= scaled_RV.amax(dim=-1, keepdim=True)  # so that no temperature, however small, makes infinity
    scaled_RV /= temperature_R.unsqueeze(1)
    _filter(scaled_RV, params)
    cdf_RV = scaled_RV.exp_().cumsum(dim=-1)  # up to a factor, which the draw takes up
    total_R1 = cdf_RV[:, -1:]
    uniform_R = torch.from_numpy(uniforms([each.seed for each in params], [each.index for each in samples]))
    target_R1 = uniform_R.to(device).unsqueeze(1) * total_R1
    chosen_R = torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1)
    last_R = (cdf_RV < total_R1).sum(dim=-1)  # the last token with any probability, should target round up to total
    return torch.minimum(chosen_R, last_R)


def _filter(scaled_RV: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets to -inf, in place, the logits that min-p, top-k and top-p remove. `scaled_RV` has its maximum at 0 in each
    row.

    Each filter touches only the rows that use it, and gets the result of the filter before it.
    """
    device, vocab_size = scaled_RV.device, scaled_RV.shape[1]
    if rows := [row for row, each in enumerate(params) if each.min_p > 0.0]:
        floor = torch.tensor([math.log(params[row].min_p) for row in rows], dtype=torch.float64, device=device)
        part_RV = scaled_RV[rows]
        scaled_RV[rows] = part_RV.masked_fill_(part_RV < floor.unsqueeze(1), -torch.inf)
    if rows := [row for row, each in enumerate(params) if 0 < each.top_k < vocab_size or each.top_p < 1.0]:
        part_RV = scaled_RV[rows]
        kept_RV = _best(part_RV, _keep(part_RV, [params[row] for row in rows]))
        scaled_RV[rows] = part_RV.masked_fill_(~kept_RV, -torch.inf)


def _keep(scaled_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns how many of its best tokens each row keeps: top-k, and of those as many as top-p needs. [R] int64."""
    device, vocab_size = scaled_RV.device, scaled_RV.shape[1]
    limits = [min(each.top_k or vocab_size, vocab_size) for each in params]
    counts_R = torch.tensor(limits, device=device)
    if rows := [row for row, each in enumerate(params) if each.top_p < 1.0]:
        mass_R = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64, device=device)
        width = max(limits[row] if limits[row] < vocab_size else min(_NUCLEUS, vocab_size) for row in rows)
        counts_R[rows] = _nucleus(scaled_RV[rows], counts_R[rows], mass_R, width)
    return counts_R


def _nucleus(scaled_RV: torch.Tensor, limits_R: torch.Tensor, mass_R: torch.Tensor, width: int) -> torch.Tensor:
    """Returns how many of a row's `limits_R` best tokens reach `mass_R` of their sum, at least one. [R] int64. Reads
    the `width` best tokens, and all of a row that needs more. Limits above `width` must be V."""
    best_RW = scaled_RV.topk(width, dim=-1).values.exp_()
    sums_RW = best_RW.cumsum(dim=-1)
    total_R1 = sums_RW.gather(1, limits_R.clamp(max=width).unsqueeze(1) - 1)
    beyond_R1 = limits_R.unsqueeze(1) > width
    if beyond_R1.any():
        total_R1 = torch.where(beyond_R1, scaled_RV.exp().sum(dim=-1, keepdim=True), total_R1)
    goal_R1 = mass_R.unsqueeze(1) * total_R1
    counts_R = (sums_RW - best_RW < goal_R1).sum(dim=-1).clamp(min=1).minimum(limits_R)
    short_R1 = beyond_R1 & (sums_RW[:, -1:] < goal_R1)
    if rows := short_R1.squeeze(1).nonzero().squeeze(1).tolist():
        counts_R[rows] = _nucleus(scaled_RV[rows], limits_R[rows], mass_R[rows], scaled_RV.shape[1])
    return counts_R


def _best(values_RV: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """A mask of the `counts_R` (1 to V) highest values of each row; lower ids win ties. [R, V] bool."""
    edge_R1 = values_RV.topk(int(counts_R.max()), dim=-1).values.gather(1, counts_R.unsqueeze(1) - 1)
    kept_RV = values_RV >= edge_R1
    if rows := (kept_RV.sum(dim=-1) > counts_R).nonzero().squeeze(1).tolist():
        equal_RV = values_RV[rows] == edge_R1[rows]
        above_RV = kept_RV[rows] & ~equal_RV
        room_R1 = counts_R[rows].unsqueeze(1) - above_RV.sum(dim=-1, keepdim=True)
        kept_RV[rows] = above_RV | (equal_RV & (equal_RV.cumsum(dim=-1) <= room_R1))
    return kept_RV
