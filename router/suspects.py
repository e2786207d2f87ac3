"""Finds the request that kills its workers before it has killed them all, and blames nobody who was only beside it.

    worker lost ─▶ a strike for each job on it ─▶ `max_kills` strikes, the only one in that loss ─▶ condemned
                               │                             │
          a token since the last one: forgotten              └─ several in that loss: each is tried apart, one after
                                                                another; a loss then condemns, a token acquits

What kills and gets on all the same, a few tokens a life, is bounded by the attempts a request has.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from protos.errors import Overloaded, RequestKillsWorkers

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

    def __init__(self, *, max_kills: int) -> None:
        self._max_kills = max_kills
        self._struck_out: OrderedDict[Life, set[str]] = OrderedDict()
        self._trial = asyncio.Lock()
        self.num_condemned = 0

    async def lost(self, job_id: str, suspicion: Suspicion, life: Life, num_tokens: int) -> None:
        """A worker was lost with the job on it, which has `num_tokens` of its answer. Returns when the job may be tried
        again; raises RequestKillsWorkers when it may not."""
        if num_tokens > suspicion.num_tokens:
            suspicion.strikes = 0
            suspicion.apart = False
        suspicion.strikes += 1
        suspicion.num_tokens = num_tokens
        if suspicion.strikes < self._max_kills:
            return
        if suspicion.apart:
            raise self._condemned(job_id, suspicion, life)
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

    def assert_idle(self) -> None:
        assert not self._trial.locked(), "a trial goes on after all attempts have ended"

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

    async def begin(self, *, patience_s: float) -> None:
        """Returns at once unless the job is tried apart. Raises Overloaded when its turn does not come in time."""
        if not self._suspicion.apart:
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._lock.acquire()
        except TimeoutError:
            raise Overloaded(
                "workers died twice with this request and others on them, which are tried one by one: its turn did not "
                f"come within {patience_s:g} s"
            ) from None
        self._holds = True

    def progressed(self, num_tokens: int) -> None:
        """The answer has so many tokens now."""
        if self._holds and num_tokens > self._suspicion.num_tokens:
            self.end()

    def end(self) -> None:
        """More than once is no error."""
        if self._holds:
            self._holds = False
            self._lock.release()
