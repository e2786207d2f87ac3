"""Ranks meet over NCCL by the code that gloo takes on a CPU. Left out where there is no GPU."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from workers.parallel.ranks import find_store, join_group, open_store

pytestmark = pytest.mark.gpu

KEY = b"of the ranks of these tests"


def _sum_over_nccl(rank: int, port: int) -> tuple[float, list[int]]:
    # NCCL takes two processes on one GPU only for two hosts'.
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = open_store("127.0.0.1", port, key=KEY) if rank == 0 else find_store("127.0.0.1", port, key=KEY)
    group = join_group(store, rank=rank, size=2, name="w0", device="cuda", timeout_s=60.0)
    total = group.all_reduce(torch.full((4,), rank + 1.0, device="cuda")).sum().item()
    lowest = group.least([rank, -rank])
    group.broadcast(b"done")
    group.close()
    return total, lowest


def _replay_over_nccl(rank: int, port: int) -> float:
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = open_store("127.0.0.1", port, key=KEY) if rank == 0 else find_store("127.0.0.1", port, key=KEY)
    group = join_group(store, rank=rank, size=2, name="w0", device="cuda", timeout_s=60.0)
    x = torch.full((4,), rank + 1.0, device="cuda")
    group.all_reduce(torch.zeros_like(x))  # as decode graphs do: NCCL connects ranks at their first collective
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        group.all_reduce(x)
    group.before_close(graph.reset)
    for _ in range(3):
        graph.replay()
    total = x[0].item()
    group.broadcast(b"done")
    group.close()
    return total


def test_an_all_reduce_is_recorded_and_replayed() -> None:
    """A decode step's all-reduce, first not recorded. Each replay adds the other rank's values."""
    store = open_store("127.0.0.1")
    store.close()
    port = store.port
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(_replay_over_nccl, range(2), [port, port])) == [12.0, 12.0]


def test_two_ranks_meet_over_nccl() -> None:
    store = open_store("127.0.0.1")
    store.close()
    port = store.port
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_sum_over_nccl, range(2), [port, port]))
    assert results == [(12.0, [0, -1]), (12.0, [0, -1])]
