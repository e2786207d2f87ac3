"""The receiving side of KV transfer: reserves blocks, lands the KV that arrives for them, gives both to requests.

reserve(ReserveRequest) ──▶ Ticket ──▶ gateway ──▶ the other worker    all on the engine's thread, between steps
tick: arrived chunk ── ledger: where to? ──▶ TransferLeader.land(blocks) ──▶ ledger.landed
adopted / pulled: the ticket ARRIVED ──▶ the request has its blocks"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtransfer.hashing import chain_hashes
from kvtransfer.reshard import common_layout, require_compatible
from kvtransfer.ticket_ledger import Ledger, Reservation, TicketState
from kvtransfer.transport import MAX_TICKET_ID_BYTES, Arrived, LaneLost, peer_name
from protos.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    WorkerDraining,
)
from protos.values import BlockHash, KVLayout, ReserveRequest, Ticket, TicketStats
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool, CachedPrefix
from workers.scheduling.page_tables import give_back, give_tables
from workers.scheduling.request import Request
from workers.scheduling.role import TransferLoad
from workers.scheduling.scheduler import no_key
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import TransferConfig

log = logging.getLogger("baton.worker")

_MOVING = (TicketState.RESERVED, TicketState.SENDING)


class Incoming:
    """A role's receiving half. `pool` is the engine's own, `layout` this worker's, `prefix_key` as the scheduler's.
    Not thread-safe: the engine's thread calls everything."""

    def __init__(
        self,
        transfers: TransferLeader,
        pool: BlockPool,
        layout: KVLayout,
        config: TransferConfig,
        *,
        prefix_key: Callable[[int], bytes] = no_key,
    ) -> None:
        self.ledger = Ledger()
        self._transfers = transfers
        self._pool = pool
        self._layout = layout
        self.config = config
        self._prefix_key = prefix_key
        self._failed: dict[str, BatonError] = {}
        self._num_bytes = 0
        self._busy_s = 0.0
        self._num_pulled_tokens = 0
        self._num_failed_pulls = 0
        self._landing: dict[str, tuple[int, float]] = {}  # (arrived bytes, seconds) by ticket
        self.num_settled = 0
        """How often a ticket's KV was here in full, or was known not to come: then a request may begin, or end."""

    # -- reservations --------------------------------------------------------------------------------------------------

    def reserve(self, request: ReserveRequest, now: float) -> Ticket:
        """Reserves blocks for the part of the prompt that is not cached here. If it raises, nothing has changed.

        A repeated call with the same generation returns the same ticket and renews the lease; a gateway repeats it
        while the prompt waits for prefill. A higher generation replaces a lower one. Raises IncompatibleWorkers,
        InvalidRequest, ContextLengthExceeded, Overloaded (with `retry_after_s`), or TransferFailed for a generation
        that has been fenced or has ended.
        """
        self._check(request)
        self.receive(now)  # earlier losses do not concern the new ticket
        renewed = self.ledger.renew(request.request_id, request.generation, now)
        if renewed is not None:
            return renewed.ticket
        self._transfers.sources.require(peer_name(request.source), self._live_sources())
        fenced = self.ledger.abort(request.request_id, f"generation {request.generation} took its place")
        self._free(fenced)
        cached, fresh = self._provide(request)
        ticket = Ticket(
            ticket_id=request.request_id,
            generation=request.generation,
            lease_s=min(request.lease_s, self.config.max_lease_s),
            block_ids=tuple(fresh),
            num_cached_tokens=cached.num_blocks * self._layout.block_size,
            layout=common_layout(self._layout, request.source_layout),
            destination=self._transfers.address,
            first_blocks=tuple(map(len, cached.tables)) if self._pool.has_groups else (),
        )
        self.ledger.reserve(
            Reservation(
                ticket=ticket,
                source=peer_name(request.source),
                token_ids=request.prompt_ids,
                cached_ids=tuple(cached.held()),
                reserved_s=now,
                grows=request.num_tokens > len(request.prompt_ids),
                num_passed=tuple(cached.num_passed),
                in_smaller_blocks=request.source_layout.block_size < self._layout.block_size,
            )
        )
        self._transfers.expect(request.source, request.source_layout)
        return ticket

    def _check(self, request: ReserveRequest) -> None:
        here = self._transfers.address.worker_id
        require_compatible(request.source.worker_id, request.source_layout, here, self._layout)
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty: there is no KV to reserve blocks for", param="prompt")
        if not 0 < len(request.request_id.encode()) <= MAX_TICKET_ID_BYTES:
            raise InvalidRequest(
                f"request_id {request.request_id[:60]!r}: give 1 to {MAX_TICKET_ID_BYTES} bytes", param="request_id"
            )
        if not request.lease_s > 0 or request.generation < 1:
            raise InvalidRequest(
                f"lease_s = {request.lease_s}, generation = {request.generation}: give above 0, and 1 or more",
                param="lease_s" if request.generation >= 1 else "generation",
            )
        stop, num_passed = self._pool.blocks_for(_num_tokens(request)), self._num_passed(request)
        if sum([stop - passed for passed in num_passed]) > self._pool.num_blocks:
            num_most = (self._pool.num_blocks + sum(num_passed)) // len(num_passed)
            raise ContextLengthExceeded(
                f"the prompt has {_num_tokens(request)} tokens: worker {here} holds {num_most * self._pool.block_size}",
                param="prompt",
            )

    def _num_passed(self, request: ReserveRequest) -> list[int]:
        """For each group, the blocks that neither later tokens nor the prompt's last token reads."""
        return self._pool.windows.num_passed(len(request.prompt_ids) - 1)

    def _provide(self, request: ReserveRequest) -> tuple[CachedPrefix, list[int]]:
        """References the prompt's cached blocks and fresh ones for the rest, one group after the other. All or
        nothing."""
        pool = self._pool
        was_idle = pool.num_free == pool.num_blocks
        cached = self._cached(request)
        cached_ids = cached.held()
        pool.acquire(cached_ids)
        stop = pool.blocks_for(_num_tokens(request))
        num_missing = sum([stop - len(table) for table in cached.tables])
        kept_free = 0 if was_idle else int(self.config.headroom * pool.num_blocks)
        block_ids = pool.allocate(num_missing) if pool.num_free >= num_missing + kept_free else None
        if block_ids is None:
            num_free, pages = pool.num_free, "KV pages" if pool.has_groups else "KV blocks"
            pool.release(cached_ids)
            raise Overloaded(
                f"worker {self._transfers.address.worker_id} has {num_free} free {pages}, keeps {kept_free}, and "
                f"needs {num_missing}",
                retry_after_s=self.config.retry_after_s,
            )
        return cached, block_ids

    def _cached(self, request: ReserveRequest) -> CachedPrefix:
        """Cached blocks with which the reservation can begin. None if KV depends on the prompt's length: a part of
        these tokens may be the answer of an earlier attempt."""
        hashes: Sequence[BlockHash] = ()
        if not self._prefix_key(len(request.prompt_ids)):
            hashes = chain_hashes(request.prompt_ids, self._pool.block_size, salt=request.cache_salt)
        return self._pool.match_read(hashes, len(request.prompt_ids) - 1)

    # -- what a role passes on -----------------------------------------------------------------------------------------

    def holds(self, ticket: Ticket) -> bool:
        return self.ledger.reservation(ticket.ticket_id, ticket.generation) is not None

    def adopted(self, request: Request, ticket: Ticket) -> bool:
        """True if the request has the ticket's blocks now. If not it waits, or has failed: the next tick returns the
        error."""
        self._truncate(ticket, request.num_tokens - 1)
        state = self.ledger.state(ticket.ticket_id, ticket.generation)
        if state is TicketState.ARRIVED:
            try:
                self._adopt(request, ticket)
            except InvalidRequest as error:
                self._failed[request.request_id] = error
            return request.adopted
        if state not in _MOVING:
            tombstone = self.ledger.tombstone(ticket.ticket_id, ticket.generation)
            self._failed[request.request_id] = (tombstone.cause if tombstone else TransferFailed)(
                f"the KV of request {request.request_id} is not here: {self._fate(ticket)}"
            )
        return False

    def pulled(self, request: Request) -> bool:
        """True if the request may begin, with or without the pulled blocks. Until then it must wait."""
        ticket = request.pull
        if ticket is None:
            return True
        if request.owes_prompt_logprobs:  # every position has to be computed here
            request.pull = None
            self._abort(ticket.ticket_id, "its request wants logprobs of the prompt", ticket.generation)
            self._pull_failed(request, self._fate(ticket))
            return True
        self._pool.release(self.ledger.truncate(ticket.ticket_id, ticket.generation, ticket.stop))
        state = self.ledger.state(ticket.ticket_id, ticket.generation)
        if state in _MOVING:
            return False
        request.pull = None
        if state is TicketState.ARRIVED:
            try:
                self._adopt(request, ticket)
            except InvalidRequest as error:
                self._pull_failed(request, error.message)
            else:
                request.num_cached = request.num_computed
                self._num_pulled_tokens += request.num_computed - ticket.num_cached_tokens
        else:
            self._abort(ticket.ticket_id, "its request computes instead", ticket.generation)
            self._pull_failed(request, self._fate(ticket))
        return True

    def drop(self, request: Request) -> None:
        """The request has ended. Adopted blocks no longer belong to a ticket: the engine frees them."""
        self._failed.pop(request.request_id, None)
        for ticket in (request.ticket, request.pull):
            if ticket is not None:
                self._abort(ticket.ticket_id, "its request was aborted", ticket.generation)

    def withdraw(self, request_id: str) -> bool:
        """Releases a reservation whose request was never submitted, and returns whether there was one. If not, a later
        reservation is refused: an abort may overtake it."""
        if self._abort(request_id, "aborted before its request came"):
            return True
        self.ledger.refuse(request_id, "its gateway gave it up before it was reserved")
        return False

    def tick(self, now: float) -> tuple[tuple[str, BatonError], ...]:
        """Lands arrived chunks and ends expired tickets. Returns requests that cannot continue."""
        self.receive(now)
        for reservation in self.ledger.expire(now):
            self._free(reservation)
        self._transfers.sources.close_unneeded(now, self._live_sources)
        failed = tuple(self._failed.items())
        self._failed.clear()
        return failed

    def has_failures(self) -> bool:
        """True if the next tick must report a request that cannot continue."""
        return bool(self._failed)

    def busy(self) -> bool:
        """Also while a ticket is out: its lease must be able to end."""
        return bool(len(self.ledger) or self._failed)

    def load(self) -> TransferLoad:
        return {
            "num_tickets": len(self.ledger),
            "transfer_bytes": self._num_bytes,
            "transfer_s": self._busy_s,
            "num_pulled_tokens": self._num_pulled_tokens,
            "num_failed_pulls": self._num_failed_pulls,
            "lanes": self._transfers.lane_loads(),
        }

    def stats(self, now: float) -> tuple[TicketStats, ...]:
        return self.ledger.stats(now)

    # ------------------------------------------------------------------------------------------------------------------

    def _live_sources(self) -> set[str]:
        return {ticket.owner for ticket in self.ledger.stats(0.0)}

    def _truncate(self, ticket: Ticket, num_tokens: int) -> None:
        """Releases the rest of a migrated sequence's room once the KV of `num_tokens` has arrived, and the blocks that
        its windows have passed."""
        reservation = self.ledger.reservation(ticket.ticket_id, ticket.generation)
        if reservation is not None and reservation.grows:
            stop = self._pool.blocks_for(max(num_tokens, len(reservation.token_ids)))
            self._pool.release(self.ledger.truncate(ticket.ticket_id, ticket.generation, stop))
            self.ledger.forgo(ticket.ticket_id, ticket.generation, self._pool.windows.num_passed(num_tokens))

    def _adopt(self, request: Request, ticket: Ticket) -> None:
        """Gives the request its arrived blocks; at least the last known token is computed again, to sample the next
        one. Raises InvalidRequest; the blocks are free then."""
        reservation = self.ledger.adopt(ticket.ticket_id, ticket.generation)
        self._count(ticket.ticket_id)
        num_tokens = len(reservation.token_ids)
        room = reservation.ticket.stop * self._layout.block_size
        if request.tokens(0, num_tokens) != reservation.token_ids or (
            reservation.grows and request.num_tokens > room + 1
        ):
            self._free(reservation)
            raise InvalidRequest(
                f"request {request.request_id} is not the one of ticket {ticket.ticket_id}: {num_tokens} tokens, "
                f"room for {room}",
                param="ticket",
            )
        if self._pool.head_stays or reservation.ticket.layout.head != self._layout.head:
            self._pool.headless.update(reservation.ticket.block_ids)
        give_tables(request, reservation.tables(), reservation.num_passed, partial=reservation.in_smaller_blocks)
        request.num_computed = request.num_tokens - 1 if reservation.grows else min(num_tokens, request.num_tokens - 1)
        request.num_cached = min(reservation.ticket.num_cached_tokens, request.num_computed)
        give_back(request, self._pool)
        self._pool.hit(request.num_cached)
        request.adopted = True

    def _fate(self, ticket: Ticket) -> str:
        tombstone = self.ledger.tombstone(ticket.ticket_id, ticket.generation)
        why = (
            f"{tombstone.state} ({tombstone.reason})" if tombstone else "unknown here, or fenced by a newer generation"
        )
        return f"ticket {ticket.ticket_id} generation {ticket.generation} is {why}"

    def _pull_failed(self, request: Request, reason: str) -> None:
        self._num_failed_pulls += 1
        log.warning("request %s computes its whole prompt, nothing was pulled: %s", request.request_id, reason)

    def receive(self, now: float) -> None:
        """Lands arrived chunks. `tick` does it as well; this alone may also be called while a step runs."""
        for event in self._transfers.poll_arrived():
            if isinstance(event, Arrived):
                self._land(event, now)
            else:
                self._lost(event)

    def _land(self, event: Arrived, now: float) -> None:
        chunk = event.chunk
        block_ids = self.ledger.blocks_for(chunk, event.source)
        if not block_ids:
            self._transfers.drop(chunk)
        else:
            self._transfers.land(chunk, block_ids)
            self.ledger.landed(chunk, now)
            num_bytes, busy_s = self._landing.get(chunk.ticket_id, (0, 0.0))
            num_bytes += chunk.num_bytes(self._layout)  # on all ranks; the event counts those of rank 0 only
            self._landing[chunk.ticket_id] = (num_bytes, busy_s + event.elapsed_s)
            if self.ledger.state(chunk.ticket_id, chunk.generation) is TicketState.ARRIVED:
                self.num_settled += 1
                self._count(chunk.ticket_id)

    def _count(self, ticket_id: str) -> None:
        num_bytes, busy_s = self._landing.pop(ticket_id, (0, 0.0))
        self._num_bytes += num_bytes
        self._busy_s += busy_s

    def _lost(self, event: LaneLost) -> None:
        self.num_settled += 1
        reason = f"the lane from {event.peer} was lost: {event.reason}"
        for reservation in self.ledger.abort_source(event.peer, reason, event.cause):
            self._free(reservation)

    def _abort(self, ticket_id: str, reason: str, generation: int | None = None) -> bool:
        reservation = self.ledger.abort(ticket_id, reason, generation)
        self._free(reservation)
        return reservation is not None

    def _free(self, reservation: Reservation | None) -> None:
        if reservation is not None:
            self._count(reservation.ticket.ticket_id)
            self._pool.release(reservation.block_ids)


def _num_tokens(request: ReserveRequest) -> int:
    return max(len(request.prompt_ids), request.num_tokens)


def reservations(incoming: Incoming, engine: Engine) -> Callable[[ReserveRequest, float], Ticket]:
    """`incoming.reserve` for a worker's service: refuses new reservations while it drains, or while requests here lack
    blocks. Earlier reservations are kept."""

    def reserve(request: ReserveRequest, now: float) -> Ticket:
        if incoming.ledger.state(request.request_id, request.generation) is not None:
            return incoming.reserve(request, now)
        if engine.draining:
            raise WorkerDraining("this worker is draining and takes no new reservations: reserve on another one")
        if engine.scheduler.blocked:
            raise Overloaded("requests are waiting for KV blocks already", retry_after_s=incoming.config.retry_after_s)
        return incoming.reserve(request, now)

    return reserve
