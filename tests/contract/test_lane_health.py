"""Lanes with wires that are idle, stuck, or corrupt their payload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transport import LaneLost
from kvtransfer.transports.collective.lane_wire import LaneWire
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousStore
from protos.errors import TransferCorrupted
from protos.values import LaneLoad
from tests.contract.site import LAYOUT, PATIENCE_S, WIRED, Site, address, chunk_of, kv, meet, one_head, push, ticket_for

Sites = Callable[..., Site]


@pytest.fixture(params=WIRED)
def over(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_site(over: str) -> Iterator[Sites]:
    sites: list[Site] = []

    def make(**settings: Any) -> Site:
        sites.append(Site(over, LaneConfig(**({"heartbeat_s": 0.05} | settings))))
        return sites[-1]

    yield make
    for site in sites:
        site.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")], "a lane is left behind"


def until(happened: Callable[[], bool]) -> None:
    """For what rings no bell."""
    for _ in range(int(PATIENCE_S / 0.005)):
        if happened():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not happen")


def load_of(end: Any) -> LaneLoad:
    (load,) = end.lane_loads()
    assert isinstance(load, LaneLoad)
    return load


# -- nobody needs it ---------------------------------------------------------------------------------------------------


def test_a_lane_given_up_by_its_sender_reopens_without_loss(make_site: Sites) -> None:
    site = make_site()
    sender, receiver, ticket = meet(site)
    sent = [(chunk_of(ticket, index), kv(seed=index)) for index in range(3)]
    push(site, sender, ticket, sent)
    sender.close_lane("d0#1")
    until(lambda: not sender.lanes())
    assert [event.chunk for event in site.events(receiver, 3)] == [chunk for chunk, _ in sent]
    for chunk, payload in sent:
        assert torch.equal(receiver.take(chunk, 1.0), payload)
    site.events(sender, 3)
    until(lambda: [lane.state for lane in receiver.lanes()] == ["opening"])
    push(site, sender, ticket, [(chunk_of(ticket, 3), kv(seed=3))])
    site.events(receiver, 1)
    assert torch.equal(receiver.take(chunk_of(ticket, 3), 1.0), kv(seed=3))
    site.events(sender, 1)
    for end in (sender, receiver):
        assert (load_of(end).num_opened, load_of(end).num_lost, load_of(end).num_open) == (2, 0, 1)


def test_a_lane_that_is_needed_again_before_it_has_ended_stays(make_site: Sites) -> None:
    site = make_site()
    sender, receiver, ticket = meet(site)
    for index in range(10):
        sender.close_lane("d0#1")
        push(site, sender, ticket, [(chunk_of(ticket, index), kv(seed=index))])
        (arrived,) = site.events(receiver, 1)
        assert torch.equal(receiver.take(arrived.chunk, 1.0), kv(seed=index))
        site.events(sender, 1)


def test_a_lane_that_the_receiver_gives_up_comes_back(make_site: Sites) -> None:
    site = make_site()
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    receiver.close_lane("p0#1")
    until(lambda: not receiver.lanes())
    assert isinstance(site.events(sender, 2)[-1], LaneLost)
    receiver.expect(sender.address, LAYOUT)
    push(site, sender, ticket, [(chunk_of(ticket, 1), kv(seed=1))])
    (arrived,) = site.events(receiver, 1)
    assert arrived.chunk == chunk_of(ticket, 1)


def test_an_expected_source_connects_although_its_lane_was_closing(make_site: Sites) -> None:
    site = make_site()
    sender, receiver, ticket = meet(site)
    for _ in range(5):
        receiver.close_lane("p0#1")
        receiver.expect(sender.address, LAYOUT)
    until(lambda: [lane.state for lane in receiver.lanes()] == ["opening"])
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    (arrived,) = site.events(receiver, 1)
    assert torch.equal(receiver.take(arrived.chunk, 1.0), kv())


def test_all_ranks_part_and_meet_again(make_site: Sites) -> None:
    """Two ranks on each side part one after the other; earlier payloads have arrived everywhere."""
    layout = replace(LAYOUT, tp=2)
    site = make_site()
    leader = site.receiver(address("d0"), layout=layout)
    receivers = [leader, site.receiver(leader.address, rank=1, layout=layout)]
    senders = [site.sender(address("p0"), rank=rank, layout=layout) for rank in range(2)]
    ticket = replace(ticket_for(leader), layout=layout)
    for receiver in receivers:
        receiver.expect(address("p0"), layout)
    for turn in range(3):
        for rank, sender in enumerate(senders):
            sender.offer(ticket, chunk_of(ticket, turn), one_head(rank))
        for sender in senders:
            sender.close_lane("d0#1")
        for rank, receiver in enumerate(receivers):
            assert torch.equal(receiver.take(chunk_of(ticket, turn), PATIENCE_S), one_head(rank))
        until(lambda: not any(sender.lanes() for sender in senders))


# -- it is stuck -------------------------------------------------------------------------------------------------------


def freeze(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Stops the sender's wire until the event is set, as if its process were stopped."""
    thawed = threading.Event()
    send = LaneWire.send

    def frozen(self: LaneWire, *args: Any) -> None:
        if not thawed.is_set():
            thawed.wait(PATIENCE_S)
        send(self, *args)

    monkeypatch.setattr(LaneWire, "send", frozen)
    return thawed


