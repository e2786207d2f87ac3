"""Verifies drafts by sampling: each drafted position is sampled as a step of its own would (docs/adr/0050)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from workers.batch import RowOutput, Sample, is_penalised


def drafted_samples(sample: Sample, draft_ids: Sequence[int]) -> list[Sample]:
    """Returns how to sample the first draft's position and each following one: with its own index, earlier drafts as
    part of the output, and no banned ids after `min_tokens`."""
    params = sample.params
    counts_output = bool(params.grammar) or is_penalised(params)
    return [
        replace(
            sample,
            index=sample.index + place,
            output_ids=(*sample.output_ids, *draft_ids[:place]) if counts_output else (),
            banned_ids=sample.banned_ids if sample.index + place < params.min_tokens else (),
        )
        for place in range(len(draft_ids) + 1)
    ]


def verified(sampled: Sequence[RowOutput], draft_ids: Sequence[int]) -> RowOutput:
    """Returns a row's output up to the first token that differs from its draft. A failed position counts only if it is
    the first: the next step computes later ones again."""
    token_ids, logprobs = list(sampled[0].token_ids), list(sampled[0].logprobs)
    if sampled[0].error is not None:
        return sampled[0]
    for draft_id, output in zip(draft_ids, sampled[1:], strict=False):
        if token_ids[-1] != draft_id or output.error is not None:
            break
        token_ids += output.token_ids
        logprobs += output.logprobs
    return RowOutput(token_ids=tuple(token_ids), logprobs=tuple(logprobs))
