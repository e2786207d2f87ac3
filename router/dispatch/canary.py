"""The parity canary runs one in N greedy requests again on one worker, and compares the tokens.

    job ─▶ as usual ─▶ client             prefill, transfer, decode, caches, migrations
      └──▶ later ───▶ one worker          the whole prompt computed there, nothing cached, nothing migrated
                          └─▶ the first position that differs: logged, counted

The second run starts after the first one, one at a time, at the lowest priority, under a salt of its own, so that no
other request shares its blocks. No client waits for it. In bfloat16 the batch decides between two tokens of nearly
equal probability. So one difference is a reason to look, and several at low positions are a reason to worry.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum

from protos.errors import BatonError
from router.jobs import Generate, Job, JobClient, TokenDelta
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, Policy, RequestView

log = logging.getLogger("baton.router")

SALT = b"canary"
PRIORITY = -100


class CanaryOutcome(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    FAILED = "failed"  # the second run ended early
    SKIPPED = "skipped"  # the second run was due while another one was running


def by_one_worker(policy: Policy) -> Policy:
    def decide(view: RequestView, candidates: CandidateTable) -> Decision:
        return replace(policy(view, candidates.decode_pool), prefill=None)

    return decide


def first_difference(first: Sequence[int], other: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(other) else min(len(first), len(other))


class Canary:
    """Wraps a `Generate` and runs every `every`-th greedy request again with `alone`; never if `every` is 0. The owner
    calls `close` at the end."""

    def __init__(self, generate: Generate, *, alone: Generate, every: int) -> None:
        self._generate = generate
        self._alone = alone
        self._every = every
        self._num_greedy = 0
        self._running: asyncio.Task[None] | None = None
        self.outcomes: Counter[str] = Counter()

    def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        return self._twice(job) if self._is_due(job) else self._generate(job)

    async def idle(self) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _twice(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        token_ids: list[int] = []
        job.client.sink = None  # every token is compared
        async with aclosing(self._generate(job)) as deltas:
            async for delta in deltas:
                token_ids += delta.token_ids
                if delta.finish_reason is not None:
                    self._begin(job, token_ids)
                yield delta

    def _is_due(self, job: Job) -> bool:
        if not self._every or job.sampling.temperature > 0:
            return False
        self._num_greedy += 1
        return self._num_greedy % self._every == 0

    def _begin(self, job: Job, token_ids: Sequence[int]) -> None:
        if self._running is not None and not self._running.done():
            self.outcomes[CanaryOutcome.SKIPPED] += 1
            return
        self._running = asyncio.create_task(self._compare(job, token_ids), name=f"canary of {job.request_id}")

    async def _compare(self, job: Job, token_ids: Sequence[int]) -> None:
        again = replace(
            job,
            request_id=f"{job.request_id}-canary",
            client=JobClient(),
            cache_salt=SALT + job.cache_salt,
            priority=PRIORITY,
            sampling=replace(job.sampling, logprobs=None, prompt_logprobs=None),
        )
        again_ids: list[int] = []
        try:
            async with aclosing(self._alone(again)) as deltas:
                async for delta in deltas:
                    again_ids += delta.token_ids
        except BatonError as error:
            self.outcomes[CanaryOutcome.FAILED] += 1
            log.info(
                "the canary of %s could not be run: %s",
                job.request_id,
                error.message,
                extra={"request": job.request_id},
            )
            return
        except Exception:  # the task is not awaited, and the next canary must run after any outcome of this one
            self.outcomes[CanaryOutcome.FAILED] += 1
            log.exception("the canary of %s failed: internal error", job.request_id, extra={"request": job.request_id})
            return
        index = first_difference(token_ids, again_ids)
        self.outcomes[CanaryOutcome.SAME if index is None else CanaryOutcome.DIFFERENT] += 1
        if index is not None:
            log.warning(
                "parity: %s differs from a run on one worker at token %d of %d: %s, not %s",
                job.request_id, index, len(token_ids), list(token_ids[index : index + 4]), again_ids[index : index + 4],
                extra={"request": job.request_id},
            )  # fmt: skip
