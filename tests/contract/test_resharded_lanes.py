"""Lanes with several source ranks: their streams are put together, or known not to come together, at every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transport import Arrived, Chunk, LaneLost, Presence
from kvtransfer.transports.collective.collective import CollectiveReceiver, CollectiveSender, CollectiveTransport
from kvtransfer.transports.links.staging_memory import Staging
from protos.errors import TransferFailed
from protos.values import KVLayout, LaneAddress, Ticket

ONE = KVLayout.dense(num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
TWO = replace(ONE, tp=2)
HEAD = 1 * 2 * 4 * 4  # numbers that one head of a block has
CONFIG = LaneConfig(transport="collective", heartbeat_s=0.05, max_staged_bytes=3 * ONE.block_bytes)
PATIENCE_S = 30.0


def address(worker_id: str) -> LaneAddress:
    return LaneAddress(worker_id=worker_id, incarnation=1, host="127.0.0.1", port=0)


def chunk(ticket_id: str, first_block: int = 0) -> Chunk:
    return Chunk(ticket_id=ticket_id, generation=1, first_block=first_block, num_blocks=1)


def numbers(first: int) -> torch.Tensor:
    return torch.arange(first, first + HEAD, dtype=torch.float32)


class Lanes:
    """From the two ranks of one worker to the only rank of another."""

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self.receiver = CollectiveTransport(config=CONFIG).receiver(address("d0"), ONE, wake=self._ring)
        self.senders = [
            CollectiveTransport(rank=rank, config=CONFIG).sender(address("p0"), TWO, wake=self._ring)
            for rank in range(2)
        ]

    def offer(self, rank: int, what: Chunk, payload: torch.Tensor) -> None:
        """Copies the payload into the lane's own memory, as a transfer does."""
        memory = self.senders[rank].stage(payload.nbytes).view(payload.dtype)
        memory.copy_(payload)
        self.senders[rank].offer(self.ticket(what.ticket_id), what, memory)

    def ticket(self, ticket_id: str) -> Ticket:
        return Ticket(
            ticket_id=ticket_id, generation=1, lease_s=9.0, block_ids=tuple(range(99)), num_cached_tokens=0,
            layout=ONE, destination=self.receiver.address,
        )  # fmt: skip

    def events(self, count: int) -> list[Any]:
        collected: list[Any] = []

        def enough() -> bool:
            collected.extend(self.receiver.poll())
            return len(collected) >= count

        self.until(enough)
        return collected

    def until(self, happened: Callable[[], bool]) -> None:
        with self._bell:
            assert self._bell.wait_for(happened, PATIENCE_S), "it did not happen"

    def close(self) -> None:
        ends: list[CollectiveSender | CollectiveReceiver] = [*self.senders, self.receiver]
        for end in ends:
            end.close()

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes()
    yield lanes
    lanes.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")], "a lane is left behind"


def test_heads_of_several_ranks_become_one_payload(lanes: Lanes) -> None:
    lanes.receiver.expect(lanes.senders[0].address, TWO)
    for index in range(20):  # more than may be staged at once: memory goes round
        for rank in range(2):
            lanes.offer(rank, chunk("r", index), numbers(100 * index + 50 * rank))
        (arrived,) = lanes.events(1)
        assert isinstance(arrived, Arrived)
        assert (arrived.chunk, arrived.num_bytes) == (chunk("r", index), ONE.block_bytes)
        payload = lanes.receiver.take(arrived.chunk, 0.0)
        assert torch.equal(payload, torch.cat([numbers(100 * index), numbers(100 * index + 50)]))
        lanes.receiver.give_back(payload)


def test_a_chunk_cancelled_on_one_rank_blocks_nothing(lanes: Lanes) -> None:
    """Rank 0's part is on its way already when the ranks are told to cancel."""
    for rank in range(2):
        lanes.offer(rank, chunk("gone"), numbers(0))
    lanes.senders[1].cancel("gone")
    for rank in range(2):
        lanes.offer(rank, chunk("stays"), numbers(rank))
    lanes.receiver.expect(lanes.senders[0].address, TWO)
    void, arrived = lanes.events(2)
    assert (void.chunk, void.num_bytes) == (chunk("gone"), 0)
    assert lanes.receiver.look(chunk("gone")) is Presence.VOID
    with pytest.raises(TransferFailed, match="were cancelled"):
        lanes.receiver.take(chunk("gone"), 0.0)
    assert lanes.receiver.look(chunk("gone")) is Presence.COMING
    assert torch.equal(lanes.receiver.take(arrived.chunk, 0.0), torch.cat([numbers(0), numbers(1)]))
    assert not lanes.receiver.busy()


def test_chunks_of_a_lost_lane_are_dropped_except_kept_ones(lanes: Lanes) -> None:
    lanes.receiver.expect(lanes.senders[0].address, TWO)
    for rank in range(2):
        for ticket_id in ("kept", "other"):
            lanes.offer(rank, chunk(ticket_id), numbers(0))
    lanes.events(2)
    lanes.senders[1].close()
    (lost,) = lanes.events(1)
    assert isinstance(lost, LaneLost)
    lanes.receiver.drop_source(lost.peer, (chunk("kept"),))
    assert [lanes.receiver.look(chunk(name)) for name in ("kept", "other")] == [Presence.HERE, Presence.COMING]


def test_a_rank_that_dies_while_staging_is_full_is_a_lost_lane(lanes: Lanes) -> None:
    """Payloads of rank 0 wait for rank 1's, which never come."""
    lanes.receiver.expect(lanes.senders[0].address, TWO)
    for index in range(5):
        lanes.offer(0, chunk("r", index), numbers(0))
    lanes.senders[1].open(lanes.ticket("r"))  # and says nothing
    (inbox,) = lanes.receiver._lanes.values()
    while inbox.lane.num_staged_bytes < CONFIG.max_staged_bytes:
        threading.Event().wait(0.005)
    lanes.senders[1].close()
    (lost,) = lanes.events(1)
    assert isinstance(lost, LaneLost)


def test_staging_memory_is_reused_within_its_bound() -> None:
    staging = Staging(device="cpu", max_bytes=2**20)
    first = staging.take(300_000)
    address_of_first = first.data_ptr()
    assert staging.take(300_000).data_ptr() != address_of_first, "two own the same memory"
    staging.give(first.view(torch.float32))
    again = staging.take(200_000)
    assert (again.data_ptr(), again.numel()) == (address_of_first, 200_000)
    staging.give(torch.zeros(9))  # not ours
    staging.discard(again)
    large = [staging.take(2**20) for _ in range(3)]
    for large_chunk in large:
        staging.give(large_chunk)
    assert staging.num_free_bytes <= 2**20
