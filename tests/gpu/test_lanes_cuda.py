"""Lanes between two processes that share a GPU, over CUDA IPC and over NCCL. Left out where there is no GPU."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch

from kvtransfer.config import LaneConfig, Preference
from kvtransfer.transport import Arrived
from kvtransfer.transports.collective import CollectiveTransport
from tests.cluster.lane_peer import LAYOUT, address, chunk, ticket_to

pytestmark = pytest.mark.gpu

NUM_CHUNKS = 20
PATIENCE_S = 60.0
TRANSPORTS = {"shm": "cuda-ipc", "collective": "nccl"}


def _payload(index: int) -> torch.Tensor:
    return torch.full((LAYOUT.block_bytes // 4,), float(index), device="cuda")


def _transport(preference: Preference, side: str) -> CollectiveTransport:
    # NCCL takes two processes on one GPU only for two hosts'.
    os.environ.update(NCCL_HOSTID=side, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    config = LaneConfig(transport=preference, message_bytes=100, max_staged_bytes=4 * LAYOUT.block_bytes, stall_s=30.0)
    return CollectiveTransport(device="cuda:0", config=config)


def _receive(pipe: Connection, preference: Preference) -> None:
    bell = threading.Event()
    receiver = _transport(preference, "destination").receiver(address("d0", 1), LAYOUT, wake=bell.set)
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


@pytest.mark.parametrize("preference", TRANSPORTS)
def test_payloads_in_device_memory_arrive(preference: Preference) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, preference), daemon=True)
    process.start()
    bell = threading.Event()
    sender = _transport(preference, "source").sender(address("p0", 1), LAYOUT, wake=bell.set)
    ticket = replace(ticket_to(address("d0", 1)), destination=here.recv())
    for index in range(NUM_CHUNKS):
        while not sender.can_offer(ticket):
            bell.wait(PATIENCE_S)
            bell.clear()
            sender.poll()
        sender.offer(ticket, chunk(index), _payload(index))
    assert [here.recv() for _ in range(NUM_CHUNKS)] == [(index, True) for index in range(NUM_CHUNKS)]
    assert here.recv() == [TRANSPORTS[preference]]
    sender.close()
    process.join()
