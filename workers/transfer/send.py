"""The sending side of KV transfer: KV of prompts for decode workers, of migrating sequences, and of blocks that others
pull.

    begin(request, ticket) ─▶ pushed as it is computed ── complete ─▶ all offered ─▶ released           a prompt
    move(request, ticket) ──▶ pushed while it decodes ── caught up ─▶ moved: HELD ─▶ all offered ─▶ released
    share(ticket, hashes) ──▶ references to cached blocks ──────────▶ all offered ─▶ references released
                              and to blocks loaded from host ─ loaded ▶

A payload is a copy: an offered block may be freed. A tick returns each failure once; a move that fails before the
sequence was HELD leaves it where it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtransfer.push_session import Session
from kvtransfer.reshard import covering, require_compatible
from kvtransfer.ticket_ledger import ticket_bytes
from kvtransfer.transport import Chunk, LaneLost, Sent, peer_name
from protos.errors import BatonError, InvalidRequest, TransferFailed
from protos.values import BlockHash, KVLayout, Ticket, TicketStats
from workers.batch import Batch
from workers.kv.block_pool import BlockPool, page_hash
from workers.scheduling.request import Onload, Request, State
from workers.scheduling.role import Tick, TransferLoad
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import TransferConfig

log = logging.getLogger("baton.worker")

MAX_ARMED_CHUNKS = 4.0  # chunks that a step pushes while it computes, plus those of the last prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Cached blocks, each with a reference of ours, the last of them still `coming` from the host. The others hold
    `num_here` tokens, all of them `num_tokens`. Of each group, the first `num_passed` blocks are left out."""

    tables: Sequence[Sequence[int]]
    num_tokens: int
    num_here: int
    num_passed: Sequence[int] = (0,)
    coming: Onload | None = None

    @property
    def block_ids(self) -> list[int]:
        return [
            block_id for table, passed in zip(self.tables, self.num_passed, strict=True) for block_id in table[passed:]
        ]

    @property
    def complete(self) -> bool:
        return self.coming is None or self.coming.done

    @property
    def num_computed(self) -> int:
        return self.num_tokens if self.complete else self.num_here


@dataclass(slots=True, eq=False)
class Push:
    """`complete`: no further tokens will be computed for it. `moves`: a running sequence that is to migrate."""

    source: Request | Shared
    session: Session
    begun_s: float
    complete: bool = False
    moves: bool = False
    completed_s: float | None = None
    known: tuple[int, bool] = (0, False)  # tokens computed, and whether these are all, when the last step was planned

    def hidden_s(self, event: Sent) -> float:
        """How long a chunk has travelled while its prompt was still computed."""
        if self.moves or not isinstance(self.source, Request):
            return 0.0
        if self.completed_s is None or event.ended_s is None:
            return event.elapsed_s
        return min(max(0.0, self.completed_s - event.ended_s + event.elapsed_s), event.elapsed_s)

    @property
    def request_id(self) -> str:
        return self.source.request_id if isinstance(self.source, Request) else self.session.ticket.ticket_id

    def caught_up(self) -> bool:
        """True if the sequence should stop here: its full blocks have left, or the next token would find no room."""
        request, session = self.source, self.session
        assert isinstance(request, Request)
        if request.state is not State.RUNNING or request.num_to_compute != 1:
            return False
        return session.is_full(request.num_computed) or session.all_sent(request.num_computed)


