"""Drafts of the rows of a step, as far as its tokens and the pool's blocks reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from workers.batch import Batch
from workers.kv.block_pool import BlockPool
from workers.scheduling import page_tables
from workers.scheduling.request import Request, State
from workers.scheduling.step_rows import draft_limit, without_stops
from workers.speculation.proposer import ComputedRow
from workers.speculation.speculation import Speculation


def plan_drafts(
    speculation: Speculation | None,
    requests: Sequence[Request],
    running: Sequence[Request],
    pool: BlockPool,
    *,
    eos_ids: tuple[int, ...],
    max_len: int,
    budget: int,
) -> dict[str, tuple[int, ...]]:
    """Drafts for the rows of these requests, with the blocks that they need. Prompts go before drafts, and no request
    is preempted for one. None without `speculation`."""
    if speculation is None:
        return {}
    num_prompt = sum([each.num_to_plan for each in running if each.num_to_plan > 1])
    drafts = speculation.drafts(
        [(each.request_id, draft_limit(each, max_len)) for each in requests],
        num_rows=len(requests),
        num_positions=len(requests) + min(num_prompt, budget),
        budget=budget - num_prompt,
    )
    if not drafts:
        return drafts
    headroom = len(running) * pool.windows.num_groups
    for request in requests:
        if request.request_id in drafts:
            draft_ids = without_stops(request, drafts[request.request_id], eos_ids)
            room = page_tables.take_draft_pages(request, pool, len(draft_ids), headroom=headroom)
            drafts[request.request_id] = draft_ids[:room]
    return drafts


def notify_computed(speculation: Speculation | None, requests: Sequence[Request], batch: Batch) -> None:
    """Passes the verified positions of an applied step to proposers that need them. Called before pages of requests
    that ended in this step are used again."""
    if speculation is None or not speculation.reads_steps:
        return
    rows: list[ComputedRow] = []
    first = 0
    for request, row in zip(requests, batch.rows, strict=True):
        stop = request.num_computed
        if row.start < stop:
            token_ids = request.tokens(row.start, stop)
            rows.append(
                ComputedRow(
                    request_id=request.request_id,
                    start=row.start,
                    token_ids=token_ids,
                    next_id=request.tokens(stop, stop + 1)[0] if stop < request.num_tokens else token_ids[-1],
                    first_hidden=first,
                    pages=row.block_tables[0],
                    prompt_len=row.prompt_len,
                    goes_on=request.state is State.RUNNING and stop < request.num_tokens,
                )
            )
        first += row.num_tokens
    speculation.computed(rows)


def without_waiting(speculation: Speculation, decoding: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
    """Leaves out requests that sit out a step until their token in flight is known: drafts follow known tokens."""
    asking = [each.request_id for each, _ in decoding if each.num_due == 1]
    waiting = speculation.promising(asking, num_rows=len(decoding))
    return [(each, num_blocks) for each, num_blocks in decoding if each.request_id not in waiting]


def draft_counts(
    speculation: Speculation | None, request: Request, num_tokens: int, *, is_last: bool
) -> Mapping[str, Any]:
    """Counts of the request's drafts since its last update with counts, as fields of an update. An update of one token
    has none: it stays plain."""
    if speculation is None or (num_tokens <= 1 and not is_last):
        return {}
    counts = speculation.take_counts(request.request_id)
    return asdict(counts) if counts.num_drafted else {}
