"""A worker that comes back with an empty cache, beside others that have what everybody asks for."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from protos.values import WorkerLoad, WorkerRole
from router.router_config import RouterConfig
from router.routing.candidate_columns import Candidate, CandidateTable
from router.routing.decision import RequestView
from router.routing.predictor import Predictor
from router.routing.registry import policy_of
from tests.unit.router.predicting import predicted

ROLE = WorkerRole.COLOCATED
SYSTEM, QUESTION, ANSWER = 4096, 300, 60
READ_S, STEP_S, BESIDE_S = 2.5e-5, 0.009, 1e-4  # a token, a step, each answer of it


class Agents:
    """Requests of eight kinds, each with a system prompt of its own, decided one after the other. A worker has cached
    what it has read."""

    def __init__(self) -> None:
        self.cached: dict[str, set[int]] = {}
        self._predictor = Predictor()
        self._policy = policy_of(RouterConfig(model_path=Path("m"), model_name="m"), "slo")
        self._until_s: dict[str, list[float]] = {}
        self._draw, self._now, self._count = random.Random(0), 0.0, 0

    def join(self, *names: str) -> None:
        self.cached |= {name: set() for name in names}
        self._until_s |= {name: [] for name in names}

    def ask(self, num_requests: int, *, rate: float) -> Counter[str]:
        """Who got how many, of so many a second."""
        got = Counter(dict.fromkeys(self.cached, 0))
        for _ in range(num_requests):
            self._now += self._draw.expovariate(rate)
            got[self._one(self._draw.randrange(8))] += 1
        return got

    def _one(self, kind: int) -> str:
        view = RequestView(
            request_id=f"r{self._count}", num_tokens=SYSTEM + QUESTION, block_size=16, num_decided=self._count,
            answer_tokens=self._predictor.answer_tokens,
        )  # fmt: skip
        candidates = [self._candidate(name, kind) for name in self.cached]
        chosen = self._policy(view, CandidateTable.of(candidates)).decode
        running, cached = self._until_s[chosen], kind in self.cached[chosen]
        num_read, beside, now = QUESTION if cached else SYSTEM + QUESTION, len(running), self._now
        self._predictor.routed(chosen, ROLE, num_read, beside=beside, now=now)
        read_s, step_s = 0.005 + READ_S * num_read, STEP_S + BESIDE_S * (beside + 1)
        self._predictor.saw_first_token(chosen, ROLE, num_tokens=num_read, seconds=read_s, now=now)
        self._predictor.saw_answer(chosen, ROLE, num_sequences=beside + 1, num_tokens=ANSWER, seconds=step_s, now=now)
        running.append(now + read_s + ANSWER * step_s)
        self.cached[chosen].add(kind)
        self._count += 1
        return chosen

    def _candidate(self, name: str, kind: int) -> Candidate:
        running = self._until_s[name] = [until_s for until_s in self._until_s[name] if until_s > self._now]
        load = WorkerLoad(num_running=len(running), prefill_tokens_per_s=1 / READ_S, decode_step_s=STEP_S)
        return predicted(
            self._predictor, name, ROLE, load, now=self._now,
            num_cached_tokens=SYSTEM if kind in self.cached[name] else 0,
            num_requests=len(running), num_free_blocks=1000, num_blocks=1000,
            prefill_tokens_per_s=load.prefill_tokens_per_s, decode_step_s=STEP_S,
        )  # fmt: skip


@pytest.mark.parametrize("rate", [12.0, 30.0, 60.0])
def test_a_worker_that_joins_has_its_share_at_once(rate: float) -> None:
    agents = Agents()
    agents.join("c0", "c1", "c2")
    agents.ask(300, rate=rate)
    agents.join("c3")
    soon, later = agents.ask(120, rate=rate), agents.ask(400, rate=rate)
    assert 15 < soon["c3"] < 60, soon
    assert max(later.values()) / 100 < 1.3, later
