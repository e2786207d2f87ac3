"""Lanes between two real processes, one of which is killed, stopped, and started again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from kvtransfer.lane_rules import LaneConfig, Preference
from kvtransfer.reshard import heads_of
from kvtransfer.transport import Arrived, LaneLost, Sent
from kvtransfer.transports.collective.collective import CollectiveReceiver, CollectiveSender, CollectiveTransport
from tests.cluster.forked import FORKS
from tests.cluster.lane_peer import (
    CACHED,
    LAYOUT,
    PROMPT,
    TOKENS,
    address,
    blocks_of,
    chunk,
    payload,
    prompt_chunks,
    prompt_kv,
    prompt_ticket,
    run,
    ticket_to,
)
from workers.kv.kv_storage import KVStorage
from workers.transfer.rank_transfer import RankTransfer

pytestmark = pytest.mark.cluster

PATIENCE_S = 60.0
NEVER_S = 600.0  # as a stall: what is found out sooner was not found out by waiting


class Peer:
    """A process at the other end of a lane."""

    def __init__(self, over: Preference, part: str, arguments: tuple[int, ...]) -> None:
        self._pipe, there = FORKS.Pipe()
        self._process: BaseProcess = FORKS.Process(target=run, args=(there, over, part, *arguments), daemon=True)
        self._process.start()
        there.close()

    def said(self) -> int:
        assert self._pipe.poll(PATIENCE_S), "the other process says nothing"
        return int(self._pipe.recv())

    def freeze(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()


class Peers:
    """The processes of a test, and the ends in this one."""

    def __init__(self, over: Preference) -> None:
        self.over = over
        self.bell = threading.Condition()
        self._processes: list[Peer] = []
        self._ends: list[CollectiveSender | CollectiveReceiver] = []

    def start(self, part: str, *arguments: int) -> Peer:
        self._processes.append(Peer(self.over, part, arguments))
        return self._processes[-1]

    def sender(self, config: LaneConfig) -> CollectiveSender:
        end = CollectiveTransport(config=self._over(config)).sender(address("p0", 1), LAYOUT, wake=self._ring)
        self._ends.append(end)
        return end

    def receiver(self, config: LaneConfig) -> CollectiveReceiver:
        end = CollectiveTransport(config=self._over(config)).receiver(address("d0", 1), LAYOUT, wake=self._ring)
        self._ends.append(end)
        return end

    def ranks(self, tp: int, size: int, config: LaneConfig) -> list[CollectiveReceiver]:
        """All ranks of a destination, in this process."""
        layout, ends = replace(PROMPT, tp=tp, block_size=size), self._ends
        who = address("d0", 1)
        for rank in range(tp):
            end = CollectiveTransport(rank=rank, config=self._over(config)).receiver(who, layout, wake=self._ring)
            who = end.address
            ends.append(end)
        return [end for end in ends if isinstance(end, CollectiveReceiver)]

    def wait_for(self, end: CollectiveSender | CollectiveReceiver, kind: type, *, count: int = 1) -> list[Any]:
        """The first `count` events of a kind; others are dropped on the way."""
        events: list[Any] = []

        def enough() -> bool:
            events.extend(event for event in end.poll() if isinstance(event, kind))
            return len(events) >= count

        with self.bell:
            assert self.bell.wait_for(enough, PATIENCE_S), f"no {kind.__name__}"
        return events

    def close(self) -> None:
        for process in self._processes:
            process.close()
        for end in self._ends:
            end.close()

    def _over(self, config: LaneConfig) -> LaneConfig:
        return replace(config, transport=self.over)

    def _ring(self) -> None:
        with self.bell:
            self.bell.notify_all()


@pytest.fixture(params=["collective", "shm"])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    peers = Peers(request.param)
    yield peers
    peers.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")], "a lane is left behind"


def test_a_killed_sender_is_noticed_and_its_next_life_is_served(peers: Peers) -> None:
    receiver = peers.receiver(LaneConfig(stall_s=NEVER_S, max_staged_bytes=100 * LAYOUT.block_bytes))
    for incarnation in (1, 2):
        receiver.expect(address("p0", incarnation), LAYOUT)
        process = peers.start("send", incarnation, receiver.address.port, 1)
        arrived = peers.wait_for(receiver, Arrived, count=5)
        assert [event.chunk for event in arrived[:5]] == [chunk(index) for index in range(5)]
        assert {event.source for event in arrived} == {f"p0#{incarnation}"}
        for index in range(5):
            assert torch.equal(receiver.take(chunk(index), 1.0), payload(index))
        process.kill()
        (lost,) = peers.wait_for(receiver, LaneLost)
        assert lost.peer == f"p0#{incarnation}"
        assert not receiver.lanes()


def test_a_killed_receiver_is_noticed_and_its_next_life_is_met(peers: Peers) -> None:
    sender = peers.sender(LaneConfig(stall_s=NEVER_S, heartbeat_s=0.2))
    for incarnation in (1, 2):
        process = peers.start("receive", incarnation)
        ticket = ticket_to(address("d0", incarnation, process.said()))
        sender.offer(ticket, chunk(7), payload(7))
        assert process.said() == 7
        peers.wait_for(sender, Sent)
        process.kill()  # the lane is idle: only a beat finds out
        (lost,) = peers.wait_for(sender, LaneLost)
        assert lost.peer == f"d0#{incarnation}"
        assert not sender.busy()


def test_a_receiver_killed_in_the_middle_of_a_payload_is_noticed(peers: Peers) -> None:
    sender = peers.sender(LaneConfig(stall_s=NEVER_S))
    process = peers.start("receive", 1)
    ticket = ticket_to(address("d0", 1, process.said()))
    sender.offer(ticket, chunk(0), payload(0))
    assert process.said() == 0
    process.freeze()
    sender.offer(ticket, chunk(1), torch.zeros(64 * 2**20))
    with peers.bell:
        assert peers.bell.wait_for(lambda: len(sender.poll()) == 1, PATIENCE_S)
    assert sender.busy()
    process.kill()
    peers.wait_for(sender, LaneLost)
    assert not sender.busy()


def until_idle(end: CollectiveSender | CollectiveReceiver) -> None:
    """Until its only lane is stuck in the middle of something."""
    while end.lanes()[0].idle_s < 0.3:
        threading.Event().wait(0.01)


FROZEN = LaneConfig(stall_s=2.0, heartbeat_s=0.1)
"""For peers that are stopped: their connections stay up, so only the clock of progress tells."""


def test_a_frozen_sender_is_a_lost_lane(peers: Peers) -> None:
    receiver = peers.receiver(FROZEN)
    receiver.expect(address("p0", 1), LAYOUT)
    process = peers.start("send", 1, receiver.address.port, 1)
    for event in peers.wait_for(receiver, Arrived):
        receiver.drop(event.chunk, event.source)
    process.freeze()
    peers.wait_for(receiver, LaneLost)


def test_a_frozen_receiver_is_a_lost_lane(peers: Peers) -> None:
    sender = peers.sender(FROZEN)
    process = peers.start("receive", 1)
    ticket = ticket_to(address("d0", 1, process.said()))
    sender.offer(ticket, chunk(0), payload(0))
    assert process.said() == 0
    process.freeze()
    sender.offer(ticket, chunk(1), torch.zeros(64 * 2**20))
    peers.wait_for(sender, LaneLost)


@pytest.mark.parametrize("frozen", ["sender", "receiver"])
def test_closing_does_not_wait_for_a_frozen_peer(peers: Peers, frozen: str) -> None:
    patient = LaneConfig(stall_s=NEVER_S)
    if frozen == "sender":
        receiver = peers.receiver(patient)
        receiver.expect(address("p0", 1), LAYOUT)
        process = peers.start("send", 1, receiver.address.port, 1)
        peers.wait_for(receiver, Arrived)
        process.freeze()
        until_idle(receiver)
        receiver.close()
    else:
        sender = peers.sender(patient)
        process = peers.start("receive", 1)
        ticket = ticket_to(address("d0", 1, process.said()))
        sender.offer(ticket, chunk(0), payload(0))
        assert process.said() == 0
        process.freeze()
        sender.offer(ticket, chunk(1), torch.zeros(64 * 2**20))
        until_idle(sender)
        sender.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane p0")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane d0")]


@pytest.mark.parametrize(
    ("source", "destination"),
    [((1, 4), (2, 4)), ((2, 4), (1, 8)), ((2, 8), (4, 4))],
    ids=["1 to 2", "2 to 1, larger blocks", "2 to 4, smaller blocks"],
)
def test_any_tensor_parallelism_meets_any_other(
    peers: Peers, source: tuple[int, int], destination: tuple[int, int]
) -> None:
    """Every rank of the destination gets its heads of every token, bit for bit, and nothing else: of blocks from one
    source rank, and of layers that come one by one."""
    (tp, size), (tp_here, size_here) = source, destination
    receivers = peers.ranks(tp_here, size_here, LaneConfig(message_bytes=100))
    layout = replace(PROMPT, tp=tp_here, block_size=size_here)
    sides = [
        RankTransfer(KVStorage(layout, num_blocks=16), layout, rank=rank, receiver=receiver)
        for rank, receiver in enumerate(receivers)
    ]
    for transfer in sides:
        transfer.expect(address("p0", 1), replace(PROMPT, tp=tp, block_size=size))
    for rank in range(tp):
        peers.start("push", rank, tp, size, receivers[0].address.port, tp_here, size_here)
    ticket = prompt_ticket(receivers[0].address, layout)
    for receiver in receivers:
        peers.wait_for(receiver, Arrived, count=4)
    for part in prompt_chunks(ticket):
        blocks = ticket.block_ids[part.first_block : part.first_block + part.num_blocks]
        for transfer in sides:
            transfer.land(part, blocks, "p0#1")
    kv, blocks = prompt_kv(), blocks_of(TOKENS, size_here)
    for rank, transfer in enumerate(sides):
        heads, data = heads_of(layout, rank), transfer.blocks.data  # type: ignore[attr-defined]
        for token in range(TOKENS):
            landed = data[:, :, blocks[token // size_here], :, token % size_here]
            expected = kv[:, :, token, heads.start : heads.stop] * (token >= CACHED)
            assert torch.equal(landed, expected), f"token {token} on rank {rank}"
        others = [block for block in range(16) if block not in ticket.block_ids]
        assert not data[:, :, others].any()
