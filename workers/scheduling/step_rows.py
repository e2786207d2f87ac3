"""One request's part of a step: what a runner is told of it, and what is told of what it brought."""

from __future__ import annotations

from protos.values import FinishReason, Logprobs, SequenceUpdate
from workers.batch import Row, RowOutput, Sample, is_penalised
from workers.scheduling.request import Request


def next_row(request: Request, num_tokens: int, *, eos_ids: tuple[int, ...], follows: int | None) -> Row:
    """The request's next positions, which are planned now. Its last one samples if nothing after it is known;
    `follows` is the row of the step before that samples its last token, if that is not known yet."""
    start, stop = request.num_planned, request.num_planned + num_tokens
    samples = stop == request.num_expected and request.sampling.max_tokens > 0
    sample = _sample(request, eos_ids) if samples else None
    owes = request.owes_prompt_logprobs
    request.num_planned = stop
    request.num_due += samples
    return Row(
        request_id=request.request_id,
        token_ids=request.tokens(start, min(stop, request.num_tokens)),
        start=start,
        block_ids=tuple(request.block_ids),
        sample=sample,
        prompt_targets=request.prompt_ids[start + 1 : stop + 1] if owes else (),
        num_prompt_logprobs=(request.sampling.prompt_logprobs or 0) if owes else 0,
        prompt_len=request.num_prompt,
        follows=follows if stop > request.num_tokens else None,
    )


def stop_ids(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end the answer."""
    return (() if request.sampling.ignore_eos else eos_ids) + request.sampling.stop_token_ids


def end_at(request: Request, token_id: int, *, eos_ids: tuple[int, ...], max_len: int) -> FinishReason | None:
    """Does its last token end the answer?"""
    if token_id in stop_ids(request, eos_ids):
        return FinishReason.STOP
    if len(request.output_ids) >= request.sampling.max_tokens or request.num_tokens >= max_len:
        return FinishReason.LENGTH
    return None


def update_of(
    request: Request,
    row: Row,
    out: RowOutput,
    prompt_logprobs: tuple[Logprobs, ...],
    finish_reason: FinishReason | None,
    *,
    first: bool,
    reading: bool,
) -> SequenceUpdate:
    """What is told of a row once it is computed: the `first` that samples, or one of a prompt that is `reading`."""
    sampled = row.sample is not None and not out.late
    return SequenceUpdate(
        request_id=request.request_id,
        token_ids=(out.token_id,) if sampled and out.token_id is not None else (),
        logprobs=(out.logprobs,) if sampled and out.logprobs is not None else (),
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        num_cached_tokens=request.num_cached if first or reading else 0,
        num_prompt_computed=min(request.num_computed, request.num_prompt) if reading else 0,
    )


def _sample(request: Request, eos_ids: tuple[int, ...]) -> Sample:
    params = request.sampling
    penalised = is_penalised(params)
    index = len(request.output_ids) + request.num_due
    return Sample(
        params=params,
        index=index,
        prompt_ids=request.prompt_ids if penalised else (),
        output_ids=tuple(request.output_ids) if penalised or params.grammar else (),
        banned_ids=stop_ids(request, eos_ids) if index < params.min_tokens else (),
    )
