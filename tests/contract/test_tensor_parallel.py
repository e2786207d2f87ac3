"""Every `TensorParallel` gives the same sums and values on all ranks, and a typed error when a rank is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from protos.errors import UnreadableMessage, WorkerLost
from workers.parallel.group import RankGroup, Solo, TensorParallel

T = TypeVar("T")


@contextmanager
def ranks(size: int) -> Iterator[Callable[[Callable[[TensorParallel], T]], list[T]]]:
    """Runs a function on every rank of a group at once; gives their results in rank order."""
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        made = [threads.submit(RankGroup, store, rank=rank, size=size) for rank in range(size)]
        groups: list[TensorParallel] = [Solo()] if size == 1 else [future.result() for future in made]

        def run(program: Callable[[TensorParallel], T]) -> list[T]:
            return [future.result() for future in [threads.submit(program, group) for group in groups]]

        yield run
        for group in groups:
            group.close()


@pytest.fixture(params=[1, 2, 3])
def size(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def test_sums_and_gathered_parts_are_the_same_on_every_rank(size: int) -> None:
    def program(group: TensorParallel) -> tuple[list[float], list[list[float]]]:
        total = group.all_reduce(torch.tensor([1.0, 10.0]) * (group.rank + 1))
        # A transposed view: collectives must not depend on how a tensor lies in memory.
        parts = group.all_gather(torch.tensor([[group.rank], [group.rank + 0.5]]).t().contiguous().t())
        return total.tolist(), parts.tolist()

    factor = sum(range(1, size + 1))
    rows = [[float(r) for r in range(size)], [r + 0.5 for r in range(size)]]
    with ranks(size) as run:
        assert run(program) == [([factor, 10.0 * factor], rows)] * size


def test_actions_before_closing_find_the_group_open() -> None:
    """NCCL waits for graphs with its collectives, so they are destroyed first."""
    sums: list[float] = []

    def closed(group: TensorParallel) -> None:
        group.before_close(lambda: sums.append(group.all_reduce(torch.tensor([1.0])).item()))
        group.close()
        group.close()

    with ranks(2) as run:
        run(closed)
        assert sums == [2.0, 2.0]


def test_tensors_are_collected_in_rank_order_and_shared_from_rank_0(size: int) -> None:
    def program(group: TensorParallel) -> tuple[list[list[float]], list[float]]:
        collected = group.collect(torch.tensor([group.rank, 0.5]))
        assert collected.is_contiguous()
        return collected.tolist(), group.share(torch.tensor([group.rank + 7.0])).tolist()

    with ranks(size) as run:
        assert run(program) == [([[float(rank), 0.5] for rank in range(size)], [7.0])] * size


def test_sums_under_way_are_there_once_waited_for(size: int) -> None:
    def program(group: TensorParallel) -> list[float]:
        totals = [torch.tensor([place + group.rank]) for place in (10.0, 20.0)]
        for wait in [group.begin_all_reduce(total) for total in totals]:
            wait()
        return [total.item() for total in totals]

    among_ranks = sum(range(size))
    with ranks(size) as run:
        assert run(program) == [[10.0 * size + among_ranks, 20.0 * size + among_ranks]] * size


def test_the_least_of_numbers_is_found_without_the_devices(size: int) -> None:
    def program(group: TensorParallel) -> list[int]:
        if isinstance(group, RankGroup):
            group._tensors = None
        return list(group.least([group.rank, 5 - group.rank, 7]))

    with ranks(size) as run:
        assert run(program) == [[0, 6 - size, 7]] * size


@pytest.mark.parametrize("num_bytes", [0, 4088, 4089, 70_000])
def test_messages_of_rank_0_reach_every_rank(size: int, num_bytes: int) -> None:
    message = bytes(place % 251 for place in range(num_bytes))
    with ranks(size) as run:
        assert run(lambda group: group.broadcast(message if group.rank == 0 else b"")) == [message] * size


def test_an_impossible_message_length_allocates_nothing() -> None:
    def program(group: TensorParallel) -> str:
        assert isinstance(group, RankGroup)
        if group.rank == 0:
            group._broadcast(torch.full((4096,), 0xFF, dtype=torch.uint8))
            return ""
        with pytest.raises(UnreadableMessage) as caught:
            group.broadcast()
        return caught.value.message

    with ranks(2) as run:
        assert "a message of 18446744073709551615 bytes" in run(program)[1]


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_a_rank_that_dies_is_a_typed_error_on_the_others(collective: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = (
        "import os, sys; from torch.distributed import TCPStore; from workers.parallel.group import RankGroup\n"
        "RankGroup(TCPStore('127.0.0.1', int(sys.argv[1])), rank=0, size=2); os._exit(0)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(store.port)]) as peer:
        group = RankGroup(store, rank=1, size=2)
        peer.wait()
        with pytest.raises(WorkerLost, match="rank 1 of 2"):
            group.broadcast() if collective == "broadcast" else group.all_reduce(torch.zeros(1))
        group.close()
