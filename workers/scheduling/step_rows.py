"""One request's part of a step: the row for the runner, and the tokens of its output."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from protos.values import FinishReason, SequenceUpdate
from workers.batch import MEAN, Row, RowOutput, Sample, is_penalised
from workers.scheduling.request import Request


def next_row(
    request: Request,
    num_tokens: int,
    *,
    eos_ids: tuple[int, ...],
    depends_on_row: int | None,
    draft_ids: tuple[int, ...] = (),
) -> Row:
    """Plans the request's next positions. The last one samples if no later token is known. `depends_on_row`: the
    previous batch's row whose token this row waits for. The positions of `draft_ids` come after `num_planned`: it is
    unknown which of them will count as computed."""
    start, prompt_ids, sampling = request.num_planned, request.prompt_ids, request.sampling
    stop, num_known = start + num_tokens, len(prompt_ids) + len(request.output_ids)
    samples = stop == num_known + request.num_due and sampling.max_tokens > 0
    sample = _sample(request, eos_ids) if samples else None
    owes = sampling.prompt_logprobs is not None and request.owes_prompt_logprobs
    request.num_planned = stop
    request.num_due += samples
    request.num_drafts = len(draft_ids)
    tables = request.tables
    return Row(
        request_id=request.request_id,
        token_ids=request.tokens(start, min(stop, num_known)) if start < num_known else (),
        start=start,
        block_tables=(tuple(tables[0]),) if len(tables) == 1 else tuple([tuple(table) for table in tables]),
        sample=sample,
        prompt_targets=prompt_ids[start + 1 : stop + 1] if owes else (),
        num_prompt_logprobs=(sampling.prompt_logprobs or 0) if owes else 0,
        prompt_len=len(prompt_ids),
        depends_on_row=depends_on_row if stop > num_known else None,
        pooling=sampling.pooling if start < len(prompt_ids) and (samples or sampling.pooling == MEAN) else "",
        draft_ids=draft_ids,
        adapter=request.adapter,
    )


def decodable(
    running: Sequence[Request], sampled: Container[Request], *, max_len: int, block_size: int
) -> Iterator[tuple[Request, int]]:
    """Requests whose last token is known, or was `sampled` by the previous step and can be read on the device; each
    with the number of blocks, over all groups, that its next token lacks."""
    for request in running:  # no calls in the loop: there are often many requests
        num_due = request.num_due
        num_expected = len(request.prompt_ids) + len(request.output_ids) + num_due
        if num_expected - request.num_planned != 1:
            continue
        if not num_due or (request in sampled and may_follow(request, max_len)):
            tables, num_blocks = request.tables, -(-num_expected // block_size)
            lacking = num_blocks - len(tables[0])
            if len(tables) > 1:  # of a prompt's last token, only the pages of windows may be missing
                lacking = sum([max(0, num_blocks - len(table)) for table in tables])
            yield request, lacking


def may_follow(request: Request, max_len: int) -> bool:
    """Whether a request's next step may start before its sampled token is known. Not if the token ends the request or
    its role may hand it over, or the host needs the token to choose the next one. A row with drafts brings an unknown
    number of tokens."""
    if request.num_drafts:
        return False
    num_output = len(request.output_ids) + request.num_due
    if num_output >= request.sampling.max_tokens or len(request.prompt_ids) + num_output >= max_len:
        return False
    is_first = num_output == request.num_given + 1
    if is_first and request.ticket is not None and not request.adopted:
        return False
    uncounted = not request.text_only and request.num_due > 1 and is_penalised(request.sampling)
    return not (uncounted or request.sampling.grammar)


def draft_limit(request: Request, max_len: int) -> int:
    """How many drafts the request's next row may have, by the length of the answer. None while a step in flight samples
    a token."""
    if request.num_due:
        return 0
    num_output = len(request.output_ids)
    return min(request.sampling.max_tokens, max_len - len(request.prompt_ids)) - num_output - 1


def without_stops(request: Request, draft_ids: tuple[int, ...], eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first that would end the answer."""
    stops = stop_ids(request, eos_ids)
    at = next((at for at, token_id in enumerate(draft_ids) if token_id in stops), len(draft_ids))
    return draft_ids[:at]


def stop_ids(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    return (() if request.sampling.ignore_eos else eos_ids) + request.sampling.stop_token_ids


def extend(
    request: Request, token_ids: tuple[int, ...], *, eos_ids: tuple[int, ...], max_len: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Appends sampled tokens to the answer, up to the one that ends it. Returns the appended tokens, and why the answer
    ends."""
    room = min(request.sampling.max_tokens, max_len - len(request.prompt_ids)) - len(request.output_ids)
    taken = token_ids[:room]
    finish_reason = FinishReason.LENGTH if len(taken) == room else None
    if stops := stop_ids(request, eos_ids):
        for number, token_id in enumerate(taken, 1):
            if token_id in stops:
                taken, finish_reason = taken[:number], FinishReason.STOP
                break
    request.output_ids += taken
    return taken, finish_reason


def _sample(request: Request, eos_ids: tuple[int, ...]) -> Sample:
    params = request.sampling
    penalised = not request.text_only and is_penalised(params)
    index = len(request.output_ids) + request.num_due
    return Sample(
        params=params,
        index=index,
        prompt_ids=request.prompt_ids if penalised else (),
        output_ids=tuple(request.output_ids) if penalised or params.grammar else (),
        banned_ids=stop_ids(request, eos_ids) if index < params.min_tokens else (),
    )


def update_of(
    request: Request,
    row: Row,
    out: RowOutput,
    token_ids: tuple[int, ...],
    *,
    first: bool,
    finish_reason: FinishReason | None,
    drafts: Mapping[str, Any],
) -> SequenceUpdate | None:
    """The update that the row brought, if any. `first`: the prompt is complete; `drafts`: fields that count them."""
    prompt_logprobs = out.prompt_logprobs[request.num_prompt_reported - row.start :] if row.prompt_targets else ()
    request.num_prompt_reported += len(prompt_logprobs)
    embedding = _pooled(request, row, out) if row.pooling else b""
    in_prompt = request.tells_progress and (first or not request.output_ids)
    if not (token_ids or prompt_logprobs or in_prompt or first or finish_reason):
        return None
    return SequenceUpdate(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=out.logprobs[: len(token_ids)],
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        num_cached_tokens=request.num_cached if first or in_prompt else 0,
        num_prompt_computed=min(request.num_computed, request.num_prompt) if in_prompt else 0,
        embedding=embedding,
        **drafts,
    )


def _pooled(request: Request, row: Row, out: RowOutput) -> bytes:
    """Adds the row's hidden states to the request's. Returns the vector of the prompt once all of it is computed: the
    last state, or the mean."""
    states_E = np.frombuffer(out.embedding, dtype=np.float32)
    request.pooled = states_E if request.pooled is None else request.pooled + states_E
    if row.sample is None:
        return b""
    number = request.num_prompt if row.pooling == MEAN else 1
    return (request.pooled / np.float32(number)).astype(np.float32).tobytes()
