"""The workers that take work, as policies, admission and the dispatcher ask for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from kvtransfer.windows import full_bytes, window_bytes
from protos.event_loop import Changed, loop_time
from protos.values import BlockHash, WorkerInfo, WorkerRole
from router.fleet.candidate_table import FleetTable
from router.fleet.fleet_adapters import FleetAdapters
from router.fleet.fleet_revisions import FleetRevisions
from router.fleet.member import Member
from router.fleet.pool_totals import PoolTotals
from router.jobs import Job
from router.prefix.feed import Feed
from router.prefix.index import Match
from router.routing.candidate_columns import CandidateTable
from router.routing.predictor import Predictor

log = logging.getLogger("baton.router")

ELSEWHERE_S = 1.0  # how long a prompt that another gateway routed counts, unless the worker's load includes it sooner


class FleetOffers:
    """Reads the fleet's `members`. The fleet adds them to `table`, and notifies `changed` of each change."""

    def __init__(
        self, members: Mapping[str, Member], feed: Feed, *, revisions: FleetRevisions, lora: FleetAdapters
    ) -> None:
        self._members = members
        self._feed = feed
        self._revisions = revisions
        self._lora = lora
        self.gateway_id = feed.gateway_id
        feed.routed = self.routed_elsewhere
        self.changed = Changed()
        self.predictor = Predictor()
        self.totals = {role: PoolTotals() for role in WorkerRole}
        self.table = FleetTable(self.predictor)
        self._num_elsewhere = 0
        self.num_turned_away = 0  # jobs that wait because no worker had room for them, contrary to the reported loads

    def reference(self, besides: Member | None = None) -> WorkerInfo | None:
        for member in self._members.values():  # called several times per request
            if member.info is not None and member.client is not None and member is not besides:
                return member.info
        return None

    @property
    def block_size(self) -> int | None:
        reference = self.reference()
        return reference.layout.block_size if reference is not None else None

    @property
    def block_bytes(self) -> int:
        return full_bytes(first.layout) if (first := self.reference()) is not None else 0

    @property
    def window_bytes(self) -> Sequence[tuple[int, int]]:
        return window_bytes(first.layout) if (first := self.reference()) is not None else ()

    def routed_elsewhere(self, worker_id: str, num_blocks: int, num_cached: int) -> None:
        """Counts a prompt that another gateway has routed to the worker, until the worker's load includes it."""
        member = self._members.get(worker_id)
        if member is None or member.role is None or not member.takes_work:
            return
        self._num_elsewhere += 1
        name, num_tokens = f"elsewhere {self._num_elsewhere}", (num_blocks - num_cached) * (member.block_size or 1)
        self.route(member, name, num_tokens, num_blocks, is_there=True)
        asyncio.get_running_loop().call_later(ELSEWHERE_S, member.drop_routed, name)

    def route(self, member: Member, name: str, num_tokens: int, num_blocks: int, *, is_there: bool = False) -> None:
        member.route(name, num_tokens, num_blocks, is_there=is_there)
        if member.role is not None:
            beside = member.load.num_running + member.load.num_waiting
            self.predictor.routed(member.worker_id, member.role, num_tokens, beside=beside, now=loop_time())

    def match(self, hashes: Callable[[int], Sequence[BlockHash]], *, now: float) -> Match:
        """The cached blocks that each worker has of a sequence, in units of `block_size`. `hashes` gives the chain in
        blocks of any size. Each worker is matched in its own block size; an incomplete unit does not count."""
        size = self.block_size or 1
        matched = self._feed.index.match(hashes(size), now=now)
        for other in self.table.block_sizes:
            if other != size:
                matched = matched.joined(self._feed.index.match(hashes(other), now=now).scaled(other, size))
        return matched

    def candidates(self, matched: Match, num_tokens: int) -> CandidateTable:
        now = loop_time()
        return self.table.candidates(matched, num_tokens, self.block_size or 1, now=now)

    def suited(self, job: Job, candidates: CandidateTable) -> CandidateTable:
        if not self._revisions.serves_all(job.revision):
            candidates = candidates.take(self._revisions.places(job.revision, candidates.workers))
        return candidates if not job.adapter else candidates.take(self._lora.places(job.adapter, candidates.workers))

    def loads(self) -> CandidateTable:
        return self.table.loads()

    def overhead_s(self) -> float:
        now, roles = loop_time(), dict.fromkeys(self.loads().prompt_pool.workers.roles)
        return min((self.predictor.overhead_s(role, now=now) for role in roles), default=0.0)

    async def wait(self, *, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self.changed.wait()

    def blame(self, worker_ids: Iterable[str]) -> None:
        """Counts a failed request against the workers; one that keeps failing gets no new ones for a while."""
        for worker_id in worker_ids:
            if (member := self._members.get(worker_id)) is None:
                continue
            self.table.doubt(member)
            if member.breaker.failed(loop_time()) and member.role is not None:
                text = "worker %s fails its requests repeatedly: it gets no new requests for a while"
                log.warning(text, worker_id, extra={"worker": worker_id})
                self.totals[member.role].num_pauses += 1

    def count_read(self, prefill_worker: Member, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        if prefill_worker.role is not None:
            totals = self.totals[prefill_worker.role]
            totals.num_prompt_tokens += num_prompt_tokens
            totals.num_cached_tokens += num_cached_tokens
