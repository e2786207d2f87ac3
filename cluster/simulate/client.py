"""Simulated clients: they ask, check every token that comes against the one that must come, and keep a record.

The toy model's answers are known in advance: a token that is lost, doubled or wrong is seen when it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from cluster.bench.prompts import Prompts
from cluster.bench.report import Record
from cluster.simulate.chronicle import Chronicle
from cluster.simulate.config import VOCAB_SIZE
from cluster.simulate.deployment import Deployment, Gateway
from cluster.simulate.device import WEIGHT, weighed
from cluster.simulate.lanes import Travel
from cluster.simulate.workload import Session, Turn
from kvtransfer.hashing import Remembering
from protos.errors import BatonError
from protos.values import SamplingParams
from router.generation import Job
from workers.toy import MODULUS, STRIDE

PULL = "/pull"
ABORTED = "aborted"
GATEWAY_LOST = "gateway_lost"
ALONE = "alone"

PROMPT_IDS = 256
"""So many ids simulated prompts are made of: few enough to stay in the processor's cache, and a block of 16 of them
never equals another by chance."""


class Answer:
    """The tokens that must follow a prompt, one by one."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._total = int(weighed(prompt_ids, 0).sum())
        self._position = len(prompt_ids)
        self._params = params

    def next(self, count: int) -> list[int]:
        """The next ones, so many."""
        assert self._params.temperature == 0.0
        total, position, token_ids = self._total, self._position, []
        for _ in range(count):
            token_id = (WEIGHT * STRIDE + total) % MODULUS % VOCAB_SIZE
            kv = (token_id + 1) * 7919 + position  # `toy_kv`, without a call for each token
            position += 1
            total += position * kv
            token_ids.append(token_id)
        self._total, self._position = total, position
        return token_ids


@dataclass(slots=True, eq=False)
class Transfers:
    """Of answers whose KV went from one worker to another: `travelled_s` it was on its way, from its first part's offer
    to its last one's arrival; of that their clients saw `waited_s`, before the first token of a prompt whose beginning
    was pulled, or after the first token of an answer that was handed over. `answers_s` they took from end to end."""

    travelled_s: float = 0.0
    waited_s: float = 0.0
    answers_s: float = 0.0

    def count(self, travels: Mapping[str, Travel], first_s: float, e2e_s: float) -> None:
        for ticket_id, travel in travels.items():
            self.travelled_s += travel.over_s - travel.begun_s
            self.waited_s += travel.waited_s(0.0 if ticket_id.endswith(PULL) else first_s)
        self.answers_s += e2e_s


@dataclass(slots=True, eq=False)
class Asked:
    """A request under way. `heard_s` is when something last came of it; it is `handed_over` when tokens come of another
    worker than the one that read the prompt."""

    request_id: str
    heard_s: float
    task: asyncio.Task[None] | None = None
    handed_over: bool = False
    times: list[float] = field(default_factory=list)


