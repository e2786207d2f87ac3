"""One owner a block, no message of the past is believed, nothing is kept past its lease."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.ticket_ledger import Ledger, Reservation, TicketState
from kvtransfer.transport import Chunk
from protos.errors import TransferFailed
from protos.values import KVLayout, LaneAddress, Ticket

SIZE = 4
LAYOUT = KVLayout.dense(num_layers=2, num_kv_heads=2, head_dim=8, block_size=SIZE, dtype="bfloat16")
DESTINATION = LaneAddress(worker_id="d0", incarnation=1, host="127.0.0.1", port=1)
LEASE_S = 10.0


def reservation(
    ticket_id: str = "r1",
    generation: int = 1,
    blocks: tuple[int, ...] = (10, 11, 12),
    cached: tuple[int, ...] = (),
    source: str = "p0#1",
    now: float = 0.0,
) -> Reservation:
    ticket = Ticket(
        ticket_id=ticket_id,
        generation=generation,
        lease_s=LEASE_S,
        block_ids=blocks,
        num_cached_tokens=len(cached) * SIZE,
        layout=LAYOUT,
        destination=DESTINATION,
    )
    tokens = tuple(range((len(cached) + len(blocks)) * SIZE))
    return Reservation(ticket=ticket, source=source, token_ids=tokens, cached_ids=cached, reserved_s=now)


def chunk(first: int, count: int = 1, ticket_id: str = "r1", generation: int = 1) -> Chunk:
    return Chunk(ticket_id=ticket_id, generation=generation, first_block=first, num_blocks=count)


def land(ledger: Ledger, piece: Chunk, source: str = "p0#1", now: float = 1.0) -> tuple[int, ...]:
    block_ids = ledger.blocks_for(piece, source)
    if block_ids:
        ledger.landed(piece, now)
    ledger.check_integrity()
    return block_ids


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.reserve(reservation())
    return ledger


def test_a_ticket_lives_from_reservation_to_adoption(ledger: Ledger) -> None:
    assert ledger.state("r1", 1) is TicketState.RESERVED
    assert land(ledger, chunk(0)) == (10,)
    assert ledger.state("r1", 1) is TicketState.SENDING
    assert land(ledger, chunk(1, 2)) == (11, 12)
    assert ledger.state("r1", 1) is TicketState.ARRIVED
    assert ledger.adopt("r1", 1).block_ids == (10, 11, 12)
    assert ledger.state("r1", 1) is TicketState.ADOPTED
    ledger.assert_idle()


def test_chunks_may_come_in_any_order_and_twice(ledger: Ledger) -> None:
    assert land(ledger, chunk(2)) == (12,)
    assert land(ledger, chunk(2)) == ()
    assert ledger.state("r1", 1) is TicketState.SENDING
    assert land(ledger, chunk(0, 3)) == (10, 11, 12)
    assert land(ledger, chunk(0, 3)) == ()
    assert ledger.state("r1", 1) is TicketState.ARRIVED


def test_a_ticket_for_cached_blocks_has_arrived_at_once() -> None:
    ledger = Ledger()
    ledger.reserve(reservation(blocks=(), cached=(1, 2)))
    assert ledger.state("r1", 1) is TicketState.ARRIVED
    assert ledger.adopt("r1", 1).block_ids == (1, 2)


@pytest.mark.parametrize(
    ("piece", "source"),
    [
        (chunk(0, ticket_id="other"), "p0#1"),
        (chunk(0, generation=2), "p0#1"),
        (chunk(0), "p1#1"),
        (chunk(0), "p0#2"),
        (chunk(2, 2), "p0#1"),
        (chunk(-1, 2), "p0#1"),
        (chunk(3), "p0#1"),
        (chunk(0, 0), "p0#1"),
    ],
)
def test_foreign_chunks_are_dropped(ledger: Ledger, piece: Chunk, source: str) -> None:
    assert ledger.blocks_for(piece, source) == ()


@pytest.mark.parametrize("num_landed", [0, 1, 3])
@pytest.mark.parametrize("end", ["abort", "expire", "lose"])
def test_an_ended_ticket_releases_its_blocks_and_takes_none(ledger: Ledger, num_landed: int, end: str) -> None:
    for index in range(num_landed):
        land(ledger, chunk(index))
    if end == "abort":
        ended = [ledger.abort("r1", "the client left")]
    elif end == "expire":
        ended = [*ledger.expire(1.0 + LEASE_S)]
    else:
        ended = [*ledger.abort_source("p0#1", "it died")]
        if num_landed == 3:
            assert not ended, "what has arrived needs its source no more"
            return
    assert [ticket.block_ids for ticket in ended if ticket] == [(10, 11, 12)]
    assert land(ledger, chunk(2)) == ()
    assert ledger.state("r1", 1) is (TicketState.EXPIRED if end == "expire" else TicketState.ABORTED)
    assert ledger.abort("r1", "again") is None
    assert not ledger.expire(1000.0)
    ledger.assert_idle()


def test_blocks_may_arrive_layer_by_layer(ledger: Ledger) -> None:
    first, second = (replace(chunk(1, 2), first_layer=layer, num_layers=1) for layer in range(2))
    assert land(ledger, second) == (11, 12)
    assert land(ledger, second) == (), "these layers are here already"
    assert land(ledger, chunk(0)) == (10,)
    assert ledger.state("r1", 1) is TicketState.SENDING
    assert land(ledger, first) == (11, 12)
    assert ledger.state("r1", 1) is TicketState.ARRIVED


@pytest.mark.parametrize(("first_layer", "num_layers"), [(0, 3), (2, 1), (1, 0), (2, None)])
def test_layers_that_the_model_has_not_are_dropped(ledger: Ledger, first_layer: int, num_layers: int | None) -> None:
    assert land(ledger, replace(chunk(0), first_layer=first_layer, num_layers=num_layers)) == ()


def test_a_settled_ticket_releases_unneeded_blocks(ledger: Ledger) -> None:
    land(ledger, chunk(0))
    assert ledger.truncate("r1", 1, 1) == (11, 12)
    ledger.check_integrity()
    assert ledger.state("r1", 1) is TicketState.ARRIVED
    assert land(ledger, chunk(1)) == (), "a block that was given back is written by nobody"
    assert ledger.truncate("r1", 1, 1) == ()
    assert ledger.truncate("r1", 2, 0) == (), "another generation settles nothing"
    assert ledger.adopt("r1", 1).block_ids == (10,)


def test_only_the_source_that_was_lost_loses_its_tickets(ledger: Ledger) -> None:
    ledger.reserve(reservation("r2", blocks=(20,), source="p1#1"))
    assert [ended.ticket.ticket_id for ended in ledger.abort_source("p1#1", "it died")] == ["r2"]
    assert ledger.state("r1", 1) is TicketState.RESERVED


def test_progress_extends_a_lease_and_silence_ends_it(ledger: Ledger) -> None:
    land(ledger, chunk(0), now=8.0)
    assert not ledger.expire(8.0 + LEASE_S - 0.1)
    assert len(ledger.expire(8.0 + LEASE_S)) == 1
    tombstone = ledger.tombstone("r1", 1)
    assert tombstone is not None
    assert tombstone.reason == "no block arrived and no gateway renewed it for 10 s, 1 of 3 blocks were here"


def test_the_same_generation_finds_its_reservation(ledger: Ledger) -> None:
    land(ledger, chunk(0))
    ticket = ledger.renew("r1", 1, 2.0)
    assert ticket is not None
    assert ticket.ticket.block_ids == (10, 11, 12)
    assert ledger.state("r1", 1) is TicketState.SENDING


@pytest.mark.parametrize("num_landed", [0, 1, 3])
def test_asking_again_renews_the_lease(ledger: Ledger, num_landed: int) -> None:
    for index in range(num_landed):
        land(ledger, chunk(index))
    for now in (8.0, 16.0, 24.0):
        assert not ledger.expire(now)
        assert ledger.renew("r1", 1, now) is not None
    assert not ledger.expire(24.0 + LEASE_S - 0.1)
    assert len(ledger.expire(24.0 + LEASE_S)) == 1


def test_another_generation_renews_nothing(ledger: Ledger) -> None:
    assert ledger.renew("r1", 2, 8.0) is None
    assert len(ledger.expire(LEASE_S)) == 1


def test_a_newer_generation_fences_the_older(ledger: Ledger) -> None:
    assert ledger.renew("r1", 2, 1.0) is None
    assert ledger.abort("r1", "generation 2 took its place") is not None
    ledger.reserve(reservation(generation=2, blocks=(20, 21, 22)))
    assert land(ledger, chunk(0, generation=1)) == ()
    assert land(ledger, chunk(0, generation=2)) == (20,)
    assert ledger.state("r1", 1) is None
    assert ledger.abort("r1", "late", generation=1) is None
    with pytest.raises(TransferFailed, match="at generation 2: 1 came too late"):
        ledger.renew("r1", 1, 1.0)


def test_a_generation_that_has_ended_stays_so(ledger: Ledger) -> None:
    ledger.abort("r1", "the client left")
    with pytest.raises(TransferFailed, match=r"generation 1 was aborted \(the client left\)"):
        ledger.renew("r1", 1, 1.0)
    assert ledger.renew("r1", 2, 1.0) is None


def test_a_ticket_aborted_before_its_reservation_is_refused() -> None:
    ledger = Ledger(max_tombstones=2)
    ledger.refuse("r1", "its gateway gave it up")
    for generation in (1, 2):
        with pytest.raises(TransferFailed, match="ticket r1 was aborted: its gateway gave it up"):
            ledger.renew("r1", generation, 1.0)
    assert ledger.state("r1", 1) is None
    for index in range(2, 4):
        ledger.refuse(f"r{index}", "likewise")
        ledger.check_integrity()
    assert ledger.renew("r1", 1, 1.0) is None


def test_a_late_abort_changes_nothing(ledger: Ledger) -> None:
    ledger.refuse("r1", "late")
    assert ledger.renew("r1", 1, 1.0) is not None
    ledger.abort("r1", "the client left")
    ledger.refuse("r1", "late")
    assert ledger.renew("r1", 2, 1.0) is None


def test_tombstones_are_bounded() -> None:
    ledger = Ledger(max_tombstones=2)
    for index in range(4):
        ledger.reserve(reservation(f"r{index}"))
        ledger.abort(f"r{index}", "no reason")
        ledger.check_integrity()
    assert [ledger.state(f"r{index}", 1) for index in range(4)] == [None, None] + [TicketState.ABORTED] * 2


def test_stats_say_who_keeps_how_much_for_how_long(ledger: Ledger) -> None:
    ledger.reserve(reservation("r2", generation=3, blocks=(20,), cached=(7, 8), source="p1#4", now=2.0))
    first, second = ledger.stats(5.0)
    assert (first.ticket_id, first.generation, first.state, first.owner, first.age_s) == (
        "r1", 1, "reserved", "p0#1", 5.0,
    )  # fmt: skip
    assert first.num_bytes == 3 * LAYOUT.block_bytes
    assert (second.generation, second.age_s, second.num_bytes) == (3, 3.0, LAYOUT.block_bytes)
    assert sorted(ledger.reserved_ids()) == [7, 8, 10, 11, 12, 20]


def test_two_tickets_never_share_a_block_that_is_written(ledger: Ledger) -> None:
    ledger.reserve(reservation("r2", blocks=(12, 13)))
    with pytest.raises(AssertionError, match="two tickets may write into one block"):
        ledger.check_integrity()


IDS = st.sampled_from(["a", "b", "c"])
SOURCES = st.sampled_from(["p0#1", "p1#1"])
NUM_BLOCKS = 12


class AnyOrder(RuleBasedStateMachine):
    """Reservations, chunks, aborts, expiries and adoptions in any order, with messages of the past among them.

    `holder` says who may write a block: who the ledger gave it to. Every write the ledger allows is checked against it.
    """

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger(max_tombstones=3)
        self.now = 0.0
        self.free = set(range(NUM_BLOCKS))
        self.holder: dict[int, tuple[str, int]] = {}
        self.newest: dict[str, int] = {}
        self.past: list[tuple[Chunk, str]] = []
        self.written: dict[tuple[str, int], set[tuple[int, int]]] = {}
        self.renewed: dict[str, float] = {}  # when a ticket's lease began to run, for the last time

    def give_back(self, ended: Reservation | None) -> None:
        if ended is not None:
            for block_id in ended.ticket.block_ids:
                assert self.holder.pop(block_id) == (ended.ticket.ticket_id, ended.ticket.generation)
                self.free.add(block_id)

    @rule(ticket_id=IDS, newer=st.integers(0, 2), count=st.integers(0, 4), source=SOURCES)
    def reserve(self, ticket_id: str, newer: int, count: int, source: str) -> None:
        generation = max(1, self.newest.get(ticket_id, 0) + newer - (newer == 0))
        try:
            if self.ledger.renew(ticket_id, generation, self.now) is not None:
                self.renewed[ticket_id] = self.now
                return
        except TransferFailed:
            return
        if len(self.free) < count:
            return
        self.give_back(self.ledger.abort(ticket_id, "fenced"))
        blocks = tuple(self.free.pop() for _ in range(count))
        self.holder |= dict.fromkeys(blocks, (ticket_id, generation))
        self.newest[ticket_id] = max(generation, self.newest.get(ticket_id, 0))
        self.written[ticket_id, generation] = set()
        self.renewed[ticket_id] = self.now
        self.ledger.reserve(reservation(ticket_id, generation, blocks, source=source, now=self.now))
        pieces = [chunk(index, 1, ticket_id, generation) for index in range(count)]
        pieces += [replace(piece, first_layer=layer, num_layers=1) for piece in pieces for layer in range(2)]
        self.past += [(piece, source) for piece in (*pieces, chunk(0, count, ticket_id, generation))]

    @rule(data=st.data())
    def message(self, data: st.DataObject) -> None:
        """Any message ever sent: new, repeated, or long overdue."""
        if not self.past:
            return
        piece, source = data.draw(st.sampled_from(self.past))
        block_ids = self.ledger.blocks_for(piece, source)
        key = (piece.ticket_id, piece.generation)
        assert all(self.holder[block_id] == key for block_id in block_ids), "a late message would hit another's block"
        if block_ids:
            self.ledger.landed(piece, self.now)
            self.written[key].update((block_id, layer) for block_id in block_ids for layer in piece.layers(LAYOUT))
            self.renewed[piece.ticket_id] = self.now

    @rule(ticket_id=IDS)
    def abort(self, ticket_id: str) -> None:
        self.give_back(self.ledger.abort(ticket_id, "aborted"))

    @rule(source=SOURCES)
    def lose(self, source: str) -> None:
        for ended in self.ledger.abort_source(source, "lost"):
            self.give_back(ended)

    @rule(seconds=st.floats(0.1, LEASE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for ended in self.ledger.expire(self.now):
            assert self.renewed[ended.ticket.ticket_id] + LEASE_S <= self.now
            self.give_back(ended)
        assert all(self.renewed[entry.ticket_id] + LEASE_S > self.now for entry in self.ledger.stats(self.now))

    @rule(ticket_id=IDS)
    def adopt(self, ticket_id: str) -> None:
        generation = self.newest.get(ticket_id, 0)
        if self.ledger.state(ticket_id, generation) is TicketState.ARRIVED:
            adopted = self.ledger.adopt(ticket_id, generation)
            cells = {(block_id, layer) for block_id in adopted.ticket.block_ids for layer in range(2)}
            assert self.written[ticket_id, generation] == cells, "adopted before it was complete"
            self.give_back(adopted)

    @invariant()
    def accounts_balance(self) -> None:
        self.ledger.check_integrity()
        assert sorted(self.ledger.reserved_ids()) == sorted(self.holder)
        assert self.free | self.holder.keys() == set(range(NUM_BLOCKS))

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.now += 2 * LEASE_S
            for ended in self.ledger.expire(self.now):
                self.give_back(ended)
            self.ledger.assert_idle()
            assert len(self.free) == NUM_BLOCKS


TestAnyOrder = AnyOrder.TestCase


def test_a_reservation_keeps_its_order() -> None:
    held = reservation(blocks=(5, 3), cached=(9,))
    assert held.block_ids == (9, 5, 3)
    assert replace(held, cached_ids=()).block_ids == (5, 3)
