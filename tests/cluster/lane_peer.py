"""The other process of test_collective_lanes: one end of a lane, told by its arguments what to do, until it is killed.

lane_peer.py send INCARNATION PORT DESTINATION_INCARNATION     offers block after block
lane_peer.py receive INCARNATION                               says its port, then takes whatever comes
"""

from __future__ import annotations

import sys
import threading

import torch

from kvtransfer.config import LaneConfig
from kvtransfer.transport import Arrived, Chunk
from kvtransfer.transports.collective import CollectiveTransport
from protos.values import KVLayout, LaneAddress, Ticket

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")


def address(worker_id: str, incarnation: int, port: int = 0) -> LaneAddress:
    return LaneAddress(worker_id=worker_id, incarnation=incarnation, host="127.0.0.1", port=port)


def ticket_to(destination: LaneAddress) -> Ticket:
    return Ticket(
        ticket_id="r1",
        generation=1,
        lease_s=30.0,
        block_ids=tuple(range(1000)),
        num_cached_tokens=0,
        layout=LAYOUT,
        destination=destination,
    )


def chunk(index: int) -> Chunk:
    return Chunk(ticket_id="r1", generation=1, first_block=index, num_blocks=1)


def payload(index: int) -> torch.Tensor:
    return torch.full((2 * 2 * 1 * 2 * 4 * 4,), float(index))


def send(incarnation: int, port: int, destination_incarnation: int) -> None:
    bell = threading.Event()
    sender = CollectiveTransport(config=LaneConfig(max_staged_bytes=4 * LAYOUT.block_bytes)).sender(
        address("p0", incarnation), LAYOUT, wake=bell.set
    )
    ticket = ticket_to(address("d0", destination_incarnation, port))
    index = 0
    while True:
        while sender.can_offer(ticket):
            sender.offer(ticket, chunk(index), payload(index))
            index += 1
        bell.wait()
        bell.clear()
        sender.poll()


def receive(incarnation: int) -> None:
    bell = threading.Event()
    receiver = CollectiveTransport().receiver(address("d0", incarnation), LAYOUT, wake=bell.set)
    receiver.expect(address("p0", 1), LAYOUT)
    print(receiver.address.port, flush=True)
    while True:
        bell.wait()
        bell.clear()
        for event in receiver.poll():
            if isinstance(event, Arrived):
                print(int(receiver.take(event.chunk, 1.0).max()), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"send": send, "receive": receive}[sys.argv[1]](*map(int, sys.argv[2:]))
