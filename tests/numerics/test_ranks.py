"""Ranks over real gloo groups: rank 0 leads, everybody does the same in the same order, and a lost rank is a typed
fault of the others, never a hang."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.reshard import Cut
from kvtransfer.transport import Arrived, Chunk, LaneLost, Presence
from protos.codec import Messages
from protos.errors import IncompatibleWorkers, TransferFailed, UnreadableMessage, WorkerLost
from protos.values import KVLayout, LaneAddress, SamplingParams, Ticket
from workers.batch import Batch, Row, Sample
from workers.kv.host_copies import CpuCopies
from workers.parallel.group import TensorParallel
from workers.parallel.operations import MESSAGES as RANK_MESSAGES
from workers.parallel.operations import (
    CopyOperations,
    RankOperations,
    StepOperations,
    TransferOperations,
    operations_of,
)
from workers.parallel.ranks import Leader, find_store, follow, for_followers, join_group, open_store
from workers.runner.torch_runner import TorchRunner
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.transfer_leader import TransferLeader

CHUNK = Chunk(ticket_id="t", generation=1, first_block=0, num_blocks=2)
LAYOUT = KVLayout.dense(num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32", tp=2)
ADDRESS = LaneAddress(worker_id="d0", incarnation=1, host="127.0.0.1", port=1)
TICKET = Ticket(
    ticket_id="t", generation=1, lease_s=9.0, block_ids=(4, 5), num_cached_tokens=0, layout=LAYOUT, destination=ADDRESS
)  # fmt: skip

MESSAGES = Messages(
    RANK_MESSAGES.bodies
    | dict.fromkeys(("run", "sum", "refuse"), tuple[()])
    | {"note": tuple[int | bytes | tuple[int, ...], ...]}
)
"""Operations of followers in these tests."""


@contextmanager
def groups(size: int, timeout_s: float = 30.0) -> Iterator[list[TensorParallel]]:
    """Creates a group of `size` ranks in this process, each with its own connection to the store."""
    store = open_store("127.0.0.1")
    stores = [store, *(find_store("127.0.0.1", store.port, key=store.key) for _ in range(1, size))]

    def join(rank: int) -> TensorParallel:
        return join_group(stores[rank], rank=rank, size=size, name="test", device="cpu", timeout_s=timeout_s)

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(join, range(size)))
    try:
        yield made
    finally:
        for group in made:
            group.close()


@contextmanager
def following(
    group: TensorParallel,
    operations: Mapping[str, Callable[..., object]],
    after_each: Callable[[], None] = lambda: None,
) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(follow, group, [SimpleNamespace(**operations)], after_each=after_each, messages=MESSAGES)


def followers(group: TensorParallel) -> Any:
    """Followers of a leader whose operations are those of MESSAGES."""
    return Leader(group, MESSAGES).followers


def test_followers_repeat_the_leaders_operations_in_order() -> None:
    done: list[tuple[object, ...]] = []
    settled: list[int] = []
    with groups(2) as (first, second):
        operations = {
            "note": lambda *values: done.append(values),
            "sum": lambda: done.append((first.size, float(second.all_reduce(torch.ones(1) * 2)))),
        }
        with following(second, operations, lambda: settled.append(len(done))) as ended:
            leader = Leader(first, MESSAGES)
            others: Any = leader.followers
            others.note(7, 8)
            others.sum()
            assert float(first.all_reduce(torch.ones(1))) == 3.0
            others.note(tuple(range(100_000)))
            leader.close()
            assert ended.result() is None
    assert done == [(7, 8), (2, 3.0), (tuple(range(100_000)),)]
    assert settled == [1, 2, 3]


def test_a_leader_alone_tells_nobody() -> None:
    group = join_group(None, rank=0, size=1, name="test", device="cpu", timeout_s=1.0)
    leader = Leader(group)
    others: Any = leader.followers
    others.launch(object())  # what cannot travel does not have to
    assert leader.everywhere(others) is others
    assert group.least([3, 1]) == [3, 1]
    leader.close()


def hostile_pickle(code: str) -> bytes:
    """Runs `code` in a process that unpickles it."""
    return b"\x80\x02cbuiltins\nexec\n(X" + len(code).to_bytes(4, "little") + code.encode() + b"tR."


@pytest.mark.parametrize(
    "message",
    [b"", b"\x03run", b"\x03run\x91\x01", b"\x06launch\x90", b"\x05shell\x90", b"\xff" * 64],
    ids=["empty", "no-body", "too-many", "not-listed-here", "not-listed", "noise"],
)
def test_bytes_that_are_no_message_end_the_group(message: bytes, caplog: pytest.LogCaptureFixture) -> None:
    called: list[object] = []
    with groups(2) as (first, second), following(second, {"run": lambda *told: called.append(told)}) as ended:
        first.broadcast(message)
        with pytest.raises(UnreadableMessage, match="the same version of Baton"):
            ended.result()
        with pytest.raises(WorkerLost):
            first.all_reduce(torch.ones(1))
    assert not called
    assert "rank 1 leaves its group" in caplog.text


def test_a_strangers_pickle_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    message = hostile_pickle(f"open({str(trace)!r}, 'w').close()")
    with groups(2) as (first, second), following(second, {}) as ended:
        first.broadcast(message)
        with pytest.raises(UnreadableMessage):
            ended.result()
    assert not trace.exists()
    pickle.loads(message)
    assert trace.exists(), "the pickle is harmless, so this test proves nothing"


def test_all_that_rank_0_ever_says_has_its_types() -> None:
    assert {"stop", "lane_address", *operations_of(RankOperations)} == set(RANK_MESSAGES.bodies)
    for part, protocol in (
        (TorchRunner, StepOperations),
        (CpuCopies, CopyOperations),
        (RankTransfer, TransferOperations),
    ):
        assert all(callable(getattr(part, name)) for name in operations_of(protocol))
    row = Row(
        request_id="r", token_ids=(3, 4), start=8, block_tables=((0, 7),), prompt_targets=(4,), prompt_len=11,
        depends_on_row=0, draft_ids=(5, 6),
        sample=Sample(params=SamplingParams(logit_bias=((3, 0.5),), grammar="g", seed=2**63), index=1, output_ids=(9,)),
    )  # fmt: skip
    layers = Chunk(ticket_id="t", generation=2, first_block=0, num_blocks=1, first_layer=3, num_layers=1)
    for name, arguments in (
        ("launch", (Batch(rows=(row, row)),)),
        ("push", (TICKET, CHUNK, (1, 2), None)),
        ("push", (TICKET, layers, (1, 2), 3)),
        ("drop_source", ("p0#1", (CHUNK, layers))),
        ("expect", (ADDRESS, LAYOUT)),
    ):
        assert RANK_MESSAGES.decode(RANK_MESSAGES.encode(name, arguments)) == (name, arguments)


def test_a_follower_that_fails_is_a_fault_of_the_leader() -> None:
    def fail() -> None:
        raise MemoryError("no memory on this rank")

    with groups(2) as (first, second), following(second, {"run": fail}) as ended:
        followers(first).run()
        with pytest.raises(WorkerLost):
            first.all_reduce(torch.ones(1))
        with pytest.raises(MemoryError):
            ended.result()


def test_a_refusal_on_a_follower_is_not_the_end() -> None:
    def refuse() -> None:
        raise IncompatibleWorkers("not with that one")

    with groups(2) as (first, second):
        operations = {"refuse": refuse, "run": lambda: second.all_reduce(torch.ones(1))}
        with following(second, operations) as ended:
            leader = Leader(first, MESSAGES)
            others: Any = leader.followers
            others.refuse()
            others.run()
            assert float(first.all_reduce(torch.ones(1))) == 2.0
            leader.close()
            assert ended.result() is None


def test_a_silent_follower_is_a_fault_after_the_timeout() -> None:
    """The follower was stopped, or killed at the moment of a message to it."""
    with groups(2, timeout_s=0.5) as (first, _), pytest.raises(WorkerLost):
        followers(first).note(bytes(64 << 20))  # more than fits the connection's buffers


def test_a_follower_that_hangs_is_a_fault_after_the_timeout() -> None:
    release = threading.Event()
    with groups(2, timeout_s=0.5) as (first, second), following(second, {"run": release.wait}) as ended:
        followers(first).run()
        with pytest.raises(WorkerLost):
            first.all_reduce(torch.ones(1))
        first.close()
        release.set()
        with pytest.raises(WorkerLost):
            ended.result()


def _serve_in_a_process(port: int, key: bytes) -> None:
    group = join_group(
        find_store("127.0.0.1", port, key=key), rank=1, size=2, name="test", device="cpu", timeout_s=600.0
    )
    follow(group, [SimpleNamespace(run=lambda: None)], after_each=lambda: None, messages=MESSAGES)


@pytest.mark.parametrize("phase", ["resting", "stepping"])
def test_a_killed_follower_is_a_fault_at_once(phase: str) -> None:
    store = open_store("127.0.0.1")
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_in_a_process, args=(store.port, store.key), daemon=True
    )
    process.start()
    group = join_group(store, rank=0, size=2, name="test", device="cpu", timeout_s=600.0)
    leader = Leader(group, MESSAGES)
    others: Any = leader.followers
    assert process.pid is not None
    if phase == "stepping":
        threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
    else:
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def step() -> None:
        others.run()
        group.all_reduce(torch.ones(1))

    with pytest.raises(WorkerLost):
        step()
    process.join()
    leader.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    store = open_store("127.0.0.1", timeout_s=0.5)
    with pytest.raises(WorkerLost, match="not all 2 ranks of w0"):
        join_group(store, rank=0, size=2, name="w0", device="cpu", timeout_s=0.5)
    port = store.port
    store.close()
    with pytest.raises(WorkerLost, match=f"no rank 0 at 127.0.0.1:{port}"):
        find_store("127.0.0.1", port, key=b"any", timeout_s=0.2)


def test_a_rank_with_another_key_does_not_come_in() -> None:
    store = open_store("127.0.0.1")
    with pytest.raises(WorkerLost, match="is not where the ranks of this worker meet"):
        find_store("127.0.0.1", store.port, key=b"guessed")
    store.close()


def test_followers_are_told_where_to_sample_but_not_how() -> None:
    how = Sample(params=SamplingParams(temperature=0.3), index=7, output_ids=(1, 2, 3))
    sampled = Row(request_id="a", token_ids=(5,), start=3, block_tables=((0,),), sample=how)
    chunk = Row(request_id="b", token_ids=(5, 6), start=0, block_tables=((1,),), prompt_targets=(6, 7))
    told = for_followers(Batch(rows=(sampled, chunk)))
    assert told.rows[0].sample is not None
    assert told.rows[0].sample.output_ids == ()
    assert told.rows[0].token_ids == (5,)
    assert told.rows[1] == chunk


class Shelf:
    """Blocks of one rank, as a list of numbers."""

    def __init__(self, rank: int) -> None:
        self.values = [rank * 100 + block for block in range(8)]

    def read(self, cut: Cut, stage: Callable[[int], Any]) -> list[int]:
        return [self.values[block] for block in cut.block_ids]

    def write(self, cut: Cut, payload: list[int]) -> None:
        for block, value in zip(cut.block_ids, payload, strict=True):
            self.values[block] = value


class Wire:
    """Both ends of one rank's lane: what is offered can be taken."""

    address = ADDRESS

    def __init__(self) -> None:
        self.under_way: dict[Chunk, list[int]] = {}
        self.expected: list[LaneAddress] = []
        self.cancelled: list[str] = []
        self.opened: list[str] = []
        self.closed = False
        self.late = False
        self.arrived: list[Arrived | LaneLost] = []

    def open(self, ticket: Ticket) -> None:
        self.opened.append(ticket.ticket_id)

    def offer(self, ticket: Ticket, chunk: Chunk, payload: list[int]) -> None:
        self.under_way[chunk] = payload
        self.arrived.append(Arrived(chunk=chunk, source=SOURCE, num_bytes=8, elapsed_s=0.0))

    def stage(self, num_bytes: int) -> None:
        """Numbers need no memory."""

    def look(self, chunk: Chunk) -> Presence:
        return Presence.HERE if chunk in self.under_way and not self.late else Presence.COMING

    def give_back(self, payload: list[int]) -> None:
        """Nor do they leave any."""

    def drop_source(self, source: str, kept: Collection[Chunk]) -> None:
        self.under_way = {chunk: payload for chunk, payload in self.under_way.items() if chunk in kept}

    def take(self, chunk: Chunk, timeout_s: float) -> list[int]:
        if chunk not in self.under_way:
            raise TransferFailed(f"{chunk.ticket_id} did not come")
        return self.under_way.pop(chunk)

    def drop(self, chunk: Chunk, source: str) -> None:
        self.under_way.pop(chunk, None)

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        self.expected.append(source)

    def cancel(self, ticket_id: str) -> None:
        self.cancelled.append(ticket_id)

    def poll(self) -> list[Arrived | LaneLost]:
        events, self.arrived = self.arrived, []
        return events

    def busy(self) -> bool:
        return bool(self.under_way)

    def lanes(self) -> list[object]:
        return []

    def close(self) -> None:
        self.closed = True


