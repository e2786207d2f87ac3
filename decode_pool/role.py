"""The role of a worker that writes answers: reserves blocks, lands the KV that comes for them, hands both to requests.

    reserve(ReserveRequest) ──▶ Ticket ──▶ gateway ──▶ prefill worker      all on the engine's thread, between steps
    tick: arrived chunk ── ledger: where to? ──▶ Mover.land(blocks) ──▶ ledger.landed
    admissible: the ticket ARRIVED ──▶ the request adopts its blocks

A request without a ticket is served whole: short prompts, and those that have lost their pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from decode_pool.config import DecodeConfig
from kvtransfer.hashing import chain_hashes
from kvtransfer.ledger import Ledger, Reservation, TicketState
from kvtransfer.reshard import require_same_layout
from kvtransfer.transport import MAX_TICKET_ID_BYTES, Arrived, LaneLost, peer_name
from protos.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    WorkerDraining,
)
from protos.values import KVLayout, ReserveRequest, Ticket, TicketStats, WorkerLoad
from workers.engine.engine import Engine
from workers.engine.request import Request
from workers.engine.role import Disposition, Tick
from workers.engine.scheduler import no_key
from workers.kv.blocks import BlockPool
from workers.kv.mover import Mover

_MOVING = (TicketState.RESERVED, TicketState.SENDING)


class DecodeRole:
    """`pool` is the engine's own, `layout` this worker's, `prefix_key` as the scheduler's. Not thread-safe: the
    engine's thread calls everything."""

    def __init__(
        self,
        mover: Mover,
        pool: BlockPool,
        layout: KVLayout,
        config: DecodeConfig | None = None,
        *,
        prefix_key: Callable[[int], bytes] = no_key,
    ) -> None:
        self.ledger = Ledger()
        self._mover = mover
        self._pool = pool
        self._layout = layout
        self._prefix_key = prefix_key
        self._config = config or DecodeConfig()
        self._failed: dict[str, BatonError] = {}
        self._transfer_bytes = 0
        self._transfer_s = 0.0

    @property
    def retry_after_s(self) -> float:
        return self._config.retry_after_s

    # -- reservations --------------------------------------------------------------------------------------------------

    def reserve(self, request: ReserveRequest, now: float) -> Ticket:
        """Blocks for all of the prompt that is not cached here, or an error and nothing has changed.

        Asked again with the same generation it answers the same and renews the lease, as a gateway does while the
        prompt waits to be read; a higher one takes the place of the lower. Raises
        IncompatibleWorkers, InvalidRequest, ContextLengthExceeded, Overloaded (with `retry_after_s`), or
        TransferFailed for a generation that has been fenced or has ended.
        """
        self._check(request)
        self._receive(now)  # what was lost so far was not lost by the new ticket
        known = self.ledger.renew(request.request_id, request.generation, now)
        if known is not None:
            return known.ticket
        fenced = self.ledger.abort(request.request_id, f"generation {request.generation} took its place")
        self._free(fenced)
        cached_ids, block_ids = self._provide(request)
        ticket = Ticket(
            ticket_id=request.request_id,
            generation=request.generation,
            lease_s=min(request.lease_s, self._config.max_lease_s),
            block_ids=tuple(block_ids),
            num_cached_tokens=len(cached_ids) * self._layout.block_size,
            layout=self._layout,
            destination=self._mover.address,
        )
        self.ledger.reserve(
            Reservation(
                ticket=ticket,
                source=peer_name(request.source),
                token_ids=request.prompt_ids,
                cached_ids=tuple(cached_ids),
                reserved_s=now,
            )
        )
        self._mover.expect(request.source, request.source_layout)
        return ticket

    def tickets(self, now: float) -> tuple[TicketStats, ...]:
        return self.ledger.stats(now)

    def _check(self, request: ReserveRequest) -> None:
        here = self._mover.address.worker_id
        require_same_layout(request.source.worker_id, request.source_layout, here, self._layout)
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty: there is no KV to reserve blocks for", param="prompt")
        if not 0 < len(request.request_id.encode()) <= MAX_TICKET_ID_BYTES:
            raise InvalidRequest(
                f"request_id has {len(request.request_id.encode())} bytes: it must have 1 to {MAX_TICKET_ID_BYTES}",
                param="request_id",
            )
        if not request.lease_s > 0 or request.generation < 1:
            raise InvalidRequest(
                f"lease_s is {request.lease_s} and generation {request.generation}: "
                f"the one must be above 0, the other at least 1",
                param="lease_s" if request.generation >= 1 else "generation",
            )
        if self._pool.blocks_for(len(request.prompt_ids)) > self._pool.num_blocks:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt_ids)} tokens: worker {here} holds at most "
                f"{self._pool.num_blocks * self._pool.block_size}",
                param="prompt",
            )

    def _provide(self, request: ReserveRequest) -> tuple[list[int], list[int]]:
        """References to the prompt's cached blocks and to fresh ones for the rest. All or nothing."""
        pool = self._pool
        was_idle = pool.num_free == pool.num_blocks
        cached_ids = self._cached(request)
        pool.acquire(cached_ids)
        num_missing = pool.blocks_for(len(request.prompt_ids)) - len(cached_ids)
        kept_free = 0 if was_idle else int(self._config.headroom * pool.num_blocks)
        block_ids = pool.allocate(num_missing) if pool.num_free >= num_missing + kept_free else None
        if block_ids is None:
            num_free = pool.num_free
            pool.release(cached_ids)
            raise Overloaded(
                f"worker {self._mover.address.worker_id} has {num_free} free KV blocks and keeps {kept_free} of them "
                f"for running answers: {num_missing} are needed",
                retry_after_s=self._config.retry_after_s,
            )
        return cached_ids, block_ids

    def _cached(self, request: ReserveRequest) -> list[int]:
        """None where KV depends on the prompt's length: part of these tokens may be the answer of an earlier try."""
        if self._prefix_key(len(request.prompt_ids)):
            return []
        return self._pool.match(chain_hashes(request.prompt_ids, self._pool.block_size, salt=request.cache_salt))

    def _free(self, reservation: Reservation | None) -> None:
        if reservation is not None:
            self._pool.release(reservation.block_ids)

    # -- what the engine asks ------------------------------------------------------------------------------------------

    def admissible(self, request: Request, now: float) -> bool:
        ticket = request.ticket
        if ticket is None:
            return True
        state = self.ledger.state(ticket.ticket_id, ticket.generation)
        if state in _MOVING:
            return False
        if state is TicketState.ARRIVED:
            return self._adopt(request, ticket)
        tombstone = self.ledger.tombstone(ticket.ticket_id, ticket.generation)
        why = (
            f"{tombstone.state} ({tombstone.reason})" if tombstone else "unknown here, or fenced by a newer generation"
        )
        self._failed[request.request_id] = TransferFailed(
            f"the KV of request {request.request_id} is not here: ticket {ticket.ticket_id} "
            f"generation {ticket.generation} is {why}"
        )
        return False

    def after_prefill(self, request: Request) -> Disposition:
        return Disposition.KEEP

    def forget(self, request: Request) -> None:
        """Adopted blocks are no ticket's any more: the engine frees them."""
        self._failed.pop(request.request_id, None)
        if request.ticket is not None:
            self._abort(request.ticket.ticket_id, "its request was aborted", request.ticket.generation)

    def withdraw(self, request_id: str) -> bool:
        return self._abort(request_id, "aborted before its request came")

    def tick(self, now: float) -> Tick:
        self._receive(now)
        for reservation in self.ledger.expire(now):
            self._free(reservation)
        failed = tuple(self._failed.items())
        self._failed.clear()
        return Tick(failed=failed)

    def busy(self) -> bool:
        """Also while a ticket is out: its lease must be able to end."""
        return bool(len(self.ledger) or self._failed) or self._mover.busy()

    def load(self, load: WorkerLoad) -> WorkerLoad:
        return replace(
            load,
            num_tickets=len(self.ledger),
            transfer_bytes=self._transfer_bytes,
            transfer_s=self._transfer_s,
        )

    def _adopt(self, request: Request, ticket: Ticket) -> bool:
        """At least the last known token stays to be computed: the next one is sampled from it."""
        reservation = self.ledger.adopt(ticket.ticket_id, ticket.generation)
        num_tokens = len(reservation.token_ids)
        if request.tokens(0, num_tokens) != reservation.token_ids:
            self._free(reservation)
            self._failed[request.request_id] = InvalidRequest(
                f"request {request.request_id} does not begin with the {num_tokens} tokens that ticket "
                f"{ticket.ticket_id} was reserved for",
                param="ticket",
            )
            return False
        request.block_ids = list(reservation.block_ids)
        request.num_computed = min(num_tokens, request.num_tokens - 1)
        request.num_cached = min(reservation.ticket.num_cached_tokens, request.num_computed)
        request.adopted = True
        return True

    # -- arriving KV ---------------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        for event in self._mover.poll_arrived():
            if isinstance(event, Arrived):
                self._land(event, now)
            else:
                self._lost(event)

    def _land(self, event: Arrived, now: float) -> None:
        chunk = event.chunk
        block_ids = self.ledger.blocks_for(chunk, event.source)
        if not block_ids:
            self._mover.drop(chunk)
        elif self._mover.land(chunk, block_ids):
            self.ledger.landed(chunk, now)
            self._transfer_bytes += event.num_bytes
            self._transfer_s += event.elapsed_s
        else:
            self._abort(chunk.ticket_id, "a part of it never reached all ranks")

    def _lost(self, event: LaneLost) -> None:
        for reservation in self.ledger.abort_source(event.peer, f"the lane from {event.peer} was lost: {event.reason}"):
            self._free(reservation)

    def _abort(self, ticket_id: str, reason: str, generation: int | None = None) -> bool:
        reservation = self.ledger.abort(ticket_id, reason, generation)
        self._free(reservation)
        return reservation is not None


def reservations(role: DecodeRole, engine: Engine) -> Callable[[ReserveRequest, float], Ticket]:
    """`role.reserve` for a worker's service: nothing new while it drains, or while requests that are here lack blocks.
    What was promised before is kept."""

    def reserve(request: ReserveRequest, now: float) -> Ticket:
        if role.ledger.state(request.request_id, request.generation) is not None:
            return role.reserve(request, now)
        if engine.draining:
            raise WorkerDraining("this worker is draining and takes no new reservations: reserve on another one")
        if engine.scheduler.blocked:
            raise Overloaded(
                "requests on this worker are waiting for KV blocks already", retry_after_s=role.retry_after_s
            )
        return role.reserve(request, now)

    return reserve