def test_a_stuck_lane_is_quarantined_and_met_anew(make_site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(stall_s=1.0)
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    thawed = freeze(monkeypatch)
    (lost,) = site.events(receiver, 1)
    assert isinstance(lost, LaneLost)
    (lane,) = receiver.lanes()
    assert (lane.state, bool(lane.reason)) == ("quarantined", True)
    assert load_of(receiver).num_stuck == 1
    thawed.set()
    until(lambda: any(isinstance(event, LaneLost) for event in sender.poll()))
    # Without a ticket the sender never connects again, and with a lane in quarantine there would be no ticket.
    until(lambda: [lane.state for lane in receiver.lanes()] == ["opening"])
    push(site, sender, ticket, [(chunk_of(ticket, 1), kv(seed=1))])
    site.events(receiver, 1)
    assert torch.equal(receiver.take(chunk_of(ticket, 1), 1.0), kv(seed=1))
    assert [lane.state for lane in receiver.lanes()] == ["open"]


def test_a_quarantine_ends_for_good_when_the_peer_is_gone(make_site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver never empties the ring, and is then closed: nobody is left to be met."""
    site = make_site(stall_s=1.0, max_staged_bytes=LAYOUT.block_bytes)
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, index), kv()) for index in range(2)])
    for index in range(2, 8):
        sender.offer(ticket, chunk_of(ticket, index), kv())
    until(lambda: any(isinstance(event, LaneLost) for event in sender.poll()))
    receiver.close()
    until(lambda: not sender.lanes())
    assert not sender.busy() or sender.poll()


# -- it spoils what it carries -----------------------------------------------------------------------------------------


def test_a_payload_with_another_checksum_ends_the_lane(make_site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = LaneWire.receive

    def spoiled(self: LaneWire, rank: int, piece: torch.Tensor) -> None:
        receive(self, rank, piece)
        piece.view(torch.uint8)[7] ^= 1

    site = make_site(checksum=True)
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    monkeypatch.setattr(LaneWire, "receive", spoiled)
    sender.offer(ticket, chunk_of(ticket, 1), kv(seed=1))
    (lost,) = site.events(receiver, 1)
    assert isinstance(lost, LaneLost)
    assert "first_block=1" in lost.reason
    assert "checksum" in lost.reason
    assert lost.cause is TransferCorrupted
    assert load_of(receiver).num_corrupt == 1
    assert torch.equal(receiver.take(chunk_of(ticket, 0), 1.0), kv()), "what came before it was right"


# -- what is told of it ------------------------------------------------------------------------------------------------


def test_lanes_report_their_transport(make_site: Sites, over: str) -> None:
    site = make_site()
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    for end in (sender, receiver):
        (lane,) = end.lanes()
        expected = ("gloo", "a worker's transport is set to collective") if over == "collective" else ("shm", "")
        assert (lane.transport, lane.reason) == expected
        assert load_of(end) == LaneLoad(transport=expected[0], reason=expected[1], num_open=1, num_opened=1)


def test_a_lane_whose_thread_hangs_is_stuck(make_site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane reports itself stuck when a library hangs."""
    monkeypatch.setattr(LaneWire, "abort", lambda self: None)
    site = make_site(stall_s=1.0, heartbeat_s=0.05)
    sender, receiver, ticket = meet(site)
    push(site, sender, ticket, [(chunk_of(ticket, 0), kv())])
    site.events(receiver, 1)
    thawed = freeze(monkeypatch)
    until(lambda: any(isinstance(event, LaneLost) for event in receiver.poll()))
    sender._lanes["d0#1"].lane.abort()  # type: ignore[attr-defined]
    until(lambda: [lane.state for lane in sender.lanes()] == ["stuck"])
    monkeypatch.undo()
    thawed.set()


# -- its peer dies before it is open -----------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [True, False], ids=["while others are missing", "while all prove what they share"])
def test_a_source_that_dies_during_opening_is_lost_at_once(make_site: Sites, alone: bool) -> None:
    """The connection to the rendezvous server closes, so a lane with long timeouts is lost, too."""
    layout = replace(LAYOUT, tp=2 if alone else 1)
    site = make_site(stall_s=600.0, heartbeat_s=0.5)
    receiver = site.receiver(address("d0"), layout=layout)
    receiver.expect(address("p0"), layout)
    at = receiver.address
    source = RendezvousStore(at.host, at.port, "p0#1>d0#1/", key=at.key.encode(), wait_s=PATIENCE_S)
    source.set_on_disconnect("0/gone", "rank 0 of 2")
    source.set("0/here/0", "1")
    source.wait([f"0/here/{layout.tp}"])
    source.close()
    (lost,) = site.events(receiver, 1)
    assert isinstance(lost, LaneLost)
    assert lost.reason == "rank 0 of 2 hung up while the lane was opened"
    assert not receiver.lanes()
