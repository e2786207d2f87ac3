"""Chooses the next token of each row from its logits. A row's choice depends on its own logits and `Sample` alone.

Order of the steps, as in vLLM (v1/sample/sampler.py): logprobs of the raw logits; banned ids; logit bias; repetition
penalty (over prompt and output, as in transformers); frequency and presence penalties (over the output, as in OpenAI);
then argmax when the temperature is 0, or temperature, min-p, top-k, top-p and one draw by inverse CDF.

Tokens are ranked by logit, equal logits by lower id first: everywhere, so that top-k 1 is greedy.
Legend: R rows, V vocabulary, P penalised (row, id) pairs, T positions. Probabilities are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from protos.values import Logprobs, SamplingParams, TokenLogprob
from workers.engine.batch import RowOutput, Sample
from workers.engine.philox import uniforms

_NUCLEUS = 1024
"""Top-p looks at this many best tokens before it sorts the whole vocabulary."""


def sample(logits_RV: torch.Tensor, samples: Sequence[Sample]) -> list[RowOutput]:
    """One token per row of the float32 logits, with the logprobs its parameters ask for.

    Logprobs are those of the model: the log-softmax of the logits before penalties, bias, temperature and filters.
    """
    adjusted_RV = _adjust(logits_RV, samples)
    token_ids = adjusted_RV.argmax(dim=-1).tolist()  # documented to return the first of equal maxima
    drawn = [row for row, one in enumerate(samples) if one.params.temperature > 0]
    if drawn:
        for row, token_id in zip(drawn, _draw(adjusted_RV[drawn], [samples[row] for row in drawn]), strict=True):
            token_ids[row] = token_id
    reported = [(row, one.params.logprobs) for row, one in enumerate(samples) if one.params.logprobs is not None]
    outputs = [RowOutput(token_id=token_id) for token_id in token_ids]
    if reported:
        rows, nums_top = zip(*reported, strict=True)
        found = score(logits_RV[list(rows)], [token_ids[row] for row in rows], nums_top)
        for row, logprobs in zip(rows, found, strict=True):
            outputs[row] = RowOutput(token_id=token_ids[row], logprobs=logprobs)
    return outputs


def score(logits_TV: torch.Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[Logprobs]:
    """Logprobs of one given token at each position, and of the `nums_top` most likely ones there."""
    logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
    chosen = logprobs_TV.gather(1, torch.tensor(token_ids, device=logits_TV.device).unsqueeze(1)).squeeze(1).tolist()
    vocab_size = logprobs_TV.shape[1]
    tops: list[tuple[TokenLogprob, ...]] = [()] * len(token_ids)
    for row, num_top in enumerate(nums_top):
        if num_top:
            counts = torch.tensor([min(num_top, vocab_size)], device=logits_TV.device)
            ids = _best(logprobs_TV[row : row + 1], counts)[0].nonzero().squeeze(1)
            values, order = logprobs_TV[row, ids].sort(descending=True, stable=True)
            pairs = zip(ids[order].tolist(), values.tolist(), strict=True)
            tops[row] = tuple(TokenLogprob(token_id=token_id, logprob=value) for token_id, value in pairs)
    return [
        Logprobs(chosen=TokenLogprob(token_id=token_id, logprob=value), top=top)
        for token_id, value, top in zip(token_ids, chosen, tops, strict=True)
    ]


def _adjust(logits_RV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Logits after bans, bias and penalties: the same tensor when there are none, a copy otherwise."""
    banned = _pairs(samples, lambda one: ((token_id, 0.0) for token_id in one.banned_ids))
    biased = _pairs(samples, lambda one: one.params.logit_bias)
    repeated = _pairs(samples, _repetition)
    counted = _pairs(samples, _presence_and_frequency)
    if not (banned or biased or repeated or counted):
        return logits_RV
    logits_RV = logits_RV.clone()
    device = logits_RV.device
    if banned:
        rows_P, ids_P, _ = _columns(banned, device)
        logits_RV[rows_P, ids_P] = -torch.inf
    if biased:
        rows_P, ids_P, values_P = _columns(biased, device)
        logits_RV[rows_P, ids_P] += values_P
    if repeated:
        rows_P, ids_P, values_P = _columns(repeated, device)
        old_P = logits_RV[rows_P, ids_P]
        logits_RV[rows_P, ids_P] = torch.where(old_P > 0, old_P / values_P, old_P * values_P)
    if counted:
        rows_P, ids_P, values_P = _columns(counted, device)
        logits_RV[rows_P, ids_P] -= values_P
    return logits_RV


def _repetition(one: Sample) -> Iterable[tuple[int, float]]:
    penalty = one.params.repetition_penalty
    if penalty == 1.0:
        return ()
    return ((token_id, penalty) for token_id in {*one.prompt_ids, *one.output_ids})


