"""Routes a trace over workers in virtual time, by the router's own policies, index, feed and predictions.

A worker prefills prompts one after the other at a constant speed, decodes answers beside them, and caches blocks in the
engine's own block pool. Only time is modelled: what is cached, evicted, matched, predicted and chosen is decided by the
production code. Deterministic: two replays of one trace are equal.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from cluster.bench.bench_load import PrefixSpan
from cluster.simulate.world.simulated_load import UserSession
from kvtransfer.events import EventLog
from protos.values import BlockHash, WorkerLoad, WorkerRole
from router.prefix.feed import Feed
from router.prefix.index import PrefixIndex
from router.routing.candidate_columns import Candidate, CandidateTable, WorkerSet
from router.routing.decision import Policy, RequestView
from router.routing.predictor import Predictor
from router.routing.request_seconds import estimate
from workers.kv.block_pool import BlockPool

ROLE = WorkerRole.COLOCATED
_ANSWER = 99  # the kind of spans that answers are
SIBLING_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. `hashes` are of the prompt's full blocks."""

    at_s: float
    num_prompt: int
    num_output: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpeed:
    """A worker's: prompt tokens a second, and seconds of a step, by how many sequences it writes."""

    read_tokens_per_s: float
    step_s: float = 0.015
    step_each_s: float = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRequest:
    """One request replayed: where, and how it went."""

    worker: int
    num_prompt: int
    num_cached: int
    ttft_s: float
    predicted_ttft_s: float
    end_s: float


def read_trace(path: Path, block_size: int) -> list[TraceRequest]:
    """Mooncake's format: equal ids at equal places are equal blocks. The last, partial block is never cached."""
    requests = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            full = row["hash_ids"][: row["input_length"] // block_size]
            requests.append(
                TraceRequest(
                    at_s=row["timestamp"] / 1000,
                    num_prompt=row["input_length"],
                    num_output=max(1, row["output_length"]),
                    hashes=tuple(int(one).to_bytes(16, "little") for one in full),
                )
            )
    return requests


def asked_of(sessions: Iterable[UserSession], block_size: int) -> list[TraceRequest]:
    """A generated workload as a trace would have it: answers take no time, and each prompt has those before it."""
    requests: list[TraceRequest] = []
    for session in sessions:
        at_s, spans, parent = session.due_s, list[PrefixSpan](), b""
        hashes: list[BlockHash] = []
        for number, turn in enumerate(session.turns):
            at_s += turn.pause_s
            spans += turn.spans
            num_prompt = sum(span.num_tokens for span in spans)
            for end in range((len(hashes) + 1) * block_size, num_prompt + 1, block_size):
                parent = blake2b(parent + _within(spans, end - block_size, end), digest_size=16).digest()
                hashes.append(parent)
            requests.append(
                TraceRequest(at_s=at_s, num_prompt=num_prompt, num_output=turn.num_output, hashes=tuple(hashes))
            )
            spans.append(PrefixSpan(key=(_ANSWER, session.number * 1000 + number), num_tokens=turn.num_output))
    return sorted(requests, key=lambda one: one.at_s)


def _within(spans: Sequence[PrefixSpan], start: int, end: int) -> bytes:
    """Which tokens of which spans are from `start` to `end`."""
    parts, before = [], 0
    for span in spans:
        low, high = max(start, before), min(end, before + span.num_tokens)
        if low < high:
            parts.append((span.key, low - before, high - before))
        before += span.num_tokens
    return repr(parts).encode()


@dataclass(slots=True)
class _Running:
    request: TraceRequest
    number: int
    decided_s: float
    ahead: int
    predicted_ttft_s: float
    blocks: list[int]
    num_cached: int = 0
    counted: int = 0
    first_s: float = 0.0
    batch: int = 0


class VirtualWorker:
    """One virtual worker: a line of prompts, one being read, answers being written."""

    def __init__(self, number: int, num_blocks: int, block_size: int, pace: WorkerSpeed) -> None:
        self.name = f"worker-{number}"
        self.log = EventLog(1, capacity=2**20)
        self.pool = BlockPool(num_blocks, block_size, self.log.record)
        self.pace = pace
        self.waiting: deque[_Running] = deque()
        self.reading: _Running | None = None
        self.num_writing = 0
        self.queued_tokens = 0
        self.computed_tokens = 0
        self.num_sent = 0

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_running=self.num_writing + (self.reading is not None),
            num_waiting=len(self.waiting),
            queued_prefill_tokens=self.queued_tokens,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            prefill_tokens_per_s=self.pace.read_tokens_per_s if self.computed_tokens else 0.0,
        )

    def begin(self) -> float | None:
        """Takes the next prompt if there is room for it; returns the seconds that its prefill takes."""
        if self.reading is not None or not self.waiting:
            return None
        one = self.waiting[0]
        cached = self.pool.match(one.request.hashes)
        if len(cached) * self.pool.block_size >= one.request.num_prompt:
            cached.pop()
        self.pool.acquire(cached)
        needed = self.pool.blocks_for(one.request.num_prompt + one.request.num_output) - len(cached)
        fresh = self.pool.allocate(needed)
        if fresh is None:
            self.pool.release(cached)
            return None
        self.waiting.popleft()
        self.reading = one
        one.blocks = [*cached, *fresh]
        one.num_cached = len(cached) * self.pool.block_size
        num_tokens = one.request.num_prompt - one.num_cached
        self.queued_tokens += one.counted - one.num_cached
        self.computed_tokens += num_tokens
        return num_tokens / self.pace.read_tokens_per_s

    def has_read(self) -> tuple[_Running, float]:
        """The prompt is read: the request, and how many seconds its answer takes from here."""
        one, self.reading = self.reading, None
        assert one is not None
        self.queued_tokens -= one.request.num_prompt - one.num_cached
        parent = b""
        for block, block_hash in zip(one.blocks, one.request.hashes, strict=False):
            if self.pool.hash_of(block) is None:
                self.pool.seal(block, block_hash, parent)
            parent = block_hash
        self.num_writing += 1
        one.batch = self.num_writing
        step_s = self.pace.step_s + self.pace.step_each_s * self.num_writing
        return one, step_s * (one.request.num_output - 1)

    def has_written(self, one: _Running) -> None:
        self.num_writing -= 1
        self.pool.release(one.blocks)


