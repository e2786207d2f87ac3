"""A lane over NCCL whose peer dies, by a stand-in for torch's group. tests/gpu/test_nccl_peers.py kills a real one.

tests/gpu/test_nccl_peers.py kills a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch

from kvtransfer.transports.links.nccl import NcclGroup, require_here
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousServer, RendezvousStore

NEVER = timedelta(seconds=600)
BYTES = [torch.zeros(1, dtype=torch.uint8)]


class FakeNccl:
    """Operations are over after so many looks at them, or once the group is aborted, as NCCL's kernels are; `broken` is
    what NCCL has found wrong by then."""

    def __init__(self, num_looks: int = 3, broken: str = "") -> None:
        self.num_looks = num_looks
        self.aborted = False
        self._broken = broken

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeNccl:
        return self

    recv = send

    def is_completed(self) -> bool:
        self.num_looks -= 1
        return self.aborted or bool(self._broken) or self.num_looks < 0

    def wait(self) -> None:
        if self._broken:
            raise RuntimeError(self._broken)

    def abort(self) -> None:
        self.aborted = True


def _at_ease() -> None:
    pass


def test_arrived_payloads_survive_an_abort() -> None:
    made = FakeNccl()
    NcclGroup(made, _at_ease).recv(BYTES, 0, 0).wait(NEVER)
    assert made.num_looks < 0


def test_an_aborted_communicator_delivers_no_bytes() -> None:
    group = NcclGroup(FakeNccl(num_looks=10**9), _at_ease)
    coming = group.recv(BYTES, 0, 0)
    group.close()
    with pytest.raises(RuntimeError, match="aborted"):
        coming.wait(NEVER)
    with pytest.raises(RuntimeError, match="aborted"):
        group.send(BYTES, 0, 0)


def test_an_operation_that_ends_in_an_error_raises_it() -> None:
    with pytest.raises(RuntimeError, match="remote process exited"):
        NcclGroup(FakeNccl(broken="remote process exited"), _at_ease).send(BYTES, 0, 0).wait(NEVER)


def test_one_that_never_ends_is_not_awaited_without_end() -> None:
    with pytest.raises(RuntimeError, match=r"did not end within 0.01 s"):
        NcclGroup(FakeNccl(num_looks=10**9), _at_ease).send(BYTES, 0, 0).wait(timedelta(seconds=0.01))


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def join(server: RendezvousServer) -> Iterator[Callable[[int], RendezvousStore]]:
    stores: list[RendezvousStore] = []

    def join(rank: int) -> RendezvousStore:
        stores.append(store := RendezvousStore("127.0.0.1", server.port, "lane/", key=server.key, wait_s=10.0))
        store.set_on_disconnect("0/gone", f"rank {rank} of 2")
        return store

    yield join
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (lambda server, other: other.close(), "rank 1 of 2 hung up"),
        (lambda server, other: other.raise_to("epoch", 1), "another rank has left"),
        (lambda server, other: server.close(), "the destination's rendezvous server is gone"),
    ],
    ids=["killed", "left", "destination killed"],
)
def test_who_waits_hears_of_a_peer_that_dies(
    server: RendezvousServer,
    join: Callable[[int], RendezvousStore],
    happens: Callable[[RendezvousServer, RendezvousStore], None],
    reason: str,
) -> None:
    """Long before its patience is over."""
    store, other = join(0), join(1)
    require_here(store, 0)
    group = NcclGroup(FakeNccl(num_looks=10**9), lambda: require_here(store, 0))
    coming = group.recv(BYTES, 1, 0)
    happens(server, other)
    with pytest.raises(RuntimeError, match=reason):
        coming.wait(NEVER)