def _presence_and_frequency(one: Sample) -> Iterable[tuple[int, float]]:
    presence, frequency = one.params.presence_penalty, one.params.frequency_penalty
    if (presence == 0.0 and frequency == 0.0) or not one.output_ids:
        return ()
    ids, counts = np.unique(np.array(one.output_ids), return_counts=True)
    return zip(ids.tolist(), (presence + frequency * counts).tolist(), strict=True)


def _pairs(
    samples: Sequence[Sample], of: Callable[[Sample], Iterable[tuple[int, float]]]
) -> list[tuple[int, int, float]]:
    return [(row, token_id, value) for row, one in enumerate(samples) for token_id, value in of(one)]


def _columns(
    pairs: Sequence[tuple[int, int, float]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, ids, values = zip(*pairs, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _draw(logits_RV: torch.Tensor, samples: Sequence[Sample]) -> list[int]:
    """Temperature, filters, then the first token in vocabulary order whose cumulative probability exceeds the
    row's random number."""
    device = logits_RV.device
    params = [one.params for one in samples]
    temperature_R = torch.tensor([one.temperature for one in params], dtype=torch.float64, device=device)
    scaled_RV = logits_RV.double()
    scaled_RV -= scaled_RV.amax(dim=-1, keepdim=True)  # so that no temperature, however small, makes infinity
    scaled_RV /= temperature_R.unsqueeze(1)
    _filter(scaled_RV, params)
    cdf_RV = torch.softmax(scaled_RV, dim=-1).cumsum(dim=-1)
    total_R1 = cdf_RV[:, -1:]
    uniform_R = torch.from_numpy(uniforms([one.seed for one in params], [one.index for one in samples]))
    target_R1 = uniform_R.to(device).unsqueeze(1) * total_R1
    chosen_R = torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1)
    last_R = (cdf_RV < total_R1).sum(dim=-1)  # the last token with any probability, should target round up to total
    ids: list[int] = torch.minimum(chosen_R, last_R).tolist()
    return ids


def _filter(scaled_RV: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets to -inf, in place, what min-p, top-k and top-p remove. `scaled_RV` has its maximum at 0 in each row.

    Each filter touches only the rows that ask for it, and sees what the filter before it has left.
    """
    device, vocab_size = scaled_RV.device, scaled_RV.shape[1]
    if rows := [row for row, one in enumerate(params) if one.min_p > 0.0]:
        floor = torch.tensor([math.log(params[row].min_p) for row in rows], dtype=torch.float64, device=device)
        part_RV = scaled_RV[rows]
        scaled_RV[rows] = part_RV.masked_fill(part_RV < floor.unsqueeze(1), -torch.inf)
    if rows := [row for row, one in enumerate(params) if 0 < one.top_k < vocab_size]:
        part_RV = scaled_RV[rows]
        counts = torch.tensor([params[row].top_k for row in rows], device=device)
        scaled_RV[rows] = part_RV.masked_fill(~_best(part_RV, counts), -torch.inf)
    if rows := [row for row, one in enumerate(params) if one.top_p < 1.0]:
        part_RV = scaled_RV[rows]
        mass = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64, device=device)
        scaled_RV[rows] = part_RV.masked_fill(~_best(part_RV, _nucleus(part_RV, mass)), -torch.inf)


def _nucleus(scaled_RV: torch.Tensor, mass_R: torch.Tensor) -> torch.Tensor:
    """How many of the best tokens it takes to reach the mass: at least one. [R] int64."""
    probs_RV = torch.softmax(scaled_RV, dim=-1)
    best_RV = probs_RV.topk(min(_NUCLEUS, probs_RV.shape[1]), dim=-1).values
    counts_R = _reach(best_RV, mass_R)
    if rows := (best_RV.sum(dim=-1) < mass_R).nonzero().squeeze(1).tolist():
        counts_R[rows] = _reach(probs_RV[rows].sort(dim=-1, descending=True).values, mass_R[rows])
    return counts_R


def _reach(best_RV: torch.Tensor, mass_R: torch.Tensor) -> torch.Tensor:
    """How many of these descending probabilities stand before the mass is reached, and the one that reaches it."""
    before_RV = best_RV.cumsum(dim=-1) - best_RV
    return (before_RV < mass_R.unsqueeze(1)).sum(dim=-1).clamp(min=1)


def _best(values_RV: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """Mask of the `counts_R` (1 to V) highest values of each row; of equal ones the lower ids. [R, V] bool."""
    edge_R1 = values_RV.topk(int(counts_R.max()), dim=-1).values.gather(1, counts_R.unsqueeze(1) - 1)
    above_RV = values_RV > edge_R1
    equal_RV = values_RV == edge_R1
    room_R1 = counts_R.unsqueeze(1) - above_RV.sum(dim=-1, keepdim=True)
    return above_RV | (equal_RV & (equal_RV.cumsum(dim=-1) <= room_R1))
