"""Fetches a prompt's first blocks from a worker that has them cached, if this is faster than computing them.

decide: prefill worker r has 2 blocks, h has 40 ── cheaper? ─▶ r: reserve 38 ─▶ h: share, says how many it still has
                                                                     ─▶ r: submit(pull): waits, and reads the rest"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtransfer.windows import moved_bytes
from protos.errors import BatonError
from protos.event_loop import loop_time
from protos.values import ShareRequest, Ticket, WorkerLoad
from router.dispatch.job_state import JobState, Reservations
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.routing.candidate_columns import Candidate, CandidateTable
from router.routing.request_seconds import load_s
from router.traces.request_trace import EventKind

log = logging.getLogger("baton.router")

OVERHEAD_S = 0.004  # two calls, and the rest of the step that runs at each end
GAIN = 2.0  # a pull must be this many times cheaper: the estimate is uncertain, and a failed pull costs both
UNMEASURED_BYTES_PER_S = 1e9  # of a worker that has not moved KV yet: a network of ten gigabits per second

EVICTED = "evicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHolder:
    """A worker that has the first `num_tokens` of a sequence and pushes `bytes_per_s`. Tokens only in its host memory
    are first loaded in `load_s`."""

    worker_id: str
    num_tokens: int
    bytes_per_s: float
    load_s: float = 0.0


def measured_bytes_per_s(load: WorkerLoad) -> float:
    return load.transfer_bytes / load.transfer_s if load.transfer_s > 0 else UNMEASURED_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PullingWorker:
    """A prefill worker that has the first `num_cached` tokens of a sequence. `num_on_host` of them are only in host
    memory; loading those takes `load_s`."""

    num_cached: int
    tokens_per_s: float
    bytes_per_token: float
    num_on_host: int = 0
    load_s: float = 0.0


def best_holder(holders: Sequence[PrefixHolder], prefill_worker: PullingWorker) -> PrefixHolder | None:
    """The best worker to pull from; None if loading from the own host and computing the rest takes less time.

    A pull of n tokens takes OVERHEAD_S + load_s + n * bytes_per_token / bytes_per_s, computing them n / tokens_per_s.
    It begins after the tokens on the prefill worker's device; its host's blocks are not loaded then. The largest gain
    wins. A prefill worker of unknown speed computes the prompt, and this measures its speed.
    """
    if prefill_worker.tokens_per_s <= 0:
        return None
    num_on_device = prefill_worker.num_cached - prefill_worker.num_on_host

    def gain_s(holder: PrefixHolder) -> float:
        num_moved = max(0, holder.num_tokens - num_on_device)
        spared_s = prefill_worker.load_s + (holder.num_tokens - prefill_worker.num_cached) / prefill_worker.tokens_per_s
        moved_s = num_moved * prefill_worker.bytes_per_token / holder.bytes_per_s
        return spared_s - GAIN * (OVERHEAD_S + holder.load_s + moved_s)

    best = max(holders, key=gain_s, default=None)
    return best if best is not None and gain_s(best) > 0 else None


def pull_id(request_id: str) -> str:
    return f"{request_id}/pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPull:
    request_id: str
    generation: int
    prefill_worker: Member
    holder: Member
    num_tokens: int

    def end(self) -> None:
        self.prefill_worker.abort(self.request_id)
        self.holder.abort(self.request_id)


class PrefixPulls:
    def __init__(self, fleet: Fleet, reserve: Reservations) -> None:
        self._fleet = fleet
        self._reserve = reserve
        self.num_blocks = 0
        self.failures: Counter[str] = Counter()

    def choose(
        self, job_state: JobState, request_id: str, generation: int, prefill_worker: Member, candidates: CandidateTable
    ) -> PrefixPull | None:
        sampling = job_state.job.sampling
        needs_all = sampling.prompt_logprobs is not None or sampling.pooling == "mean"
        if prefill_worker.info is None or (needs_all and not job_state.output_ids):
            return None
        if not (caching := candidates.caching):
            return None
        layout, most = prefill_worker.info.layout, job_state.num_tokens - 1
        holders = [
            holder
            for worker_id in caching
            if worker_id != prefill_worker.worker_id
            for holder in self._holders(candidates.candidate(worker_id), most, layout.block_size)
        ]
        own = candidates.candidate(prefill_worker.worker_id)
        puller = PullingWorker(
            num_cached=own.num_cached_tokens,
            num_on_host=own.num_host_tokens,
            load_s=load_s(own),
            tokens_per_s=prefill_worker.load.prefill_tokens_per_s,
            bytes_per_token=moved_bytes(layout, most) / max(1, most),
        )
        best = best_holder(holders, puller)
        if best is None:
            return None
        return PrefixPull(
            request_id=pull_id(request_id),
            generation=generation,
            prefill_worker=prefill_worker,
            holder=self._fleet.member(best.worker_id),
            num_tokens=best.num_tokens,
        )

    def _holders(self, worker: Candidate, most: int, block_size: int) -> Iterator[PrefixHolder]:
        bytes_per_s = measured_bytes_per_s(self._fleet.member(worker.worker_id).load)
        on_device = worker.num_cached_tokens - worker.num_host_tokens
        for num_tokens in dict.fromkeys((min(on_device, most), min(worker.num_cached_tokens, most))):
            if num_tokens:
                yield PrefixHolder(
                    worker_id=worker.worker_id,
                    num_tokens=num_tokens // block_size * block_size,
                    bytes_per_s=bytes_per_s,
                    load_s=float(worker.load_time(num_tokens - on_device)) if num_tokens > on_device else 0.0,
                )

    async def fetch(self, job_state: JobState, pull: PrefixPull) -> Ticket | None:
        """Reserves blocks on the prefill worker, into which the holder pushes. None if the prefill worker should
        compute the prompt instead. The caller ends the pull in any case."""
        try:
            reservation = self._reserve(job_state, pull.holder, pull.request_id, pull.generation, stop=pull.num_tokens)
            ticket = await pull.prefill_worker.reserve(reservation)
            block_size = pull.holder.block_size or ticket.layout.block_size
            hashes = tuple(job_state.hashes(block_size)[: -(-pull.num_tokens // block_size)])
            num_blocks = await pull.holder.connection().share(ShareRequest(ticket=ticket, hashes=hashes))
        except BatonError as error:
            self._failed(pull, error.code, error.message)
            return None
        if not num_blocks:
            self._failed(pull, EVICTED, "it has not got them any more")
            return None
        self.num_blocks += num_blocks
        now = loop_time()
        job_state.record.note(EventKind.PULLED, now, source=pull.holder.worker_id, blocks=num_blocks)
        return ticket.up_to(min(ticket.starts) + num_blocks)

    def _failed(self, pull: PrefixPull, code: str, reason: str) -> None:
        self.failures[code] += 1
        log.info(
            "%s computes a prefix that %s did not send: %s",
            pull.request_id,
            pull.holder.worker_id,
            reason,
            extra={"request": pull.request_id},
        )
