"""The role of a worker that reads prompts: pushes their KV to the decode worker that reserved blocks for it.

    admissible ── opens the lane ──▶ computing ── after_prefill: HOLD ──▶ held ── all offered ──▶ released
                                        │  tick: pushes what has become full  │
                                        └──── lane lost, lease over, abort ───┴──▶ failed, or forgotten

The first token never waits for any of this. A payload is a copy: what is offered needs its blocks no more. A lease
runs only while something offered has not left: until then the gateway keeps the ticket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtransfer.reshard import require_same_layout
from kvtransfer.session import Session
from kvtransfer.transport import Chunk, LaneLost, Sent, peer_name
from prefill_pool.config import PrefillConfig
from protos.errors import BatonError, InvalidRequest, TransferFailed
from protos.values import KVLayout, Ticket, WorkerLoad
from workers.engine.request import Request, State
from workers.engine.role import Disposition, Tick
from workers.kv.mover import Mover


@dataclass(slots=True, eq=False)
class _Push:
    request: Request
    session: Session
    complete: bool = False  # the prompt is: its last block may go, full or not


class PrefillRole:
    """`worker_id` and `layout` are this worker's own. Not thread-safe: the engine's thread calls everything here."""

    def __init__(self, mover: Mover, worker_id: str, layout: KVLayout, config: PrefillConfig | None = None) -> None:
        self._mover = mover
        self._worker_id = worker_id
        self._layout = layout
        self._max_chunk_blocks = max(1, (config or PrefillConfig()).chunk_bytes // layout.block_bytes)
        self._pushes: dict[str, _Push] = {}  # by ticket
        self._released: list[str] = []
        self._failed: dict[str, BatonError] = {}
        self._transfer_bytes = 0
        self._transfer_s = 0.0

    def admissible(self, request: Request, now: float) -> bool:
        """A request without a ticket is served to its end here."""
        ticket = request.ticket
        if ticket is None:
            return True
        push = self._pushes.get(ticket.ticket_id)
        if push is None or push.request is not request:
            try:
                self._begin(request, ticket)
            except BatonError as error:
                self._failed[request.request_id] = error
        return request.request_id not in self._failed

    def after_prefill(self, request: Request) -> Disposition:
        push = self._push_of(request)
        if push is None:
            return Disposition.KEEP
        push.complete = True
        if push.session.all_offered:
            del self._pushes[push.session.ticket.ticket_id]
            return Disposition.RELEASE
        return Disposition.HOLD

    def forget(self, request: Request) -> None:
        self._failed.pop(request.request_id, None)
        push = self._push_of(request)
        if push is not None:
            self._stop(push)
        if request.state is State.HELD:
            self._released.append(request.request_id)

    def withdraw(self, request_id: str) -> bool:
        return False

    def tick(self, now: float) -> Tick:
        for event in self._mover.poll_sent():
            if isinstance(event, Sent):
                self._sent(event, now)
            else:
                self._lost(event)
        for push in tuple(self._pushes.values()):
            if push.session.expired(now):
                self._fail(push, f"the lease of {push.session.ticket.lease_s:g} s is over and nothing has moved")
            else:
                self._advance(push, now)
        tick = Tick(released=tuple(self._released), failed=tuple(self._failed.items()))
        self._released.clear()
        self._failed.clear()
        return tick

    def busy(self) -> bool:
        return bool(self._pushes or self._released or self._failed) or self._mover.busy()

    def load(self, load: WorkerLoad) -> WorkerLoad:
        return replace(
            load,
            num_tickets=len(self._pushes),
            transfer_bytes=self._transfer_bytes,
            transfer_s=self._transfer_s,
        )

    def _begin(self, request: Request, ticket: Ticket) -> None:
        require_same_layout(self._worker_id, self._layout, ticket.destination.worker_id, ticket.layout)
        session = Session(ticket, max_chunk_blocks=self._max_chunk_blocks)
        if not session.fits(request.num_tokens):
            raise InvalidRequest(
                f"ticket {ticket.ticket_id} is for blocks {session.first_block} to "
                f"{session.first_block + len(ticket.block_ids)} of the prompt, which has {request.num_tokens} tokens: "
                f"reserve with the tokens that are to be read",
                param="ticket",
            )
        older = self._pushes.get(ticket.ticket_id)
        if older is not None and older.session.ticket.generation >= ticket.generation:
            raise InvalidRequest(
                f"ticket {ticket.ticket_id} is being served already: reserve one for each request", param="ticket"
            )
        if older is not None:
            self._fail(older, f"generation {ticket.generation} of the ticket took its place")
        self._mover.open(ticket)
        self._pushes[ticket.ticket_id] = _Push(request, session)

    def _advance(self, push: _Push, now: float) -> None:
        """Offers what can be offered. The engine's blocks are read here and nowhere else."""
        session, request = push.session, push.request
        while self._mover.can_push(session.ticket):
            chunk = session.next_chunk(request.num_computed, complete=push.complete)
            if chunk is None:
                break
            self._mover.push(session.ticket, chunk, self._blocks_of(request, session, chunk))
            session.offered(chunk, now)
        if push.complete and session.all_offered:
            del self._pushes[session.ticket.ticket_id]
            self._released.append(request.request_id)

    def _blocks_of(self, request: Request, session: Session, chunk: Chunk) -> list[int]:
        first = session.first_block + chunk.first_block
        return request.block_ids[first : first + chunk.num_blocks]

    def _sent(self, event: Sent, now: float) -> None:
        self._transfer_bytes += event.num_bytes
        self._transfer_s += event.elapsed_s
        push = self._pushes.get(event.chunk.ticket_id)
        if push is not None and push.session.ticket.generation == event.chunk.generation:
            push.session.sent(event.chunk, now)

    def _lost(self, event: LaneLost) -> None:
        for push in tuple(self._pushes.values()):
            if peer_name(push.session.ticket.destination) == event.peer:
                self._fail(push, f"the lane to {event.peer} was lost: {event.reason}")

    def _fail(self, push: _Push, reason: str) -> None:
        self._stop(push)
        self._failed[push.request.request_id] = TransferFailed(
            f"the KV of request {push.request.request_id} could not be passed on: {reason}"
        )

    def _stop(self, push: _Push) -> None:
        ticket_id = push.session.ticket.ticket_id
        del self._pushes[ticket_id]
        self._mover.cancel(ticket_id)

    def _push_of(self, request: Request) -> _Push | None:
        push = self._pushes.get(request.ticket.ticket_id) if request.ticket else None
        return push if push and push.request is request else None
