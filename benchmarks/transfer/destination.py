"""Is the receiving process of benchmarks/transfer/lanes.py: receives as it is ordered, and reports its CPU time.

parent ── Order ──▶ serve ── where to meet ──▶ parent ══ payloads ══▶ serve ── CPU seconds, once all is here ──▶ parent
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from kvtransfer.lane_rules import LaneConfig, Preference
from kvtransfer.transport import Arrived
from kvtransfer.transports.collective.collective import CollectiveTransport
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousServer, RendezvousStore
from protos.values import KVLayout, LaneAddress

LAYOUT = KVLayout.dense(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
"""That of Llama 3.1 8B: 2 MiB a block."""
CHUNK_BLOCKS = 16
MESSAGE_BYTES = LaneConfig().message_bytes
PATIENCE_S = 60.0

_backends: Any = distributed
_cuda: Any = torch.cuda


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`what` is "lanes" (receive rounds of chunks of these sizes from `sources`), "raw" (the same by gloo's own
    receive, or NCCL's on a GPU) or "end"."""

    what: str
    device: str = "cpu"
    preference: Preference = "auto"
    sources: tuple[LaneAddress, ...] = ()
    rounds: tuple[tuple[int, ...], ...] = ()


def chunk_sizes(num_blocks: int) -> tuple[int, ...]:
    """Bytes of the chunks in which `num_blocks` blocks travel."""
    full, rest = divmod(num_blocks, CHUNK_BLOCKS)
    return (CHUNK_BLOCKS * LAYOUT.block_bytes,) * full + ((rest * LAYOUT.block_bytes,) if rest else ())


RAW_KEY = b"of both ranks of this benchmark"


def play_host(name: str) -> None:
    """Before NCCL is used: it takes two processes on one GPU only for those of two hosts. They meet by sockets then."""
    os.environ.update(NCCL_HOSTID=name, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")


def raw_group(port: int, rank: int, device: str) -> Any:
    store = RendezvousStore("127.0.0.1", port, "raw/", key=RAW_KEY, wait_s=PATIENCE_S)
    if device != "cpu":
        os.environ.pop("TORCH_NCCL_BLOCKING_WAIT", None)  # lanes set it: this is NCCL as torch has it
        return _backends.ProcessGroupNCCL(
            PrefixStore("nccl", store), rank, 2, _backends.ProcessGroupNCCL.Options()
        ), store
    options = _backends.ProcessGroupGloo._Options()
    options._devices = [_backends.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=PATIENCE_S)
    return _backends.ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, options), store


def move_raw(operation: Any, payload_B: torch.Tensor, peer: int) -> None:
    """In the messages that a lane would use, all under way before the first is waited for."""
    works = [operation([part], peer, 0) for part in torch.split(payload_B, MESSAGE_BYTES)]
    for work in works:
        work.wait()
    settle(payload_B.device)


def settle(device: torch.device) -> None:
    """What was queued is done when this returns."""
    if device.type == "cuda":
        _cuda.synchronize(device)


def rss_bytes() -> int:
    """Resident memory of this process, what it shares included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def free_on_device(device: str) -> int:
    """Free memory of a GPU; 0 on a CPU."""
    return int(_cuda.mem_get_info()[0]) if device == "cuda" else 0


def serve_alone(parent: Connection) -> None:
    """In another process."""
    torch.set_num_threads(1)
    play_host("destination")
    serve(parent)


def serve(parent: Connection) -> None:
    while (order := parent.recv()).what != "end":
        if order.what == "raw":
            _receive_raw(parent, order)
        else:
            _receive_lanes(parent, order)


@contextmanager
def _told(parent: Connection) -> Iterator[None]:
    start_s = time.process_time()
    yield
    parent.send(time.process_time() - start_s)


def _receive_raw(parent: Connection, order: Order) -> None:
    server = RendezvousServer("127.0.0.1", key=RAW_KEY)
    parent.send(server.port)
    group, store = raw_group(server.port, 1, order.device)
    buffer_B = torch.zeros(max(map(max, order.rounds)), dtype=torch.uint8, device=order.device)
    for sizes in order.rounds:
        with _told(parent):
            for size in sizes:
                move_raw(group.recv, buffer_B[:size], 0)
    del group
    store.close()
    server.close()


def _receive_lanes(parent: Connection, order: Order) -> None:
    """Each round comes from one source; without rounds the lanes are only opened, until the parent ends them."""
    bell = threading.Event()
    made = CollectiveTransport(device=order.device, config=LaneConfig(transport=order.preference))
    receiver = made.receiver(LaneAddress(worker_id="d", incarnation=1, host="127.0.0.1", port=0), LAYOUT, wake=bell.set)
    before = rss_bytes()
    for source in order.sources:
        receiver.expect(source, LAYOUT)
    parent.send(receiver.address)
    for sizes in order.rounds:
        with _told(parent):
            num_left = len(sizes)
            while num_left:
                bell.wait(PATIENCE_S)
                bell.clear()
                for event in receiver.poll():
                    assert isinstance(event, Arrived), f"the lane was lost: {event}"
                    receiver.give_back(receiver.take(event.chunk, PATIENCE_S))
                    num_left -= 1
    parent.recv()
    parent.send(rss_bytes() - before)
    receiver.close()
