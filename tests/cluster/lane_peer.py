"""The other process of tests of lanes: one end of a lane, which does what `run` is called with until it is killed.

send INCARNATION PORT DESTINATION_INCARNATION     offers block after block
receive INCARNATION                               says its port, then takes all that comes
push RANK TP SIZE PORT TP_THERE SIZE_THERE        one rank's part of a prompt, out of blocks of so many tokens;
                                                  SIZE_THERE and so on are the destination's
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from kvtransfer.lane_rules import LaneConfig, Preference
from kvtransfer.reshard import covering, heads_of
from kvtransfer.transport import Arrived, Chunk
from kvtransfer.transports.collective.collective import CollectiveTransport
from protos.values import KVLayout, LaneAddress, Ticket
from workers.kv.kv_storage import KVStorage
from workers.transfer.rank_transfer import RankTransfer

ON = "cpu"
OVER: Preference = "auto"
KEY = "of every rendezvous server of these tests"
LAYOUT = KVLayout.dense(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")


def address(worker_id: str, incarnation: int, port: int = 0) -> LaneAddress:
    return LaneAddress(worker_id=worker_id, incarnation=incarnation, host="127.0.0.1", port=port, key=KEY)


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
    sender = CollectiveTransport(config=LaneConfig(transport=OVER, max_staged_bytes=4 * LAYOUT.block_bytes)).sender(
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


def receive(pipe: Connection, incarnation: int) -> None:
    bell = threading.Event()
    made = CollectiveTransport(config=LaneConfig(transport=OVER))
    receiver = made.receiver(address("d0", incarnation), LAYOUT, wake=bell.set)
    receiver.expect(address("p0", 1), LAYOUT)
    pipe.send(receiver.address.port)
    while True:
        bell.wait()
        bell.clear()
        for event in receiver.poll():
            if isinstance(event, Arrived):
                pipe.send(int(receiver.take(event.chunk, 1.0).max()))


HEADS, LAYERS, TOKENS = 2, 3, 29
CACHED = 8  # tokens that the destination has already
PROMPT = KVLayout.dense(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=4, block_size=4, dtype="float32")


def prompt_kv() -> torch.Tensor:
    """[layers, 2, tokens, heads, head dim] of a prompt, with unique numbers."""
    shape = (LAYERS, 2, TOKENS, HEADS, PROMPT.parts[0].width)
    return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)


def blocks_of(num_tokens: int, size: int) -> tuple[int, ...]:
    """The places of a prompt in a worker with blocks of this size, out of order."""
    return tuple((7 * index + 3) % 16 for index in range(-(-num_tokens // size)))


def prompt_ticket(destination: LaneAddress, layout: KVLayout) -> Ticket:
    blocks = blocks_of(TOKENS, layout.block_size)[CACHED // layout.block_size :]
    return replace(ticket_to(destination), block_ids=blocks, num_cached_tokens=CACHED, layout=layout)


def prompt_chunks(ticket: Ticket) -> list[Chunk]:
    """The first block at once, the others layer by layer."""
    rest = len(ticket.block_ids) - 1
    by_layer = [
        Chunk(ticket_id="r1", generation=1, first_block=1, num_blocks=rest, first_layer=layer, num_layers=1)
        for layer in range(LAYERS)
    ]
    return [Chunk(ticket_id="r1", generation=1, first_block=0, num_blocks=1), *by_layer]


def push(rank: int, tp: int, size: int, port: int, tp_there: int, size_there: int) -> None:
    layout, there = replace(PROMPT, tp=tp, block_size=size), replace(PROMPT, tp=tp_there, block_size=size_there)
    storage, kv, blocks = KVStorage(layout, num_blocks=16, device=ON), prompt_kv(), blocks_of(TOKENS, size)
    mine = heads_of(layout, rank)
    for token in range(TOKENS):
        storage.data[:, :, blocks[token // size], :, token % size] = kv[:, :, token, mine.start : mine.stop]
    config = LaneConfig(transport=OVER, message_bytes=100)
    sender = CollectiveTransport(rank=rank, device=ON, config=config).sender(address("p0", 1), layout)
    transfer = RankTransfer(storage, layout, rank=rank, sender=sender)
    ticket = prompt_ticket(address("d0", 1, port), there)
    for chunk in prompt_chunks(ticket):
        held = covering(ticket, chunk, size)
        transfer.push(ticket, chunk, blocks[held.start : held.stop])
    threading.Event().wait()


def run(pipe: Connection, over: Preference, part: str, *arguments: int) -> None:
    """One process: `part` is of those named above; what it says goes into the pipe."""
    global OVER
    OVER = over
    torch.set_num_threads(1)
    parts: dict[str, Callable[..., None]] = {"send": send, "receive": partial(receive, pipe), "push": push}
    parts[part](*arguments)
