"""The role of a worker that writes answers: takes over sequences with their KV, and hands them on when it must.

    reserve ─▶ ticket ─▶ KV arrives ─▶ admissible: the request adopts its blocks ─▶ decodes ─▶ move: goes on elsewhere

A request without a ticket is served whole: short prompts, those that have lost their pair, and everything on a worker
that has no other pool beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from decode_pool.config import DecodeConfig
from kvtransfer.ledger import Ledger
from protos.values import BlockHash, GenerateRequest, KVLayout, ReserveRequest, Ticket, TicketStats, WorkerLoad
from workers.engine.batch import Batch
from workers.engine.request import Request
from workers.engine.role import Disposition, Tick
from workers.engine.scheduler import no_key
from workers.kv.blocks import BlockPool
from workers.kv.incoming import Incoming, Terms
from workers.kv.mover import Mover
from workers.kv.outgoing import CHUNK_BYTES, Outgoing


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
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        config = config or DecodeConfig()
        terms = Terms(headroom=config.headroom, retry_after_s=config.retry_after_s, max_lease_s=config.max_lease_s)
        self._mover = mover
        self.incoming = Incoming(mover, pool, layout, terms, prefix_key=prefix_key)
        self.outgoing = Outgoing(mover, pool, layout, chunk_bytes=chunk_bytes)

    @property
    def ledger(self) -> Ledger:
        return self.incoming.ledger

    def reserve(self, request: ReserveRequest, now: float) -> Ticket:
        return self.incoming.reserve(request, now)

    def tickets(self, now: float) -> tuple[TicketStats, ...]:
        return self.incoming.stats(now) + self.outgoing.stats(now)

    def promised(self, request: GenerateRequest) -> bool:
        return request.ticket is not None and self.incoming.holds(request.ticket)

    def admissible(self, request: Request, now: float) -> bool:
        if request.ticket is None:
            return self.incoming.pulled(request)
        return self.incoming.adopted(request, request.ticket)

    def after_prefill(self, request: Request) -> Disposition:
        return Disposition.KEEP

    def move(self, request: Request, ticket: Ticket, now: float) -> None:
        self.outgoing.move(request, ticket, now)

    def share(self, ticket: Ticket, hashes: Sequence[BlockHash], now: float) -> int:
        return self.outgoing.share(ticket, hashes, now)

    def forget(self, request: Request) -> None:
        self.incoming.forget(request)
        self.outgoing.forget(request)

    def withdraw(self, request_id: str) -> bool:
        return self.incoming.withdraw(request_id) | self.outgoing.withdraw(request_id)

    def tick(self, now: float) -> Tick:
        failed = self.incoming.tick(now)
        tick = self.outgoing.tick(now)
        return replace(tick, failed=(*failed, *tick.failed))

    def launching(self, batch: Batch, now: float) -> None:
        """A sequence that moves has its KV pushed between two steps: a token's is little."""

    def busy(self) -> bool:
        return self.incoming.busy() or self.outgoing.busy() or self._mover.busy()

    def load(self, load: WorkerLoad) -> WorkerLoad:
        return self.outgoing.load(self.incoming.load(load))
