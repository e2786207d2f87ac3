"""One end of a lane in a process of its own, for test_bad_network: says what happens to it, a line at a time.

peer.py receive HOST STALL_S                      "port N", then as below; expects its source again when it lost it
peer.py send HOST STALL_S TO_HOST TO_PORT         offers block after block, and goes on when it lost the lane

    over TRANSPORT WHY      whenever a lane has come about
    block N                 one more block has arrived as it was sent
    lost REASON
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transport import Arrived, Chunk, LaneLost
from kvtransfer.transports.collective.collective import CollectiveTransport
from protos.values import KVLayout, LaneAddress, Ticket

LAYOUT = KVLayout.dense(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
MAX_STAGED = 8


def address(worker_id: str, host: str, port: int = 0) -> LaneAddress:
    return LaneAddress(worker_id=worker_id, incarnation=1, host=host, port=port, key="a-key-of-the-test")


def payload(index: int) -> torch.Tensor:
    return torch.randn((2, 2, 1, 2, 16, 64), generator=torch.Generator().manual_seed(index))


def chunk(index: int) -> Chunk:
    return Chunk(ticket_id="r", generation=1, first_block=index, num_blocks=1)


def say(*words: object) -> None:
    print(*words, flush=True)


class Teller:
    """Says over what the lane goes, as often as that changes."""

    def __init__(self) -> None:
        self._told = ""

    def look(self, end: Any) -> None:
        for lane in end.lanes():
            if lane.state == "open" and lane.transport != self._told:
                self._told = lane.transport
                say("over", lane.transport, lane.reason)

    def lost(self, event: LaneLost) -> None:
        self._told = ""
        say("lost", event.reason)


def receive(host: str, config: LaneConfig) -> None:
    bell, teller = threading.Event(), Teller()
    receiver = CollectiveTransport(config=config).receiver(address("d0", host), LAYOUT, wake=bell.set)
    say("port", receiver.address.port)
    receiver.expect(address("p0", HOST_OF_SOURCE), LAYOUT)
    while True:
        bell.wait()
        bell.clear()
        for event in receiver.poll():
            teller.look(receiver)
            if isinstance(event, Arrived):
                index = event.chunk.first_block
                taken = receiver.take(event.chunk, 1.0)
                assert torch.equal(taken.flatten(), payload(index).flatten()), f"block {index} is not what was sent"
                say("block", index)
            else:
                teller.lost(event)
                receiver.expect(address("p0", HOST_OF_SOURCE), LAYOUT)


def send(host: str, config: LaneConfig, destination: LaneAddress) -> None:
    bell, teller = threading.Event(), Teller()
    sender = CollectiveTransport(config=config).sender(address("p0", host), LAYOUT, wake=bell.set)
    ticket = Ticket(
        ticket_id="r",
        generation=1,
        lease_s=30.0,
        block_ids=tuple(range(1_000_000)),
        num_cached_tokens=0,
        layout=LAYOUT,
        destination=destination,
    )
    index = 0
    while True:
        while sender.can_offer(ticket):
            sender.offer(ticket, chunk(index), payload(index))
            index += 1
        bell.wait()
        bell.clear()
        for event in sender.poll():
            if isinstance(event, LaneLost):
                teller.lost(event)
        teller.look(sender)


HOST_OF_SOURCE = "10.77.0.1"

if __name__ == "__main__":
    torch.set_num_threads(1)
    what, own_host, stall_s, *where = sys.argv[1:]
    settings = LaneConfig(
        stall_s=float(stall_s), heartbeat_s=float(stall_s) / 10, max_staged_bytes=MAX_STAGED * LAYOUT.block_bytes
    )
    if what == "receive":
        receive(own_host, settings)
    else:
        send(own_host, settings, address("d0", where[0], int(where[1])))
