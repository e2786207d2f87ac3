"""Simulated clients: they send requests, compare every token with the toy model's, and record the outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import takewhile

from cluster.bench.bench_report import RequestRecord
from cluster.bench.prompts import Prompts
from cluster.simulate.node.device import WEIGHT, weighed
from cluster.simulate.run.deployment import SimulatedDeployment, SimulatedGateway
from cluster.simulate.run.simulation_config import VOCAB_SIZE
from cluster.simulate.world.event_log import SimulationLog
from cluster.simulate.world.simulated_load import SessionTurn, UserSession
from kvtransfer.hashing import Remembering, chain_hashes
from protos.errors import BatonError
from protos.values import BlockHash, SamplingParams
from router.jobs import Job, TokenDelta
from router.traces.request_trace import EventKind
from workers.toy import MODULUS, STRIDE

ABORTED = "aborted"
GATEWAY_LOST = "gateway_lost"
ALONE = "alone"

PROMPT_IDS = 256
"""Few enough ids for the processor's cache, and enough that two blocks of 16 are never equal by chance."""


class Answer:
    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._total = int(weighed(prompt_ids, 0).sum())
        self._position = len(prompt_ids)
        self._params = params

    def next(self, count: int) -> list[int]:
        assert self._params.temperature == 0.0
        total, position, token_ids = self._total, self._position, []
        for _ in range(count):
            token_id = (WEIGHT * STRIDE + total) % MODULUS % VOCAB_SIZE
            kv = (token_id + 1) * 7919 + position  # `toy_kv`, inlined to save a call per token
            position += 1
            total += position * kv
            token_ids.append(token_id)
        self._total, self._position = total, position
        return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`at_s`: since the load began."""

    request_id: str
    at_s: float
    code: str
    message: str


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """`handed_over`: another worker than the prefill worker sent tokens."""

    request_id: str
    last_message_s: float
    task: asyncio.Task[None] | None = None
    handed_over: bool = False
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_cached: int | None = None


class Clients:
    """`num_handed_over`: complete answers that continued on another worker. `failures`: of requests that have ended."""

    def __init__(self, deployment: SimulatedDeployment, event_log: SimulationLog, *, seed: int) -> None:
        self.records: list[RequestRecord] = []
        self.running: dict[str, SimulatedRequest] = {}
        self.num_handed_over = 0
        self.failures: list[Failure] = []
        self._deployment = deployment
        self._event_log = event_log
        self._prompts = Prompts(seed=seed, vocab_size=VOCAB_SIZE, num_ids=PROMPT_IDS)
        self._loop = asyncio.get_running_loop()
        self._start_s = 0.0
        self._num_asked = 0
        config = deployment.config
        self._prefixes = Prefixes(config.spec.layout.block_size) if config.audit_every else None

    async def run(self, sessions: Sequence[UserSession]) -> None:
        """Returns when every session has ended."""
        self._start_s = self._loop.time()
        async with asyncio.TaskGroup() as group:
            for session in sorted(sessions, key=lambda session: (session.due_s, session.number)):
                await asyncio.sleep(max(0.0, self._start_s + session.due_s - self._loop.time()))
                group.create_task(self._session(session), name=f"session {session.number}")

    def abort(self, request_id: str) -> None:
        request = self.running[request_id]
        if request.task is not None:
            request.task.cancel()

    async def _session(self, session: UserSession) -> None:
        conversation: tuple[int, ...] = ()
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.pause_s)
            prompt_ids = Remembering((*conversation, *self._prompts.ids(turn.spans)))
            answer = await self._ask(_name(session, number), turn, prompt_ids, session.tenant)
            if answer is None:
                return
            conversation = prompt_ids + answer

    async def _ask(
        self, request_id: str, turn: SessionTurn, prompt_ids: tuple[int, ...], tenant: str
    ) -> tuple[int, ...] | None:
        """Returns the answer, or None if it was not completed."""
        gateway = self._deployment.gateway_for(self._num_asked)
        index, self._num_asked = self._num_asked, self._num_asked + 1
        sent_s = self._loop.time()
        request = self.running[request_id] = SimulatedRequest(request_id=request_id, last_message_s=sent_s)
        self._deployment.gaps.begun(request_id)
        self._event_log.note("asked", request_id, tokens=len(prompt_ids), gateway=gateway.name)
        job = self._job(request_id, turn, prompt_ids, tenant)
        if self._prefixes is not None:
            self._prefixes.add(job)
        listening = self._listen(gateway, job, request, turn.read_s)
        request.task = asyncio.create_task(listening, name=f"request {request_id}")
        gateway.requests[request.task] = None
        error, retry_after_s = "", None
        try:
            await request.task
        except BatonError as failed:
            error, retry_after_s = failed.code, failed.retry_after_s
        except asyncio.CancelledError:
            error = ABORTED if gateway.alive else GATEWAY_LOST
        del self.running[request_id], gateway.requests[request.task]
        if self._prefixes is not None:
            self._prefixes.answered(job, request.tokens)
        self._deployment.gaps.ended(request_id)
        self.num_handed_over += request.handed_over and not error
        self._note_failures(gateway, request_id)
        by = self._deciders(gateway, request_id)
        self._event_log.note("ended", request_id, tokens=len(request.tokens), error=error or "none", by=by)
        self.records.append(
            RequestRecord(
                index=index,
                due_s=sent_s - self._start_s,
                sent_s=sent_s - self._start_s,
                arrivals_s=tuple(at_s - self._start_s for at_s in request.times),
                num_prompt=len(prompt_ids),
                num_output=len(request.tokens),
                num_cached=request.num_cached,
                error=error,
                retry_after_s=retry_after_s,
            )
        )
        return tuple(request.tokens) if not error else None

    def _job(self, request_id: str, turn: SessionTurn, prompt_ids: tuple[int, ...], tenant: str) -> Job:
        return Job(
            request_id=request_id,
            group_id=request_id,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=turn.num_output,
                ignore_eos=True,
                prompt_logprobs=0 if turn.prompt_logprobs else None,
            ),
            cache_salt=tenant.encode(),
            tenant=tenant,
            max_ttft_s=self._deployment.config.max_ttft_s,
        )

    async def _listen(self, gateway: SimulatedGateway, job: Job, request: SimulatedRequest, read_s: float) -> None:
        tokens = request.tokens
        answer = Answer(job.prompt_ids, job.sampling)
        ended, num_logprobs = False, 0
        async with gateway.traced(job), aclosing(gateway.admission(job)) as deltas:
            async for delta in deltas:
                assert not ended, f"{job.request_id} went on after its end"
                num_logprobs = _check_prompt_logprobs(job, delta, num_logprobs)
                must = answer.next(len(delta.token_ids))
                assert list(delta.token_ids) == must, (
                    f"tokens {len(tokens)} and on of {job.request_id} are {delta.token_ids}, it must be {must}: "
                    f"{self._deciders(gateway, job.request_id)}"
                )
                tokens += must
                now = request.last_message_s = self._loop.time()
                if delta.token_ids:
                    if not request.times:
                        self._check_cached(gateway, job, delta.num_cached_tokens)
                        request.num_cached = delta.num_cached_tokens
                        request.times.append(now)
                        self._event_log.note("first token", job.request_id, by=self._deciders(gateway, job.request_id))
                    else:
                        if len(request.times) == 1:  # a single token is not handed over
                            by = self._deciders(gateway, job.request_id)
                            request.handed_over = not by.rpartition(",")[2].startswith(ALONE)
                        request.times[1:] = [now]
                ended = delta.finish_reason is not None
                if read_s and not ended:
                    await asyncio.sleep(read_s)
        assert ended, f"{job.request_id} ended without saying so"
        assert len(tokens) == job.sampling.max_tokens, f"{job.request_id} has {len(tokens)} tokens"
        num_due = len(job.prompt_ids) - 1 if job.sampling.prompt_logprobs is not None else 0
        assert num_logprobs == num_due, f"{job.request_id} has {num_logprobs} logprobs of its prompt, not {num_due}"

    def _check_cached(self, gateway: SimulatedGateway, job: Job, num_cached: int) -> None:
        """Checks that reported cached tokens are at most those shared with the tenant's earlier requests and, unless an
        attempt failed, exactly those that the worker did not compute."""
        if self._prefixes is None:
            return
        most = self._prefixes.num_shared(job)
        assert num_cached <= most, (
            f"{job.request_id} has {num_cached} cached tokens, it shares {most} with earlier requests of its tenant"
        )
        decisions = gateway.dispatcher.decision(job.request_id)
        worker = self._deployment.workers.get(decisions[-1].prefill or decisions[-1].decode)
        began = worker.device.began.get(f"{job.request_id}.1") if worker is not None else None
        assert began in (None, num_cached) or len(decisions) > 1, (
            f"{job.request_id} has {num_cached} cached tokens, its worker computed from {began} on"
        )

    def _note_failures(self, gateway: SimulatedGateway, request_id: str) -> None:
        for record in gateway.records.find(request_id):
            if record.num_failures:
                self.failures += [
                    Failure(
                        request_id=request_id,
                        at_s=event.at_s - self._start_s,
                        code=str(event.facts["code"]),
                        message=str(event.facts["message"]),
                    )
                    for event in record.events
                    if event.what is EventKind.FAILED
                ]

    def _deciders(self, gateway: SimulatedGateway, request_id: str) -> str:
        decisions = gateway.dispatcher.decision(request_id)
        return ",".join(f"{decision.prefill or ALONE}>{decision.decode}" for decision in decisions)


def _check_prompt_logprobs(job: Job, delta: TokenDelta, num_before: int) -> int:
    """Returns the number of entries so far; entry i belongs to the prompt's token i + 1."""
    ids = tuple(entry.chosen.token_id for entry in delta.prompt_logprobs)
    num = num_before + len(ids)
    assert ids == job.prompt_ids[num_before + 1 : num + 1], (
        f"logprobs {num_before} and on of {job.request_id}'s prompt are of tokens {ids}"
    )
    return num


class Prefixes:
    """The block hashes of each tenant's requests."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_holders: Counter[BlockHash] = Counter()

    def add(self, job: Job) -> None:
        self._num_holders.update(job.hashes(self._block_size))

    def answered(self, job: Job, tokens: Sequence[int]) -> None:
        size, prompt = self._block_size, job.hashes(self._block_size)
        rest = (*job.prompt_ids[len(prompt) * size :], *tokens)
        parent = prompt[-1] if prompt else None
        self._num_holders.update(chain_hashes(rest, size, salt=job.cache_salt, parent=parent))

    def num_shared(self, job: Job) -> int:
        """The prompt tokens, in full blocks, with which another request of the tenant begins."""
        shared = takewhile(lambda block_hash: self._num_holders[block_hash] > 1, job.hashes(self._block_size))
        return self._block_size * sum(1 for _ in shared)


def _name(session: UserSession, turn: int) -> str:
    return f"r{session.number}.{turn}"