class Clients:
    """Runs sessions against a deployment. `records` are of requests that have ended, `asked` of those that have not;
    `num_handed_over` whole answers were begun by the worker that read the prompt, and written on by another."""

    def __init__(self, deployment: Deployment, chronicle: Chronicle, *, seed: int) -> None:
        self.records: list[Record] = []
        self.asked: dict[str, Asked] = {}
        self.num_handed_over = 0
        self.transfers = Transfers()
        self._deployment = deployment
        self._chronicle = chronicle
        self._prompts = Prompts(seed=seed, vocab_size=VOCAB_SIZE, num_ids=PROMPT_IDS)
        self._loop = asyncio.get_running_loop()
        self._start_s = 0.0
        self._num_asked = 0

    async def run(self, sessions: Sequence[Session]) -> None:
        """Returns when every session has ended."""
        self._start_s = self._loop.time()
        async with asyncio.TaskGroup() as group:
            for session in sorted(sessions, key=lambda one: (one.due_s, one.number)):
                await asyncio.sleep(max(0.0, self._start_s + session.due_s - self._loop.time()))
                group.create_task(self._session(session), name=f"session {session.number}")

    def abort(self, request_id: str) -> None:
        """Its client leaves."""
        asked = self.asked[request_id]
        if asked.task is not None:
            asked.task.cancel()

    async def _session(self, session: Session) -> None:
        said: tuple[int, ...] = ()
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.pause_s)
            prompt_ids = Remembering((*said, *self._prompts.ids(turn.spans)))
            answer = await self._ask(_name(session, number), turn, prompt_ids)
            if answer is None:
                return
            said = prompt_ids + answer

    async def _ask(self, request_id: str, turn: Turn, prompt_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """The answer, or None if it did not come to its end."""
        gateway = self._deployment.gateway_for(self._num_asked)
        index, self._num_asked = self._num_asked, self._num_asked + 1
        sent_s = self._loop.time()
        asked = self.asked[request_id] = Asked(request_id=request_id, heard_s=sent_s)
        self._deployment.gaps.begun(request_id)
        self._chronicle.note("asked", request_id, tokens=len(prompt_ids), gateway=gateway.name)
        tokens: list[int] = []
        cached: list[int] = []
        job = Job(
            request_id=request_id,
            group_id=request_id,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=turn.num_output, ignore_eos=True),
            max_ttft_s=self._deployment.config.max_ttft_s,
        )
        asked.task = asyncio.create_task(
            self._listen(gateway, job, asked, tokens, cached), name=f"request {request_id}"
        )
        gateway.requests[asked.task] = None
        error, retry_after_s = "", None
        try:
            await asked.task
        except BatonError as failed:
            error, retry_after_s = failed.code, failed.retry_after_s
        except asyncio.CancelledError:
            error = ABORTED if gateway.alive else GATEWAY_LOST
        del self.asked[request_id], gateway.requests[asked.task]
        self._deployment.gaps.ended(request_id)
        self.num_handed_over += asked.handed_over and not error
        if (travels := self._deployment.lanes.take(request_id)) and asked.times and not error:
            self.transfers.count(travels, asked.times[0], asked.times[-1] - sent_s)
        by = self._deciders(gateway, request_id)
        self._chronicle.note("ended", request_id, tokens=len(tokens), error=error or "none", by=by)
        self.records.append(
            Record(
                index=index,
                due_s=sent_s - self._start_s,
                sent_s=sent_s - self._start_s,
                arrivals_s=tuple(at_s - self._start_s for at_s in asked.times),
                num_prompt=len(prompt_ids),
                num_output=len(tokens),
                num_cached=cached[0] if cached else None,
                error=error,
                retry_after_s=retry_after_s,
            )
        )
        return tuple(tokens) if not error else None

    async def _listen(self, gateway: Gateway, job: Job, asked: Asked, tokens: list[int], cached: list[int]) -> None:
        answer = Answer(job.prompt_ids, job.sampling)
        ended = False
        if self._deployment.config.request_s:
            await gateway.receive()
        async with aclosing(gateway.admission(job)) as deltas:
            async for delta in deltas:
                assert not ended, f"{job.request_id} went on after its end"
                must = answer.next(len(delta.token_ids))
                assert list(delta.token_ids) == must, (
                    f"tokens {len(tokens)} and on of {job.request_id} are {delta.token_ids}, it must be {must}: "
                    f"{self._deciders(gateway, job.request_id)}"
                )
                tokens += must
                now = asked.heard_s = self._loop.time()
                if delta.token_ids:
                    if not asked.times:
                        cached.append(delta.num_cached_tokens)
                        asked.times.append(now)
                        self._chronicle.note("first token", job.request_id, by=self._deciders(gateway, job.request_id))
                    else:
                        if len(asked.times) == 1:  # the first token may have been the last: then nobody takes over
                            by = self._deciders(gateway, job.request_id)
                            asked.handed_over = not by.rpartition(",")[2].startswith(ALONE)
                        asked.times[1:] = [now]
                ended = delta.finish_reason is not None
        assert ended, f"{job.request_id} ended without saying so"
        assert len(tokens) == job.sampling.max_tokens, f"{job.request_id} has {len(tokens)} tokens"

    def _deciders(self, gateway: Gateway, request_id: str) -> str:
        decisions = gateway.dispatcher.decision(request_id)
        return ",".join(f"{one.prefill or ALONE}>{one.decode}" for one in decisions)


def _name(session: Session, turn: int) -> str:
    return f"r{session.number}.{turn}"
