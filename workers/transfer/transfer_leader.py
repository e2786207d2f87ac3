"""KV transfer of a whole worker: rank 0 decides, every tensor-parallel rank does the same operation at once.

pool role ──▶ TransferLeader (rank 0) ─┬─▶ Leader.followers ══▶ RankTransfer of every follower
                                       └─────────────────────▶ RankTransfer of rank 0"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvtransfer.lane_rules import LaneConfig, merged, overdue, require_health, require_room, superfluous
from kvtransfer.transport import Arrived, Chunk, LaneLost, Presence, Sent, peer_name
from protos.values import KVLayout, LaneAddress, LaneLoad, LaneStats, Ticket
from workers.parallel.operations import TransferOperations
from workers.timeline import Timeline
from workers.transfer.rank_transfer import RankTransfer

PERIOD_S = 1.0


class LaneUpkeep:
    """`lanes` returns the open lanes, `close_lane(peer)` closes one without a loss, on every rank.

    The caller names the peers that are needed: those with live tickets.
    """

    def __init__(
        self, lanes: Callable[[], Sequence[LaneStats]], close_lane: Callable[[str], None], config: LaneConfig
    ) -> None:
        self._lanes = lanes
        self._close_lane = close_lane
        self._config = config
        self._next_look_s = 0.0

    def require(self, peer: str, needed: Collection[str]) -> None:
        """Checks that a lane may be used for a ticket. Raises TransferFailed if it is in quarantine, and Overloaded if
        it would be one too many."""
        require_health(peer, self._lanes())
        require_room(peer, needed, self._config)

    def overdue(self) -> bool:
        """True if `close_unneeded` has a lane to check, now or soon."""
        return any(lane.state == "opening" or overdue(lane, self._config) for lane in self._lanes())

    def close_unneeded(self, now: float, needed: Callable[[], Collection[str]]) -> None:
        """Closes lanes to peers that are not needed, at most once a second."""
        if now < self._next_look_s:
            return
        self._next_look_s = now + PERIOD_S
        lanes = self._lanes()
        if lanes:
            for peer in superfluous(lanes, needed(), self._config):
                self._close_lane(peer)


class TransferLeader:
    """Moves KV for a pool role. Lives at rank 0 and is called between two steps, from the engine's thread.

    Block ids are this worker's own, in the prompt's order: to push, those that hold the chunk's tokens, as far as they
    were written (`kvtransfer.reshard.covering`); to land, one for each block of the chunk.
    """

    def __init__(
        self,
        transfer: RankTransfer[Any],
        lanes: LaneConfig | None = None,
        *,
        everywhere: TransferOperations | None = None,
    ) -> None:
        """`transfer` is rank 0's. `everywhere` does an operation on all ranks (`Leader.everywhere`), if there are
        others."""
        lanes = lanes or LaneConfig()
        self._transfer = transfer
        self._everywhere: TransferOperations = transfer if everywhere is None else everywhere
        self.destinations = LaneUpkeep(transfer.lanes_out, self._everywhere.close_lane_to, lanes)
        self.sources = LaneUpkeep(transfer.lanes_in, self._everywhere.close_lane_from, lanes)
        self._coming: list[Arrived] = []  # at rank 0, and not everywhere yet
        self._loads: list[LaneLoad] = []
        self._merged: tuple[LaneLoad, ...] = ()  # of those
        self._sources: dict[Chunk, str] = {}  # arrived chunks, neither landed nor dropped

    @property
    def address(self) -> LaneAddress:
        return self._transfer.receiving().address

    def open(self, ticket: Ticket) -> None:
        """Begins to open the lane to the ticket's destination. Raises IncompatibleWorkers."""
        self._everywhere.open(ticket)

    def can_push(self, ticket: Ticket) -> bool:
        """True if a chunk may be pushed now, by the staging at rank 0; that of the other ranks is much the same."""
        return self._transfer.sending().can_offer(ticket)

    def push(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int], num_in_flight: int | None = None) -> None:
        """Copies the blocks and sends them to the ticket's destination; they may be freed once this returns.
        `num_in_flight` steps do not write them, so the copy need not wait for these; None: it waits for all."""
        self._everywhere.push(ticket, chunk, tuple(block_ids), num_in_flight)

    @property
    def follows_layers(self) -> bool:
        """Whether the runner reports each layer that a step has written, so that `arm` has an effect."""
        return self._transfer.follows_layers

    def arm(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int]) -> None:
        """Pushes a chunk as soon as the next launched step has written its last layer. The blocks may be freed once the
        step is launched."""
        self._everywhere.arm(ticket, chunk, tuple(block_ids))

    def land(self, chunk: Chunk, block_ids: Sequence[int]) -> None:
        """Writes a chunk that `poll_arrived` has returned into these blocks, on every rank."""
        assert len(block_ids) == chunk.num_blocks
        self._everywhere.land(chunk, tuple(block_ids), self._sources.pop(chunk))

    def drop(self, chunk: Chunk) -> None:
        self._everywhere.drop(chunk, self._sources.pop(chunk))

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        """Prepares the lane from `source`. Call it before the ticket leaves this worker, once all chunks that
        `poll_arrived` returned are landed or dropped."""
        self._everywhere.expect(source, source_layout)

    def cancel(self, ticket_id: str) -> None:
        self._everywhere.cancel(ticket_id)

    def record(self, timeline: Timeline) -> None:
        """Rank 0's gathers, scatters and sends are recorded there."""
        self._transfer.timeline = timeline

    def show_sent(self, event: Sent, ticket: Ticket, hidden_s: float) -> None:
        """Adds a send to the profile. `hidden_s` of it the sequence was still being computed."""
        self._transfer.show("KV send", event, peer_name(ticket.destination), hidden_s)

    def poll_sent(self) -> Sequence[Sent | LaneLost]:
        """The chunks that rank 0 has sent, and the lanes that it has lost, since the last call."""
        return self._transfer.sender.poll() if self._transfer.sender else ()

    def poll_arrived(self) -> Sequence[Arrived | LaneLost]:
        """The chunks that have arrived on every rank since the last call, each to be landed or dropped, and the lanes
        that rank 0 has lost. A chunk that is cancelled on its way is left out: its ticket ends by itself."""
        events = self._transfer.receiver.poll() if self._transfer.receiver else ()
        self._coming += [event for event in events if isinstance(event, Arrived)]
        polled: list[Arrived | LaneLost] = list(self._arrived_everywhere())
        for event in events:
            if isinstance(event, LaneLost):
                self._drop_peer(event.peer)
                polled.append(event)
        return polled

    def _arrived_everywhere(self) -> Sequence[Arrived]:
        """Returns the chunks that every rank has. A chunk that came twice is looked for one at a time, since a rank can
        answer only that."""
        chunks: dict[Chunk, Arrived] = {}
        for event in self._coming:
            if event.chunk not in self._sources:
                chunks.setdefault(event.chunk, event)
        if not chunks:
            return ()
        looked = list(zip(chunks.values(), self._everywhere.look(tuple(chunks)), strict=True))
        here = [event for event, presence in looked if presence is Presence.HERE]
        void = [event for event, presence in looked if presence is Presence.VOID]
        self._coming = [event for event in self._coming if not any(event is done for done in (*here, *void))]
        self._sources.update((event.chunk, event.source) for event in here)
        for event in here:
            self._transfer.show("KV receive", event, event.source)
        for event in void:
            self._everywhere.drop(event.chunk, event.source)
        return here

    def _drop_peer(self, peer: str) -> None:
        """Chunks of a lost peer that have arrived on some ranks will not arrive on the others."""
        self._coming = [event for event in self._coming if event.source != peer]
        chunks = tuple(chunk for chunk, source in self._sources.items() if source == peer)
        self._everywhere.drop_source(peer, chunks)

    def is_sending(self) -> bool:
        """True if a chunk is on its way from rank 0, or sent and not polled yet."""
        return self._transfer.sender is not None and self._transfer.sender.busy()

    def busy(self) -> bool:
        """True if a chunk is on its way at rank 0, or a lane has been idle for too long."""
        return self.is_moving() or self.destinations.overdue() or self.sources.overdue()

    def is_moving(self) -> bool:
        """True if a chunk is on its way at rank 0."""
        return any(end.busy() for end in (self._transfer.sender, self._transfer.receiver) if end is not None)

    def lanes(self) -> Sequence[LaneStats]:
        return [*self._transfer.lanes_out(), *self._transfer.lanes_in()]

    def lane_loads(self) -> tuple[LaneLoad, ...]:
        """Counters of rank 0's lanes, by transport."""
        ends = (self._transfer.sender, self._transfer.receiver)
        loads = [load for end in ends if end is not None for load in end.lane_loads()]
        if loads != self._loads:  # loads seldom change, and every message carries them
            self._loads, self._merged = loads, merged(loads)
        return self._merged

    def close(self) -> None:
        """Closes rank 0's lanes; a follower closes its own when it stops."""
        self._transfer.close()
