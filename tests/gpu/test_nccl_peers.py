"""A peer that is killed in the middle of a transfer over NCCL: the survivor hears of it soon, lives on, and meets the
peer's next life. Left out where there is no GPU."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from dataclasses import replace

import pytest
import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transport import Arrived, LaneLost
from kvtransfer.transports.collective.collective import CollectiveReceiver, CollectiveTransport
from protos.values import LaneAddress
from tests.cluster.lane_peer import LAYOUT, address, chunk, ticket_to
from tests.layouts import changed

pytestmark = pytest.mark.gpu

HEARD_S = 2.0
WATCHDOG_S = 3.0  # torch's looks ten times a second, where there is one
PATIENCE_S = 60.0
WIDE = changed(LAYOUT, head_dim=2**18)
PAYLOAD = WIDE.block_bytes  # 32 MiB


def _transport(host: str) -> CollectiveTransport:
    # NCCL takes two processes on one GPU only for two hosts'.
    os.environ.update(NCCL_HOSTID=host, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    config = LaneConfig(transport="collective", max_staged_bytes=4 * PAYLOAD, stall_s=30.0)
    return CollectiveTransport(device="cuda:0", config=config)


def _send_for_ever(incarnation: int, destination: LaneAddress) -> None:
    bell = threading.Event()
    sender = _transport("source").sender(address("p0", incarnation), WIDE, wake=bell.set)
    ticket = replace(ticket_to(destination), destination=destination, layout=WIDE)
    for index in range(10**6):
        while not sender.can_offer(ticket):
            bell.wait(PATIENCE_S)
            bell.clear()
            sender.poll()
        sender.offer(ticket, chunk(index % 1000), torch.full((PAYLOAD // 4,), float(index), device="cuda"))


def _await(receiver: CollectiveReceiver, bell: threading.Event, kind: type[Arrived] | type[LaneLost]) -> None:
    """Takes arrivals until one of a kind."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        bell.wait(0.1)
        bell.clear()
        for event in receiver.poll():
            if isinstance(event, Arrived):
                receiver.give_back(receiver.take(event.chunk, 1.0))
            if isinstance(event, kind):
                return
    raise AssertionError(f"no {kind.__name__}")


def test_a_peer_that_is_killed_takes_nobody_with_it() -> None:
    context, bell = multiprocessing.get_context("spawn"), threading.Event()
    receiver = _transport("destination").receiver(address("d0", 1), WIDE, wake=bell.set)
    for incarnation in (1, 2):
        receiver.expect(address("p0", incarnation), WIDE)
        peer = context.Process(target=_send_for_ever, args=(incarnation, receiver.address), daemon=True)
        peer.start()
        _await(receiver, bell, Arrived)
        assert [lane.transport for lane in receiver.lanes()] == ["nccl"]
        _await(receiver, bell, Arrived)
        peer.kill()
        killed_s = time.monotonic()
        _await(receiver, bell, LaneLost)
        assert time.monotonic() - killed_s < HEARD_S
        peer.join()
    time.sleep(WATCHDOG_S)  # whatever would end this process does it now
    receiver.close()