SOURCE = "d0#1"
"""Where what is offered comes from: here."""


def make_transfer(group: TensorParallel) -> tuple[RankTransfer[list[int]], Shelf, Wire]:
    shelf, wire = Shelf(group.rank), Wire()
    ends: Any = wire
    transfer = RankTransfer(
        shelf,
        LAYOUT,
        rank=group.rank,
        sender=ends,
        receiver=ends,
        least=group.least,
    )
    return transfer, shelf, wire


def transfers_of(transfer: RankTransfer[list[int]]) -> dict[str, Callable[..., object]]:
    return {name: getattr(transfer, name) for name in operations_of(TransferOperations)}


def test_every_rank_moves_its_own_heads() -> None:
    with groups(2) as (first, second):
        (transfer, shelf, wire), (far_transfer, far_shelf, far_wire) = make_transfer(first), make_transfer(second)
        with following(second, transfers_of(far_transfer), far_transfer.poll):
            leader = Leader(first, MESSAGES)
            transfers = TransferLeader(transfer, everywhere=leader.everywhere(transfer))
            transfers.expect(ADDRESS, LAYOUT)
            transfers.open(TICKET)
            transfers.push(TICKET, CHUNK, [1, 2])
            assert transfers.busy()
            (arrived,) = transfers.poll_arrived()
            assert isinstance(arrived, Arrived)
            transfers.land(arrived.chunk, [6, 7])
            transfers.cancel("t")
            transfers.push(TICKET, CHUNK, [0, 1])
            assert transfers.poll_arrived()
            transfers.drop(CHUNK)
            assert not transfers.busy()
            leader.close()
        assert shelf.values[6:] == [1, 2]
        assert far_shelf.values[6:] == [101, 102]
        for side in (wire, far_wire):
            assert (side.expected, side.opened, side.cancelled, side.under_way) == ([ADDRESS], ["t"], ["t"], {})


