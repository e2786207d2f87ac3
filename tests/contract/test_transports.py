"""The contract of transports. Two ends in one process; waits are for events only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transport import Arrived, LaneLost, peer_name
from kvtransfer.transports.collective.collective import CollectiveReceiver
from kvtransfer.transports.links.shm import NUM_SLOTS
from protos.errors import IncompatibleWorkers, Misconfigured, TransferFailed
from tests.contract.site import (
    BLOCK_BYTES,
    KINDS,
    LAYOUT,
    PATIENCE_S,
    WIRED,
    Site,
    address,
    chunk_of,
    kv,
    meet,
    one_head,
    push,
    ticket_for,
)
from tests.layouts import changed


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WIRED)
def over(request: pytest.FixtureRequest) -> str:
    """The transports whose lanes have threads and wires."""
    return str(request.param)


@pytest.fixture
def site(kind: str) -> Iterator[Site]:
    site = Site(kind, LaneConfig(heartbeat_s=0.05, max_staged_bytes=4 * BLOCK_BYTES, message_bytes=100))
    yield site
    site.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")], "a lane is left behind"


def test_a_payload_arrives_as_it_was_offered(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    chunk, payload = chunk_of(ticket, 2, num_blocks=3), kv(3)
    push(site, sender, ticket, [(chunk, payload)])
    (arrived,) = site.events(receiver, 1)
    assert isinstance(arrived, Arrived)
    assert (arrived.chunk, arrived.source, arrived.num_bytes) == (chunk, "p0#1", payload.nbytes)
    assert torch.equal(receiver.take(chunk, 1.0), payload)
    (sent,) = site.events(sender, 1)
    assert (sent.chunk, sent.num_bytes) == (chunk, payload.nbytes)
    assert not sender.busy()
    assert not receiver.busy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_of_every_dtype_travels(site: Site, dtype: torch.dtype) -> None:
    sender, receiver, ticket = meet(site)
    chunk, payload = chunk_of(ticket, 0), kv(dtype=dtype)
    payload[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-30]).to(dtype)
    push(site, sender, ticket, [(chunk, payload)])
    site.events(receiver, 1)
    taken = receiver.take(chunk, 1.0)
    assert taken.dtype == dtype
    assert torch.equal(taken.view(torch.uint8), payload.view(torch.uint8))


def test_chunks_arrive_in_the_order_they_were_offered(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    sequence = [(chunk_of(ticket, index), kv(seed=index)) for index in range(3)]
    push(site, sender, ticket, sequence)
    arrived = site.events(receiver, 3)
    assert [event.chunk for event in arrived] == [chunk for chunk, _ in sequence]
    for chunk, payload in reversed(sequence):
        assert torch.equal(receiver.take(chunk, 1.0), payload)
    assert [event.chunk for event in site.events(sender, 3)] == [chunk for chunk, _ in sequence]


def test_a_payload_is_taken_once(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    chunk = chunk_of(ticket, 0)
    push(site, sender, ticket, [(chunk, kv())])
    site.events(receiver, 1)
    receiver.take(chunk, 1.0)
    with pytest.raises(TransferFailed, match="r1"):
        receiver.take(chunk, 0.01)


def test_a_dropped_payload_is_gone(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    chunk = chunk_of(ticket, 0)
    push(site, sender, ticket, [(chunk, kv())])
    site.events(receiver, 1)
    receiver.drop(chunk, "p0#1")
    assert not receiver.busy()
    with pytest.raises(TransferFailed):
        receiver.take(chunk, 0.01)


def test_the_same_chunk_twice_is_two_payloads(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    chunk = chunk_of(ticket, 0)
    push(site, sender, ticket, [(chunk, kv(seed=1)), (chunk, kv(seed=2))])
    site.events(receiver, 2)
    assert torch.equal(receiver.take(chunk, 1.0), kv(seed=1))
    assert torch.equal(receiver.take(chunk, 1.0), kv(seed=2))


def test_two_senders_have_lanes_of_their_own(site: Site) -> None:
    receiver = site.receiver(address("d0"))
    senders = [site.sender(address(name)) for name in ("p0", "p1")]
    tickets = [ticket_for(receiver, ticket_id=f"r{index}") for index in range(2)]
    for index, (sender, ticket) in enumerate(zip(senders, tickets, strict=True)):
        receiver.expect(sender.address, LAYOUT)
        push(site, sender, ticket, [(chunk_of(ticket, 0), kv(seed=index))])
    arrived = site.events(receiver, 2)
    assert {(event.chunk.ticket_id, event.source) for event in arrived} == {("r0", "p0#1"), ("r1", "p1#1")}
    for index, ticket in enumerate(tickets):
        assert torch.equal(receiver.take(chunk_of(ticket, 0), 1.0), kv(seed=index))
    assert {(lane.peer, lane.num_bytes) for lane in receiver.lanes()} == {("p0#1", BLOCK_BYTES), ("p1#1", BLOCK_BYTES)}


def test_one_sender_reaches_two_receivers(site: Site) -> None:
    sender = site.sender(address("p0"))
    for index, name in enumerate(("d0", "d1")):
        receiver = site.receiver(address(name))
        receiver.expect(sender.address, LAYOUT)
        ticket = ticket_for(receiver)
        push(site, sender, ticket, [(chunk_of(ticket, 0), kv(seed=index))])
        site.events(receiver, 1)
        assert torch.equal(receiver.take(chunk_of(ticket, 0), 1.0), kv(seed=index))
    assert {lane.peer for lane in sender.lanes()} == {"d0#1", "d1#1"}


def test_other_layouts_are_refused_by_both_ends(site: Site) -> None:
    sender, receiver = site.sender(address("p0")), site.receiver(address("d0"))
    other = changed(LAYOUT, num_layers=3, block_size=6)
    with pytest.raises(
        IncompatibleWorkers, match=r"p0.*d0.*num_layers is 3 there and 2 here.*block_size is 6 there and 4"
    ):
        receiver.expect(sender.address, other)
    with pytest.raises(IncompatibleWorkers, match=r"block_size"):
        sender.open(replace(ticket_for(receiver), layout=other))
    assert not sender.lanes()
    assert not receiver.lanes()


def test_a_closed_receiver_is_a_lost_lane(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    site.events(sender, 1)
    receiver.close()
    (lost,) = site.events(sender, 1)
    assert isinstance(lost, LaneLost)
    assert lost.peer == "d0#1"
    assert lost.reason
    assert not sender.lanes()


def test_a_closed_sender_is_a_lost_lane_with_its_arrived_chunks(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    chunk = chunk_of(ticket, 0)
    push(site, sender, ticket, [(chunk, kv())])
    site.events(receiver, 1)
    sender.close()
    (lost,) = site.events(receiver, 1)
    assert isinstance(lost, LaneLost)
    assert lost.peer == "p0#1"
    assert torch.equal(receiver.take(chunk, 1.0), kv())
    assert not receiver.lanes()


def test_a_restarted_sender_gets_a_new_lane(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    reborn = site.sender(address("p0", incarnation=2))
    receiver.expect(reborn.address, LAYOUT)
    (lost,) = site.events(receiver, 1)
    assert lost.peer == "p0#1"
    push(site, reborn, ticket, [(chunk_of(ticket, 1), kv(seed=1))])
    (arrived,) = site.events(receiver, 1)
    assert arrived.source == "p0#2"
    assert torch.equal(receiver.take(chunk_of(ticket, 1), 1.0), kv(seed=1))
    assert [lane.peer for lane in receiver.lanes()] == ["p0#2"]


def test_a_restarted_receiver_gets_a_new_lane(site: Site) -> None:
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    receiver.close()
    reborn = site.receiver(address("d0", incarnation=2))
    reborn.expect(sender.address, LAYOUT)
    fresh = ticket_for(reborn)
    push(site, sender, fresh, [(chunk_of(fresh, 0), kv(seed=3))])
    site.events(reborn, 1)
    assert torch.equal(reborn.take(chunk_of(fresh, 0), 1.0), kv(seed=3))


def test_nobody_at_the_destination_is_a_lost_lane(site: Site) -> None:
    sender, receiver = site.sender(address("p0")), site.receiver(address("d0"))
    ticket = ticket_for(receiver)
    receiver.close()
    sender.open(ticket)
    (lost,) = site.events(sender, 1)
    assert isinstance(lost, LaneLost)
    assert lost.peer == "d0#1"
    assert not sender.busy()


def test_an_idle_lane_lasts(over: str) -> None:
    """Longer than a stall: what tells idle from hung must work."""
    config = LaneConfig(heartbeat_s=0.1, stall_s=1.0)
    site = Site(over, config)
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    while receiver.lanes()[0].idle_s < 2 * config.stall_s:
        threading.Event().wait(config.heartbeat_s)
    push(site, sender, ticket, [(chunk_of(ticket, 1), kv(seed=1))])
    (arrived,) = site.events(receiver, 1)
    assert arrived.chunk == chunk_of(ticket, 1)
    assert len(site.events(sender, 2)) == 2
    site.close()


def test_cancelled_chunks_are_not_sent(site: Site) -> None:
    """Nobody is connected at the other end."""
    sender, receiver = site.sender(address("p0")), site.receiver(address("d0"))
    gone, stays = ticket_for(receiver, ticket_id="gone"), ticket_for(receiver, ticket_id="stays")
    if site._exchange is not None:
        callbacks: list[Callable[[], None]] = []
        site._exchange.carry = lambda parcel, deliver: callbacks.append(deliver)
    sender.offer(gone, chunk_of(gone, 0), kv(2, seed=1))
    sender.offer(gone, chunk_of(gone, 2), kv(2, seed=2))
    sender.offer(stays, chunk_of(stays, 0), kv(seed=3))
    assert not sender.can_offer(stays)
    sender.cancel("gone")
    assert sender.can_offer(stays)
    receiver.expect(sender.address, LAYOUT)
    if site._exchange is not None:
        for deliver in callbacks:
            deliver()
    (arrived,) = site.events(receiver, 1)
    assert arrived.chunk == chunk_of(stays, 0)
    assert [event.chunk for event in site.events(sender, 1)] == [chunk_of(stays, 0)]
    assert not sender.busy()


def test_staging_is_bounded_at_both_ends(over: str) -> None:
    """Each end stages two payloads, and a ring as many as it has slots. The sender then refuses offers until the
    receiver takes a payload; none is lost."""
    bound = 4 + (NUM_SLOTS if over == "shm" else 0)
    site = Site(over, LaneConfig(heartbeat_s=0.05, max_staged_bytes=2 * BLOCK_BYTES))
    sender, receiver, ticket = meet(site)
    arrived: list[Any] = []
    num_offered = 0

    def full() -> bool:
        nonlocal num_offered
        arrived.extend(receiver.poll())
        while sender.can_offer(ticket):
            sender.offer(ticket, chunk_of(ticket, num_offered), kv(seed=num_offered))
            num_offered += 1
        return len(arrived) >= num_taken + 2 and num_offered >= num_taken + 4

    num_taken = 0
    site.until(full)
    while sender.lanes()[0].idle_s < 0.2:
        full()
        threading.Event().wait(0.01)
    for num_taken in range(20):
        site.until(full)
        assert len(arrived) == num_taken + 2
        assert num_taken + 4 <= num_offered <= num_taken + bound
        assert torch.equal(receiver.take(arrived[num_taken].chunk, 1.0), kv(seed=num_taken))
    site.close()


def test_a_lane_that_is_never_met_leaves_nothing_on_the_server(over: str) -> None:
    site = Site(over, LaneConfig(heartbeat_s=0.05))
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    sizes = []
    for _ in range(3):
        sender.close()
        site.until(lambda: not receiver.lanes())
        sizes.append(receiver._server.num_values)  # type: ignore[attr-defined]
        sender = site.sender(address("p0"))
        receiver.expect(sender.address, LAYOUT)
        push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
        site.until(lambda: any(isinstance(event, Arrived) for event in receiver.poll()))
    assert sizes[0] == sizes[-1]
    site.close()


def test_waiting_ranks_meet_ranks_that_come_later(over: str) -> None:
    layout = replace(LAYOUT, tp=2)
    site = Site(over, LaneConfig(heartbeat_s=0.05))
    leader = site.receiver(address("d0"), layout=layout)
    receivers = [leader, site.receiver(leader.address, rank=1, layout=layout)]
    for receiver in receivers:
        receiver.expect(address("p0"), layout)
    ticket = replace(ticket_for(leader), layout=layout)
    lonely = site.sender(address("p0"), layout=layout)
    lonely.open(ticket)
    while leader._server.num_values < 4:  # type: ignore[attr-defined]  # the epoch, and three who wait for the fourth
        threading.Event().wait(0.01)
    lonely.close()
    for rank in range(2):
        site.sender(address("p0"), rank=rank, layout=layout).offer(ticket, chunk_of(ticket, 0), one_head(rank))
    for rank, receiver in enumerate(receivers):
        assert torch.equal(receiver.take(chunk_of(ticket, 0), PATIENCE_S), one_head(rank))
    site.close()


def test_tensor_parallel_ranks_pair_up(over: str) -> None:
    """Rank i of the source meets rank i of the destination; a follower may be queried before its bytes arrive."""
    layout = replace(LAYOUT, tp=2)
    site = Site(over, LaneConfig(heartbeat_s=0.05))
    leader = site.receiver(address("d0"), layout=layout)
    receivers = [leader, site.receiver(leader.address, rank=1, layout=layout)]
    senders = [site.sender(address("p0"), rank=rank, layout=layout) for rank in range(2)]
    ticket = replace(ticket_for(leader), layout=layout)
    for receiver in receivers:
        receiver.expect(senders[0].address, layout)
    for rank, sender in enumerate(senders):
        sender.offer(ticket, chunk_of(ticket, 0), one_head(rank))
    for rank, receiver in enumerate(receivers):
        assert torch.equal(receiver.take(chunk_of(ticket, 0), PATIENCE_S), one_head(rank))
    receivers[1].close()
    assert any(isinstance(event, LaneLost) for event in site.events(senders[1], 2))
    assert any(isinstance(event, LaneLost) for event in site.events(senders[0], 2)), "all ranks leave a broken lane"
    site.close()


def test_a_chunk_may_be_dropped_before_it_comes(over: str) -> None:
    """Rank 0 has a follower rank drop a chunk that has not arrived yet."""
    site = Site(over, LaneConfig(heartbeat_s=0.05))
    sender, receiver, ticket = meet(site)
    receiver.drop(chunk_of(ticket, 0), "p0#1")
    push(site, sender, ticket, [(chunk_of(ticket, index), kv(seed=index)) for index in range(2)])
    (arrived,) = site.events(receiver, 1)
    assert arrived.chunk == chunk_of(ticket, 1)
    assert isinstance(receiver, CollectiveReceiver)
    assert not receiver._unwanted, "what was dropped is remembered for ever"
    receiver.drop(chunk_of(ticket, 7), "p0#1")
    sender.close()
    site.events(receiver, 1)
    receiver.drop(chunk_of(ticket, 6), "p0#1")
    assert not receiver._unwanted, "what nobody can send any more is remembered for ever"
    site.close()


def test_more_bytes_than_its_blocks_can_hold_end_the_lane(over: str) -> None:
    site = Site(over, LaneConfig(heartbeat_s=0.05))
    sender, receiver, ticket = meet(site)
    sender.offer(ticket, chunk_of(ticket, 0, num_blocks=1), kv(5))
    (lost,) = site.events(receiver, 1)
    assert isinstance(lost, LaneLost)
    assert "p0#1 announced" in lost.reason
    site.close()


def test_an_unknown_transport_is_refused_by_name() -> None:
    unknown: Any = "pigeon"
    with pytest.raises(Misconfigured) as refused:
        LaneConfig(transport=unknown)
    assert refused.value.param == "transport"


def test_peer_names_tell_lives_apart() -> None:
    assert peer_name(address("p0", 1)) != peer_name(address("p0", 2))
