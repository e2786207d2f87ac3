"""What a runner is told of one request's part of a step."""

from __future__ import annotations

from workers.engine.batch import Row, Sample, is_penalised
from workers.engine.request import Request


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