class Replay:
    """Routes a trace over `num_workers`; `outcomes` are in the order of their ends."""

    def __init__(
        self,
        *,
        policy: Policy,
        index: PrefixIndex,
        num_workers: int,
        num_blocks: int,
        block_size: int,
        pace: WorkerSpeed,
    ) -> None:
        self.workers = [VirtualWorker(number, num_blocks, block_size, pace) for number in range(num_workers)]
        self.outcomes: list[ReplayedRequest] = []
        self.predictor = Predictor()
        self._block_size = block_size
        self._policy = policy
        self._index = index
        self._feed = Feed(index, gateway_id="replay")
        self._now = 0.0
        self._num_decided = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = 0
        self._worker_set = WorkerSet((worker.name for worker in self.workers), (ROLE for _ in self.workers))
        for worker in self.workers:
            self._feed.hello(worker.name, 1)

    def run(self, trace: Iterable[TraceRequest]) -> Sequence[ReplayedRequest]:
        for request in trace:
            self._until(request.at_s)
            self._route(request)
        self._until(float("inf"))
        for worker in self.workers:
            worker.pool.assert_idle()
        return self.outcomes

    def _until(self, time_s: float) -> None:
        while self._due and self._due[0][0] <= time_s:
            self._now, _, happen = heapq.heappop(self._due)
            happen()
        self._now = max(self._now, time_s)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (self._now + seconds, self._num_due, happen))

    def _route(self, request: TraceRequest) -> None:
        matched = self._index.match(request.hashes, now=self._now).blocks
        candidates = self._candidates(matched, request)
        view = RequestView(
            request_id=f"r{self._num_decided}",
            num_tokens=request.num_prompt,
            block_size=self._block_size,
            num_decided=self._num_decided,
            answer_tokens=self.predictor.answer_tokens,
        )
        decision = self._policy(view, candidates)
        self._num_decided += 1
        number = next(i for i, worker in enumerate(self.workers) if worker.name == decision.decode)
        worker = self.workers[number]
        num_cached = min(matched.get(worker.name, 0) * self._block_size, request.num_prompt - 1)
        load = worker.load()
        beside = load.num_running + load.num_waiting
        self.predictor.routed(worker.name, ROLE, request.num_prompt - num_cached, beside=beside, now=self._now)
        self._index.expect(worker.name, request.hashes, until=self._now + SIBLING_S)
        predicted = estimate(view, *candidates.pair(decision.prefill, decision.decode))
        one = _Running(
            request=request, number=number, decided_s=self._now, blocks=[],
            ahead=worker.queued_tokens, predicted_ttft_s=predicted.ttft_s,
        )  # fmt: skip
        worker.waiting.append(one)
        one.counted = len(worker.pool.match(request.hashes)) * self._block_size
        worker.queued_tokens += request.num_prompt - one.counted
        self._begin(worker)

    def _candidates(self, matched: Mapping[str, int], request: TraceRequest) -> CandidateTable:
        loads = [worker.load() for worker in self.workers]
        candidates = [
            self._candidate(worker, load, matched.get(worker.name, 0), request)
            for worker, load in zip(self.workers, loads, strict=True)
        ]
        features = [
            self.predictor.features(worker.name, ROLE, load, now=self._now)
            for worker, load in zip(self.workers, loads, strict=True)
        ]
        table = CandidateTable(self._worker_set, CandidateTable.of(candidates).values)
        self.predictor.predict(table, np.array(features).T, now=self._now)
        return table

    def _candidate(self, worker: VirtualWorker, load: WorkerLoad, num_blocks: int, request: TraceRequest) -> Candidate:
        return Candidate(
            worker_id=worker.name,
            role=ROLE,
            num_cached_tokens=min(num_blocks * self._block_size, request.num_prompt - 1),
            num_requests=load.num_running + load.num_waiting,
            queued_prefill_tokens=load.queued_prefill_tokens,
            num_free_blocks=load.num_free_blocks,
            num_blocks=load.num_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
        )

    def _begin(self, worker: VirtualWorker) -> None:
        if (reading_s := worker.begin()) is not None:
            self._after(reading_s, lambda: self._has_read(worker))
        self._tell(worker)

    def _has_read(self, worker: VirtualWorker) -> None:
        one, writing_s = worker.has_read()
        one.first_s = self._now
        num_tokens = one.ahead + one.request.num_prompt - one.num_cached
        seconds = self._now - one.decided_s
        self.predictor.saw_first_token(worker.name, ROLE, num_tokens=num_tokens, seconds=seconds, now=self._now)
        self._after(writing_s, lambda: self._has_written(worker, one))
        self._begin(worker)

    def _has_written(self, worker: VirtualWorker, one: _Running) -> None:
        worker.has_written(one)
        num_tokens = one.request.num_output
        if num_tokens > 1:
            tpot_s = (self._now - one.first_s) / (num_tokens - 1)
            self.predictor.saw_answer(
                worker.name, ROLE,
                num_sequences=one.batch, num_tokens=num_tokens, seconds=tpot_s, now=self._now,
            )  # fmt: skip
        self.outcomes.append(
            ReplayedRequest(
                worker=one.number,
                num_prompt=one.request.num_prompt,
                num_cached=one.num_cached,
                ttft_s=one.first_s - one.decided_s,
                predicted_ttft_s=one.predicted_ttft_s,
                end_s=self._now,
            )
        )
        self._begin(worker)

    def _tell(self, worker: VirtualWorker) -> None:
        """The worker's news to the index, as its stream would bring them."""
        events = worker.log.since(1, worker.num_sent)
        assert events is not None
        worker.num_sent = worker.log.next_seq
        if events.events:
            self._feed.receive(worker.name, events)