def test_a_chunk_is_told_of_when_every_rank_has_it() -> None:
    """Rank 0 never waits for the others."""
    with groups(2) as made:
        (transfer, shelf, _), (_, far_shelf, far_wire) = sides = [make_transfer(group) for group in made]
        with following(made[1], transfers_of(sides[1][0])):
            leader = Leader(made[0], MESSAGES)
            transfers = TransferLeader(transfer, everywhere=leader.everywhere(transfer))
            transfers.expect(ADDRESS, LAYOUT)
            far_wire.late = True
            transfers.push(TICKET, CHUNK, [1, 2])
            assert not transfers.poll_arrived()
            assert not transfers.poll_arrived()
            far_wire.late = False
            (arrived,) = transfers.poll_arrived()
            assert isinstance(arrived, Arrived)
            transfers.land(CHUNK, [6, 7])
            leader.close()
        assert (shelf.values[6:], far_shelf.values[6:]) == ([1, 2], [101, 102])


def test_partly_arrived_chunks_of_a_lost_lane_are_dropped() -> None:
    with groups(2) as made:
        sides = [make_transfer(group) for group in made]
        with following(made[1], transfers_of(sides[1][0])):
            leader = Leader(made[0], MESSAGES)
            transfers = TransferLeader(sides[0][0], everywhere=leader.everywhere(sides[0][0]))
            transfers.expect(ADDRESS, LAYOUT)
            transfers.push(TICKET, CHUNK, [1, 2])
            sides[0][2].arrived = [LaneLost(peer=SOURCE, reason="cut")]
            assert [type(event) for event in transfers.poll_arrived()] == [LaneLost]
            leader.close()
        assert [wire.under_way for _, _, wire in sides] == [{}, {}]


def test_lost_workers_leave_nothing() -> None:
    """A restarted worker is another peer each time."""
    wire: Any = Wire()
    transfer = RankTransfer(Shelf(0), LAYOUT, receiver=wire)
    for life in range(1, 20):
        transfer.expect(replace(ADDRESS, incarnation=life), LAYOUT)
        transfer.drop_source(f"d0#{life}", ())
    assert len(transfer._sources) == 1
