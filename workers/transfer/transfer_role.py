"""The common part of all roles that transfer KV: tickets are received, pushes are sent, and both are maintained.

A pool adds when a request may begin, and what follows its prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from kvtransfer.ticket_ledger import Ledger
from protos.values import BlockHash, GenerateRequest, KVLayout, ReserveRequest, Ticket, TicketStats
from workers.kv.block_pool import BlockPool
from workers.scheduling.request import Onload, Request
from workers.scheduling.role import Role, Tick, TransferLoad
from workers.scheduling.scheduler import no_key
from workers.transfer.receive import Incoming
from workers.transfer.send import Outgoing
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import TransferConfig


class TransferRole(Role):
    """`pool` is the engine's own, `layout` this worker's, `prefix_key` as the scheduler's. Not thread-safe: the
    engine's thread calls everything."""

    def __init__(
        self,
        transfers: TransferLeader,
        pool: BlockPool,
        layout: KVLayout,
        config: TransferConfig | None = None,
        *,
        prefix_key: Callable[[int], bytes] = no_key,
    ) -> None:
        config = config or TransferConfig()
        self._transfers = transfers
        self.incoming = Incoming(transfers, pool, layout, config, prefix_key=prefix_key)
        self.outgoing = Outgoing(transfers, pool, layout, config)

    @classmethod
    def replacing(cls, role: TransferRole, config: TransferConfig | None = None) -> Self:
        """Returns this role over the same lanes, tickets and counts, which the old role must not use any more. Called
        while nothing runs."""
        assert not role.busy(), "a role is replaced while no transfer runs"
        new = cls.__new__(cls)
        new._transfers, new.incoming, new.outgoing = role._transfers, role.incoming, role.outgoing
        new.incoming.config = new.outgoing.config = config or TransferConfig()
        return new

    @property
    def ledger(self) -> Ledger:
        return self.incoming.ledger

    def reserve(self, request: ReserveRequest, now: float) -> Ticket:
        return self.incoming.reserve(request, now)

    def takes_over(self, ticket: Ticket) -> bool:
        """True if the ticket is for KV that this worker receives, not sends."""
        return ticket.destination.worker_id == self._transfers.address.worker_id

    def has_reservation(self, request: GenerateRequest) -> bool:
        return request.ticket is not None and self.incoming.holds(request.ticket)

    def next_deadline_s(self) -> float:
        """When the first lease of a ticket ends, received or sent; infinity without one."""
        return min(self.ledger.next_deadline_s(), self.outgoing.next_deadline_s())

    def tickets(self, now: float) -> tuple[TicketStats, ...]:
        return self.incoming.stats(now) + self.outgoing.stats(now)

    def migrate(self, request: Request, ticket: Ticket, now: float) -> None:
        self.outgoing.migrate(request, ticket, now)

    def share(self, ticket: Ticket, hashes: Sequence[BlockHash], now: float, coming: Onload | None) -> int:
        return self.outgoing.share(ticket, hashes, now, coming)

    def drop(self, request: Request) -> None:
        self.incoming.drop(request)
        self.outgoing.drop(request)

    def withdraw(self, request_id: str) -> bool:
        return self.incoming.withdraw(request_id) | self.outgoing.withdraw(request_id)

    def tick(self, now: float, num_in_flight: int) -> Tick:
        failed = self.incoming.tick(now)
        tick = self.outgoing.tick(now, num_in_flight)
        return replace(tick, failed=(*failed, *tick.failed)) if failed else tick

    def is_behind(self) -> bool:
        return self.outgoing.is_behind()

    def advance_transfers(self, now: float, num_in_flight: int) -> None:
        self.incoming.receive(now)
        self.outgoing.advance(now, num_in_flight)

    def busy(self) -> bool:
        return self.incoming.busy() or self.outgoing.busy() or self._transfers.busy()

    def load(self) -> TransferLoad:
        come, gone = self.incoming.load(), self.outgoing.load()
        both: TransferLoad = {
            "num_tickets": come["num_tickets"] + gone["num_tickets"],
            "transfer_bytes": come["transfer_bytes"] + gone["transfer_bytes"],
            "transfer_s": come["transfer_s"] + gone["transfer_s"],
        }
        return {**come, **gone, **both}
