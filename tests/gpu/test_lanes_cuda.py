"""Lanes between processes that share a GPU: over CUDA IPC, over NCCL, also from one rank to two, and through the host's
memory where NCCL refuses. Left out where there is no GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import cast

import pytest
import torch

from kvtransfer.lane_rules import LaneConfig, Preference
from kvtransfer.reshard import heads_of
from kvtransfer.transport import Arrived
from kvtransfer.transports.collective.collective import CollectiveTransport
from kvtransfer.transports.links.shm import MAX_SLOT_BYTES, ShmListener, connect, prove
from protos.values import LaneAddress
from tests.cluster import lane_peer
from tests.cluster.lane_peer import (
    CACHED,
    LAYOUT,
    PROMPT,
    TOKENS,
    address,
    blocks_of,
    chunk,
    prompt_chunks,
    prompt_kv,
    prompt_ticket,
    push,
    ticket_to,
)
from workers.kv.kv_storage import KVStorage
from workers.transfer.rank_transfer import RankTransfer

pytestmark = pytest.mark.gpu

NUM_CHUNKS = 20
PATIENCE_S = 60.0
TRANSPORTS = {"shm": "cuda-ipc", "collective": "nccl", "one host": "gloo"}


def _payload(index: int) -> torch.Tensor:
    return torch.full((LAYOUT.block_bytes // 4,), float(index), device="cuda")


def _transport(way: str, side: str) -> CollectiveTransport:
    # NCCL takes two processes on one GPU only for two hosts'.
    host, over = ("one", "collective") if way == "one host" else (side, way)
    os.environ.update(NCCL_HOSTID=host, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    preference = cast(Preference, over)
    config = LaneConfig(transport=preference, message_bytes=100, max_staged_bytes=4 * LAYOUT.block_bytes, stall_s=30.0)
    return CollectiveTransport(device="cuda:0", config=config)


def _receive(pipe: Connection, way: str) -> None:
    bell = threading.Event()
    receiver = _transport(way, "destination").receiver(address("d0", 1), LAYOUT, wake=bell.set)
    receiver.expect(address("p0", 1), LAYOUT)
    pipe.send(receiver.address)
    told = 0
    while told < NUM_CHUNKS:
        bell.wait(PATIENCE_S)
        bell.clear()
        for event in receiver.poll():
            assert isinstance(event, Arrived), f"the lane was lost: {event}"
            payload = receiver.take(event.chunk, 1.0)
            pipe.send((event.chunk.first_block, bool((payload == event.chunk.first_block).all())))
            receiver.give_back(payload)
            told += 1
    pipe.send([lane.transport for lane in receiver.lanes()])
    receiver.close()


@pytest.mark.parametrize("way", TRANSPORTS)
def test_payloads_in_device_memory_arrive(way: str) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, way), daemon=True)
    process.start()
    bell = threading.Event()
    sender = _transport(way, "source").sender(address("p0", 1), LAYOUT, wake=bell.set)
    ticket = replace(ticket_to(address("d0", 1)), destination=here.recv())
    for index in range(NUM_CHUNKS):
        while not sender.can_offer(ticket):
            bell.wait(PATIENCE_S)
            bell.clear()
            sender.poll()
        sender.offer(ticket, chunk(index), _payload(index))
    assert [here.recv() for _ in range(NUM_CHUNKS)] == [(index, True) for index in range(NUM_CHUNKS)]
    assert here.recv() == [TRANSPORTS[way]]
    sender.close()
    process.join()


def _map_a_ring(notice: bytes, pipe: Connection) -> None:
    link = prove(connect(notice, 0), PATIENCE_S, "cuda:0")
    pipe.send(True)
    signal.pause()
    link.close()


def test_a_ring_is_freed_after_its_peer_was_killed() -> None:
    context = multiprocessing.get_context("spawn")
    torch.zeros(1, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        listener = ShmListener("cuda:0", MAX_SLOT_BYTES)
        here, there = context.Pipe()
        process = context.Process(target=_map_a_ring, args=(listener.notice, there), daemon=True)
        process.start()
        (link,) = listener.accept([0], PATIENCE_S).values()
        here.recv()
        process.kill()
        process.join()
        link.close()
        del link
    deadline_s = time.monotonic() + PATIENCE_S
    while before - torch.cuda.mem_get_info()[0] > MAX_SLOT_BYTES:  # less than a ring
        assert time.monotonic() < deadline_s, "rings of dead peers are left"


SIZE = 4  # tokens of a block, at both ends


def _push_all(port: int, device: str) -> None:
    """The source's only rank."""
    os.environ.update(NCCL_HOSTID="source", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    lane_peer.OVER, lane_peer.ON = "collective", device
    push(0, 1, SIZE, port, 2, SIZE)


def _land_all(pipe: Connection, rank: int, who: LaneAddress, device: str) -> None:
    """Lands all chunks on one destination rank; prints its address, then its cache."""
    os.environ.update(NCCL_HOSTID=f"destination{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    layout, bell = replace(PROMPT, tp=2), threading.Event()
    config = LaneConfig(transport="collective", message_bytes=100, stall_s=30.0)
    receiver = CollectiveTransport(rank=rank, device=device, config=config).receiver(who, layout, wake=bell.set)
    storage = KVStorage(layout, num_blocks=16, device=device)
    transfer = RankTransfer(storage, layout, rank=rank, receiver=receiver)
    transfer.expect(address("p0", 1), PROMPT)
    pipe.send(receiver.address)
    ticket, num_left = prompt_ticket(receiver.address, layout), 4
    while num_left:
        bell.wait(PATIENCE_S)
        bell.clear()
        for event in receiver.poll():
            assert isinstance(event, Arrived), f"the lane was lost: {event}"
            num_left -= 1
    for part in prompt_chunks(ticket):
        transfer.land(part, ticket.block_ids[part.first_block : part.first_block + part.num_blocks], "p0#1")
    pipe.send(storage.data.cpu().numpy())
    transfer.close()


@pytest.mark.parametrize("device", ["cuda:0"])
def test_one_rank_meets_two_over_nccl(device: str) -> None:
    """Each of the two ranks gets its heads of every token, bit for bit."""
    context, ends, processes = multiprocessing.get_context("spawn"), [], []
    who = address("d0", 1)
    for rank in range(2):
        here, there = context.Pipe()
        processes.append(context.Process(target=_land_all, args=(there, rank, who, device), daemon=True))
        processes[-1].start()
        who = here.recv()
        ends.append(here)
    processes.append(context.Process(target=_push_all, args=(who.port, device), daemon=True))
    processes[-1].start()
    kv, blocks = prompt_kv(), blocks_of(TOKENS, SIZE)
    for rank, end in enumerate(ends):
        heads, data = heads_of(replace(PROMPT, tp=2), rank), torch.from_numpy(end.recv())
        for token in range(CACHED, TOKENS):
            landed = data[:, :, blocks[token // SIZE], :, token % SIZE]
            assert torch.equal(landed, kv[:, :, token, heads.start : heads.stop]), f"token {token} on rank {rank}"
    processes[-1].kill()
    for process in processes:
        process.join()
