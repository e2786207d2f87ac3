"""Finds the request that kills its workers before it has killed them all, and blames nobody who was only beside it.

worker lost ─▶ a strike for each job on it ─▶ second strike, the only one in that loss ─▶ condemned
                      ▲         │                        │
   LEAST_PROGRESS tokens since: forgotten                └─ several in that loss: each is tried apart, one after
                                                            another; a loss then condemns, progress acquits
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from protos.errors import RequestKillsWorkers

LEAST_PROGRESS = 16
"""So many tokens beyond the last loss, and a job had nothing to do with it."""
MAX_STRIKES = 2
PAUSE_S = 0.05
"""For the other jobs of a lost worker to come forward: they all learn of it at once."""
MAX_LOSSES = 256

Life = tuple[str, int]
"""A worker's id and incarnation."""


@dataclass(slots=True)
class Suspicion:
    """What is held against one job. `apart`: it struck out beside others, so it is tried by itself."""

    strikes: int = 0
    num_tokens: int = 0
    apart: bool = False


class Suspects:
    """One for a dispatcher. Lives on its event loop."""

    def __init__(self) -> None:
        self._struck_out: OrderedDict[Life, set[str]] = OrderedDict()
        self._trial = asyncio.Lock()
        self.num_condemned = 0

    async def lost(self, job_id: str, suspicion: Suspicion, life: Life, num_tokens: int) -> None:
        """A worker was lost with the job on it, which has `num_tokens` of its answer. Returns when the job may be tried
        again; raises RequestKillsWorkers when it may not."""
        if num_tokens >= suspicion.num_tokens + LEAST_PROGRESS:
            suspicion.strikes = 0
        suspicion.strikes += 1
        suspicion.num_tokens = num_tokens
        if suspicion.apart:
            raise self._condemned(job_id, suspicion, life)
        if suspicion.strikes < MAX_STRIKES:
            return
        others = self._struck_out.setdefault(life, set())
        others.add(job_id)
        while len(self._struck_out) > MAX_LOSSES:
            self._struck_out.popitem(last=False)
        await asyncio.sleep(PAUSE_S)
        if len(others) == 1:
            raise self._condemned(job_id, suspicion, life)
        suspicion.apart = True

    def trial(self, suspicion: Suspicion) -> Trial:
        """To be begun before an attempt, told of its progress, and ended after it."""
        return Trial(suspicion, self._trial)

    def _condemned(self, job_id: str, suspicion: Suspicion, life: Life) -> RequestKillsWorkers:
        self.num_condemned += 1
        return RequestKillsWorkers(
            f"request {job_id} was running on {suspicion.strikes} workers when they died, the last of them {life[0]}: "
            "it is not tried again. Their logs say what they died of; please report it"
        )


class Trial:
    """An attempt of a job. One that is tried apart holds off the others that are, until it has made progress."""

    def __init__(self, suspicion: Suspicion, lock: asyncio.Lock) -> None:
        self._suspicion = suspicion
        self._lock = lock
        self._holds = False

    async def begin(self, *, until: float) -> None:
        """Returns at once unless the job is tried apart. Raises TimeoutError when its turn does not come by then."""
        if self._suspicion.apart:
            async with asyncio.timeout_at(until):
                await self._lock.acquire()
            self._holds = True

    def progressed(self, num_tokens: int) -> None:
        """The answer has so many tokens now."""
        if self._holds and num_tokens >= self._suspicion.num_tokens + LEAST_PROGRESS:
            self._suspicion.apart = False
            self._suspicion.strikes = 0
            self.end()

    def end(self) -> None:
        """More than once is no error."""
        if self._holds:
            self._holds = False
            self._lock.release()