class Outgoing:
    """A role's sending half. `layout` is this worker's own. Not thread-safe: the engine's thread calls everything."""

    def __init__(
        self,
        transfers: TransferLeader,
        pool: BlockPool,
        layout: KVLayout,
        config: TransferConfig,
    ) -> None:
        self._transfers = transfers
        self._pool = pool
        self._layout = layout
        self.config = config
        self._pushes: dict[str, Push] = {}  # by ticket
        self._leaving: dict[str, Push] = {}  # all offered, not all sent
        self._forgone: list[str] = []  # withdrawn chunks, dropped after the next poll
        self._moved: list[str] = []
        self._released: list[str] = []
        self._failed: dict[str, BatonError] = {}
        self._stayed: dict[str, BatonError] = {}
        self._num_moved = 0
        self._num_bytes = 0
        self._busy_s = 0.0
        self._hidden_s = 0.0

    # -- what is pushed ------------------------------------------------------------------------------------------------

    def begin(self, request: Request, ticket: Ticket, now: float) -> bool:
        """From now on the prompt's blocks are pushed as they become full. Idempotent. False if it has failed: the next
        tick returns the error."""
        push = self._pushes.get(ticket.ticket_id)
        if push is None or push.source is not request:
            try:
                session = self._open(ticket, now)
                if not session.fits(request.num_tokens):
                    raise InvalidRequest(
                        f"ticket {ticket.ticket_id} is for blocks {session.first_block} to {ticket.stop} of a "
                        f"prompt of {request.num_tokens} tokens",
                        param="ticket",
                    )
                self._add(Push(request, session, now))
            except BatonError as error:
                self._failed[request.request_id] = error
        return request.request_id not in self._failed

    def completed(self, request: Request) -> bool | None:
        """Whether all blocks of the computed prompt are offered, so that they may be freed. None if it is not
        pushed."""
        push = self._push_of(request)
        if push is None:
            return None
        push.complete = True
        if push.session.all_offered:
            self._leave(push)
            return True
        return False

    def migrate(self, request: Request, ticket: Ticket, now: float) -> None:
        """Begins to move the running sequence to the ticket's worker. A tick returns that it has moved, or stays."""
        try:
            if self._push_of(request) is not None:
                raise InvalidRequest(f"request {request.request_id} is being pushed already", param="request_id")
            session = self._open(ticket, now)
            if request.state is not State.RUNNING or request.num_to_compute != 1:
                raise TransferFailed(f"request {request.request_id} is not in decode: it can move once it is")
            self._add(Push(request, session, now, moves=True))
        except BatonError as error:
            self._stayed[request.request_id] = error

    def share(self, ticket: Ticket, hashes: Sequence[BlockHash], now: float, coming: Onload | None = None) -> int:
        """Pushes the ticket's blocks that are cached here, up to the first that is missing. Returns their number. The
        hashes are of blocks of this worker's size, which may differ from the ticket's. Blocks that are `coming` from
        the host follow those on the device."""
        session = self._open(ticket, now)
        shared = self._shared(ticket, hashes, coming)
        stop = min(shared.num_tokens // ticket.layout.block_size, ticket.stop)
        if stop <= session.first_block or (stop < ticket.stop and (session.needs_all or any(shared.num_passed))):
            return 0  # a shorter prefix would make the ticket's blocks wrong
        push = Push(shared, session, now, complete=shared.complete)
        self._add(push)  # may fail: nothing is held for the push before
        self._pool.acquire(shared.block_ids)
        session.truncate(stop * ticket.layout.block_size)
        return stop - session.first_block

    def _shared(self, ticket: Ticket, hashes: Sequence[BlockHash], coming: Onload | None) -> Shared:
        size = self._pool.block_size
        pages = dict(zip(coming.pages, coming.block_ids, strict=True)) if coming is not None and not coming.done else {}
        names = {page_hash(hashes[index], group) for group, index in pages}
        matched = self._pool.match_read(
            hashes,
            ticket.stop * ticket.layout.block_size - 1,
            has=(lambda name: name in names or self._pool.has(name)) if pages else None,
        )
        for group, index in matched.on_host:
            matched.tables[group][index] = pages[group, index]
        return Shared(
            tables=matched.tables,
            num_passed=matched.num_passed,
            num_tokens=matched.num_blocks * size,
            num_here=matched.num_here * size,
            coming=coming,
        )

    def _open(self, ticket: Ticket, now: float) -> Session:
        destination = ticket.destination
        require_compatible(self._transfers.address.worker_id, self._layout, destination.worker_id, ticket.layout)
        self._transfers.destinations.require(peer_name(destination), self._live_destinations())
        older = self._pushes.get(ticket.ticket_id)
        if older is not None and older.session.ticket.generation >= ticket.generation:
            raise InvalidRequest(
                f"ticket {ticket.ticket_id} is being served: reserve one for each request", param="ticket"
            )
        if older is not None:
            self._fail(older, f"generation {ticket.generation} of the ticket took its place")
        return Session(ticket, max_chunk_blocks=max(1, self.config.chunk_bytes // ticket.layout.block_bytes))

    def _add(self, push: Push) -> None:
        self._transfers.open(push.session.ticket)
        self._pushes[push.session.ticket.ticket_id] = push

    # -- what a role passes on -----------------------------------------------------------------------------------------

    def drop(self, request: Request) -> None:
        """Stops reading the blocks of an ended request. If it is HELD, `tick` releases it first."""
        self._failed.pop(request.request_id, None)
        self._stayed.pop(request.request_id, None)
        push = self._push_of(request)
        if push is not None:
            self._stop(push)
        if request.state is State.HELD:
            self._released.append(request.request_id)

    def withdraw(self, ticket_id: str) -> bool:
        """Stops pushing shared blocks, or unsent blocks of a request that has ended. Returns whether there were any."""
        if ticket_id in self._leaving:
            self._transfers.cancel(ticket_id)
            self._forgone.append(ticket_id)
            return True
        push = self._pushes.get(ticket_id)
        if push is None or isinstance(push.source, Request):
            return False
        self._stop(push)
        return True

    def send(self, now: float, num_in_flight: int | None = None) -> bool:
        """Pushes blocks of computed positions. Returns whether a push ended or failed, so that a tick returns something
        or blocks are free. Blocks are read here, in `advance`, and in steps that `launching` arms. `num_in_flight`
        steps do not write them; None: any step may."""
        num_pushes = len(self._pushes)
        for push in (*self._pushes.values(), *self._leaving.values()):
            if push.complete and push.completed_s is None:
                push.completed_s = now
        self._poll_sent(now)
        for push in tuple(self._pushes.values()):
            if push.session.expired(now):
                self._fail(push, f"the lease of {push.session.ticket.lease_s:g} s is over and nothing has moved")
            else:
                self._advance(push, now, num_in_flight)
        return len(self._pushes) < num_pushes or bool(self._moved)

    def is_behind(self) -> bool:
        """True if `advance` has something to push, now or once a lane has room."""
        return any(_next_chunk(push) is not None for push in self._pushes.values())

    def advance(self, now: float, num_in_flight: int) -> None:
        """During the wait for a step, pushes blocks computed before it. The next tick returns the outcome."""
        self._poll_sent(now)
        for push in self._pushes.values():
            self._offer(push, now, num_in_flight)

    def tick(self, now: float, num_in_flight: int | None = None) -> Tick:
        """Sends, and returns the outcome of all pushes since the last tick."""
        self.send(now, num_in_flight)
        self._transfers.destinations.close_unneeded(now, self._live_destinations)
        tick = Tick(
            released=tuple(self._released),
            failed=tuple(self._failed.items()),
            moved=tuple(self._moved),
            stayed=tuple(self._stayed.items()),
        )
        self._moved.clear()
        self._released.clear()
        self._failed.clear()
        self._stayed.clear()
        return tick

    def launching(self, batch: Batch, now: float) -> None:
        """Pushes the rest of prompts that this batch completes while the batch is computed."""
        if not self._pushes or not self._transfers.follows_layers:
            return
        ending = {row.request_id: row.stop for row in batch.rows if row.sample is not None}
        num_left = MAX_ARMED_CHUNKS
        for push in self._pushes.values():
            source, ticket = push.source, push.session.ticket
            if push.moves or push.complete or not isinstance(source, Request) or ticket.layout.head is not None:
                continue  # a head's KV of a step follows the step
            if ending.get(source.request_id) == source.num_tokens and num_left > 0 and self._transfers.can_push(ticket):
                for chunk in push.session.last_chunks(now, least_bytes=self.config.group_bytes):
                    self._transfers.arm(ticket, chunk, _blocks_of(push, chunk, self._layout.block_size))
                    num_left -= chunk.num_bytes(ticket.layout) / self.config.chunk_bytes

    def busy(self) -> bool:
        return bool(self._pushes or self._moved or self._released or self._failed or self._stayed)

    def load(self) -> TransferLoad:
        return {
            "num_tickets": len(self._pushes),
            "transfer_bytes": self._num_bytes,
            "transfer_s": self._busy_s,
            "transfer_hidden_s": self._hidden_s,
            "num_moved": self._num_moved,
        }

    def stats(self, now: float) -> tuple[TicketStats, ...]:
        return tuple(push_stats(push, now) for push in self._pushes.values())

    def next_deadline_s(self) -> float:
        """When the first lease of a ticket on the wire ends; infinity without one."""
        return min((push.session.deadline_s for push in self._pushes.values()), default=math.inf)

    def shared_ids(self) -> Iterable[int]:
        """Yields blocks as often as they are held for others."""
        return [i for push in self._pushes.values() if isinstance(push.source, Shared) for i in push.source.block_ids]

    # ------------------------------------------------------------------------------------------------------------------

    def _live_destinations(self) -> set[str]:
        return {peer_name(push.session.ticket.destination) for push in self._pushes.values()}

    def _poll_sent(self, now: float) -> None:
        for event in self._transfers.poll_sent():
            if isinstance(event, Sent):
                self._sent(event, now)
            else:
                self._lost(event)
        for ticket_id in self._forgone:
            self._leaving.pop(ticket_id, None)
        self._forgone.clear()

    def _advance(self, push: Push, now: float, num_in_flight: int | None) -> None:
        session, source = push.session, push.source
        if isinstance(source, Shared):
            push.complete = source.complete
        push.known = (source.num_computed, push.complete)
        self._offer(push, now, num_in_flight)
        if push.moves and not push.complete and session.is_full(source.num_computed - 1):
            self._fail(push, "the sequence has outgrown the room there is for it")
            return
        if push.moves and not push.complete and push.caught_up():
            push.complete = True
            session.truncate(source.num_computed)
            self._moved.append(push.request_id)
            self._num_moved += 1
            push.known = (source.num_computed, True)
            self._offer(push, now, num_in_flight)
        if push.complete and session.all_offered:
            self._leave(push)
            self._let_go(push)

    def _offer(self, push: Push, now: float, num_in_flight: int | None) -> None:
        session = push.session
        while self._transfers.can_push(session.ticket):
            chunk = _next_chunk(push)
            if chunk is None:
                break
            held = _blocks_of(push, chunk, self._layout.block_size)
            self._transfers.push(session.ticket, chunk, held, num_in_flight)
            session.offered(chunk, now)

    def _sent(self, event: Sent, now: float) -> None:
        ticket_id = event.chunk.ticket_id
        push = self._pushes.get(ticket_id) or self._leaving.get(ticket_id)
        if push is not None and push.session.ticket.generation == event.chunk.generation:
            self._busy_s += event.elapsed_s  # counts with its bytes or not at all: routing divides the two
            self._num_bytes += event.chunk.num_bytes(push.session.ticket.layout)  # from all ranks
            push.session.sent(event.chunk, now)
            hidden_s = push.hidden_s(event)
            self._hidden_s += hidden_s
            self._transfers.show_sent(event, push.session.ticket, hidden_s)
            if push.session.num_sent == push.session.num_offered:
                self._leaving.pop(ticket_id, None)

    def _leave(self, push: Push) -> None:
        """Called when everything has been read: only the rest of the transfer remains."""
        ticket_id = push.session.ticket.ticket_id
        del self._pushes[ticket_id]
        if push.session.num_sent < push.session.num_offered:
            self._leaving[ticket_id] = push

    def _lost(self, event: LaneLost) -> None:
        self._leaving = {
            ticket_id: push
            for ticket_id, push in self._leaving.items()
            if peer_name(push.session.ticket.destination) != event.peer
        }
        for push in tuple(self._pushes.values()):
            if peer_name(push.session.ticket.destination) == event.peer:
                self._fail(push, f"the lane to {event.peer} was lost: {event.reason}")

    def _fail(self, push: Push, reason: str) -> None:
        self._stop(push)
        error = TransferFailed(f"the KV of request {push.request_id} could not be passed on: {reason}")
        if not isinstance(push.source, Request):
            log.warning("%s", error.message)
        elif push.moves and not push.complete:
            self._stayed[push.request_id] = error
        else:
            self._failed[push.request_id] = error

    def _stop(self, push: Push) -> None:
        ticket_id = push.session.ticket.ticket_id
        del self._pushes[ticket_id]
        self._transfers.cancel(ticket_id)
        if isinstance(push.source, Shared):
            self._let_go(push)

    def _let_go(self, push: Push) -> None:
        if isinstance(push.source, Shared):
            self._pool.release(push.source.block_ids)
        else:
            self._released.append(push.request_id)

    def _push_of(self, request: Request) -> Push | None:
        return next((push for push in self._pushes.values() if push.source is request), None)


def _next_chunk(push: Push) -> Chunk | None:
    """The next chunk of a push; a preempted request has fewer blocks than planned."""
    num_computed, complete = push.known
    num_left = push.source.num_computed
    if push.moves:
        push.session.forgo(num_left)
    return push.session.next_chunk(min(num_computed, num_left), complete=complete and num_computed <= num_left)


def _blocks_of(push: Push, chunk: Chunk, block_size: int) -> Sequence[int]:
    """Blocks of the chunk. Where larger blocks of the destination begin before a window, the first block still held
    stands for pages that no position reads."""
    held = covering(push.session.ticket, chunk, block_size)
    table, passed = push.source.tables[chunk.group], push.source.num_passed[chunk.group]
    first = table[min(passed, len(table) - 1)]
    return [*[first] * (min(passed, held.stop) - held.start), *table[max(passed, held.start) : held.stop]]


def push_stats(push: Push, now: float) -> TicketStats:
    ticket = push.session.ticket
    return TicketStats(
        ticket_id=ticket.ticket_id,
        generation=ticket.generation,
        state="held" if push.complete else "moving" if push.moves else "pushing",
        owner=peer_name(ticket.destination),
        age_s=now - push.begun_s,
        num_bytes=ticket_bytes(ticket),
        direction="out",
    )
