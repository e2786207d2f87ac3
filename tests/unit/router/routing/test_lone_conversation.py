"""One client and one conversation over idle workers of one kind: its turns stay where its prefix is.

Policy, predictor and the workers' own measure of their pace are the real ones; how long things take, with noise and
stalls as on a busy machine, and what is cached are made up.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from protos.values import WorkerLoad, WorkerRole
from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, RequestView
from router.routing.predictor import Predictor
from router.routing.registry import policy_of
from tests.unit.router.predicting import predicted
from workers.batch import Batch, Row
from workers.engine.speed import EngineSpeed

BLOCK_SIZE, BLOCK_BYTES = 16, 49_152
ANSWER = 30


class Worker:
    def __init__(self, name: str, role: WorkerRole) -> None:
        self.name, self.role = name, role
        self.num_cached = 0
        self.speed = EngineSpeed()
        self.is_cold = True

    def load(self) -> WorkerLoad:
        speed = self.speed
        return WorkerLoad(prefill_tokens_per_s=speed.prefill_tokens_per_s, decode_step_s=speed.decode_step_s)


class Town:
    """Idle workers, and how long what they do takes."""

    def __init__(self, seed: int, **pools: WorkerRole) -> None:
        self.workers = [Worker(f"{pool}{number}", role) for pool, role in pools.items() for number in range(2)]
        self.predictor = Predictor()
        self.now = 0.0
        self._policy = policy_of(RouterConfig(model_path=Path("m"), model_name="m"))
        self._draw = random.Random(seed)
        self._num_decided = 0

    def candidates(self, num_tokens: int) -> CandidateTable:
        offers = []
        for worker in self.workers:
            load = worker.load()
            offers.append(
                predicted(
                    self.predictor, worker.name, worker.role, load, now=self.now,
                    num_cached_tokens=min(worker.num_cached // BLOCK_SIZE * BLOCK_SIZE, num_tokens - 1),
                    num_free_blocks=9000, num_blocks=9000,
                    prefill_tokens_per_s=load.prefill_tokens_per_s, decode_step_s=load.decode_step_s,
                )
            )  # fmt: skip
        return CandidateTable.of(offers)

    def turn(self, num_tokens: int) -> tuple[Decision, CandidateTable]:
        """A request is decided on, answered and learned from."""
        predictor, offered = self.predictor, self.candidates(num_tokens)
        view = RequestView(
            request_id="r", num_tokens=num_tokens, block_size=BLOCK_SIZE, num_decided=self._num_decided,
            answer_tokens=predictor.answer_tokens, block_bytes=BLOCK_BYTES, lanes=predictor.lanes,
        )  # fmt: skip
        decision = self._policy(view, offered)
        self._num_decided += 1
        by_name = {worker.name: worker for worker in self.workers}
        reader, writer = by_name[decision.prefill or decision.decode], by_name[decision.decode]
        num_read = num_tokens - offered.candidate(reader.name).num_cached_tokens
        predictor.routed(reader.name, reader.role, num_read, beside=0, now=self.now)
        step_s = self._noisy(0.002 + 7e-5 * num_read)
        first_s = self._noisy(0.006) + step_s + (self._draw.uniform(0.05, 1.0) if reader.is_cold else 0.0)
        reader.is_cold = False
        reader.speed.observe(Batch(rows=(_row(num_read),)), step_s)
        self.now += first_s
        predictor.saw_first_token(
            reader.name, reader.role, num_tokens=num_read, seconds=first_s, now=self.now, on_idle=True
        )
        if reader is not writer:
            seconds = self._noisy(0.004)
            self.now += seconds
            predictor.saw_transfer(
                reader.name, writer.name, num_bytes=num_read * BLOCK_BYTES / BLOCK_SIZE, seconds=seconds, now=self.now
            )
        token_s = 0.002 * (1 + num_tokens / 2000) * self._draw.lognormvariate(0, 0.1)
        writer.speed.observe_decode(token_s)
        self.now += token_s * ANSWER
        predictor.saw_answer(
            writer.name, writer.role, num_sequences=1, num_tokens=ANSWER, seconds=token_s, now=self.now
        )
        reader.num_cached, writer.num_cached = num_tokens, num_tokens + ANSWER - 1
        self.now += self._draw.uniform(0.2, 2.0)
        return decision, offered

    def _noisy(self, seconds: float) -> float:
        stall = self._draw.uniform(5, 20) if self._draw.random() < 0.02 else 1.0
        return seconds * self._draw.lognormvariate(0, 0.3) * stall


def _row(num_tokens: int) -> Row:
    return Row(request_id="r", token_ids=(1,) * num_tokens, start=0, block_tables=((),))


@pytest.mark.parametrize(
    "pools",
    [{"c": WorkerRole.COLOCATED}, {"p": WorkerRole.PREFILL, "d": WorkerRole.DECODE}],
    ids=["colocated", "two pools"],
)
def test_a_lone_conversation_stays_with_its_prefix(
    pools: dict[str, WorkerRole],
) -> None:
    away = num_turns = handed = 0
    for seed in range(8):
        town, num_tokens = Town(seed, **pools), 0
        for _ in range(40):
            num_tokens += 20
            decision, offered = town.turn(num_tokens)
            cached = {worker.worker_id: worker.num_cached_tokens for worker in offered}
            for chosen in filter(None, (decision.prefill, decision.decode)):
                rivals = [worker.worker_id for worker in offered if worker.worker_id[0] == chosen[0]]
                away += any(cached[rival] > cached[chosen] for rival in rivals)
            num_tokens += ANSWER
            num_turns += 1
            handed += decision.prefill is not None
    assert away <= num_turns // 100
    assert handed < num_turns / 4, "what was answered is cached where it was written: there its next turn is read"
