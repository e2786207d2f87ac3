"""Parts of a simulated worker that check every call, for faults that are invisible one event later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from kvtransfer.ticket_ledger import TicketState
from kvtransfer.transports.inproc import InprocReceiver, InprocSender
from protos.values import KVEvent, TicketStats
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.kv.host import HostPool
from workers.transfer.transfer_role import TransferRole


class WatchedPool(BlockPool):
    """Checks that no block is freed while a step in flight writes it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        record: Callable[[KVEvent], None],
        *,
        host: HostPool | None,
        windows: Sequence[int | None],
        written_ids: Callable[[], Iterable[int]],
    ) -> None:
        super().__init__(num_blocks, block_size, record, host=host, windows=windows)
        self._written_ids = written_ids

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids)
        written = [block_id for block_id in self._written_ids() if not self.num_references(block_id)]
        assert not written, f"blocks {written} are freed early: a step in flight writes them"


class WatchedEngine(Engine):
    """Checks that aborted requests leave no ticket and no transfer."""

    def __init__(self, *arguments: Any, sender: InprocSender, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._sender = sender

    def abort(self, request_ids: Collection[str]) -> int:
        num_known = super().abort(request_ids)
        assert isinstance(self._role, TransferRole)
        left = [ticket.ticket_id for ticket in self._role.tickets(0.0) if ticket.ticket_id in request_ids]
        assert not left, f"{left[0]} was aborted, and has its ticket still"
        sent = [request_id for request_id in request_ids if self._sender.carries(request_id)]
        assert not sent, f"{sent[0]} was aborted, and its KV is on its way still"
        return num_known


class TicketWatch:
    """Checks between two turns that no ticket outlives its lease or its lane."""

    def __init__(self, role: TransferRole, sender: InprocSender, receiver: InprocReceiver) -> None:
        self._role = role
        self._sender = sender
        self._receiver = receiver

    def check(self, ticked_s: float) -> None:
        """`ticked_s`: the role's last tick."""
        until_s = self._role.next_deadline_s()
        assert until_s > ticked_s, f"a ticket is live {ticked_s - until_s:.3f} s after its lease"
        tickets = self._role.tickets(0.0)
        if tickets:
            _check_lanes([ticket for ticket in tickets if ticket.direction == "out"], self._sender)
            moving = [ticket for ticket in tickets if ticket.direction == "in" and ticket.state != TicketState.ARRIVED]
            _check_lanes(moving, self._receiver)


def _check_lanes(tickets: Sequence[TicketStats], end: InprocSender | InprocReceiver) -> None:
    if not tickets or end.has_news():
        return
    peers = {lane.peer for lane in end.lanes()}
    lost = [ticket for ticket in tickets if ticket.owner not in peers]
    assert not lost, f"{lost[0].ticket_id} is live, and the lane with {lost[0].owner} was lost"
