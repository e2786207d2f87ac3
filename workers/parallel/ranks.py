"""How rank 0 leads the ranks of one worker: every operation it is about to do, it first tells the others to do too.

    rank 0    Leader.tell("launch", batch) ── broadcast ──▶ rank 1, 2 ...   follow: operations["launch"](batch)
              runner.launch(batch) ◀═══════ collectives of the layers ═══════▶ runner.launch(batch)

So all ranks do the same operations in the same order. A rank that fails leaves the group, and whoever is in a
collective, or comes into one, gets WorkerLost: at once when a process died, after the group's timeout when it hangs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from torch.distributed import DistError

from kvtransfer.transport import Chunk
from kvtransfer.transports.rendezvous.board_key import WrongKey
from kvtransfer.transports.rendezvous.store import Board, BoardStore
from protos.codec import Messages
from protos.errors import BatonError, UnreadableMessage, WorkerLost
from protos.values import KVLayout, LaneAddress, SamplingParams, Ticket
from workers.batch import Batch, PendingStep, Pipeline, Row, Sample
from workers.parallel.group import RankGroup, Solo, TensorParallel

log = logging.getLogger("baton.worker")

_STOP = "stop"
_KNOCK_S = 0.02

BlockIds = tuple[int, ...]
OPERATIONS = Messages(
    {
        _STOP: tuple[()],
        "meet": tuple[LaneAddress],
        "launch": tuple[Batch],
        "open": tuple[Ticket],
        "push": tuple[Ticket, Chunk, BlockIds, int | None],
        "arm": tuple[Ticket, Chunk, BlockIds],
        "look": tuple[tuple[Chunk, ...]],
        "land": tuple[Chunk, BlockIds, str],
        "drop": tuple[Chunk, str],
        "forget": tuple[str, tuple[Chunk, ...]],
        "expect": tuple[LaneAddress, KVLayout],
        "cancel": tuple[str],
        "part_to": tuple[str],
        "part_from": tuple[str],
        "stow": tuple[BlockIds, BlockIds],
        "load": tuple[int, BlockIds, BlockIds],
        "settle": tuple[int],
    }
)
"""All that rank 0 can have the other ranks do, with the types of the arguments. Nothing else is read."""

_SAMPLED_ELSEWHERE = Sample(params=SamplingParams(), index=0)


class Leader:
    """Rank 0's voice. With one rank there is nobody to tell, and everything below costs nothing."""

    def __init__(self, group: TensorParallel, operations: Messages = OPERATIONS) -> None:
        assert group.rank == 0, f"rank {group.rank} cannot lead"
        self._group = group
        self._encode = operations.encode
        self.alone = group.size == 1

    def tell(self, name: str, *arguments: object) -> None:
        """Has every follower call its operation `name` with these values, in the order told. Raises WorkerLost."""
        if not self.alone:
            self._group.broadcast(self._encode(name, arguments))

    def close(self) -> None:
        """Lets the followers end, and ends the group, whether or not they are still there."""
        try:
            self.tell(_STOP)
        except WorkerLost as error:
            log.info("not all followers could be told to stop: %s", error)
        finally:
            self._group.close()


class LeadingRunner:
    """The runner of a whole worker: rank 0's own, with the other ranks in step."""

    def __init__(self, leader: Leader, runner: Pipeline) -> None:
        self._leader = leader
        self._runner = runner

    def launch(self, batch: Batch) -> PendingStep:
        if not self._leader.alone:
            self._leader.tell("launch", for_followers(batch))
        return self._runner.launch(batch)


def for_followers(batch: Batch) -> Batch:
    """The batch without what only sampling needs: which rows sample is still told, for the logits are gathered."""
    return Batch(rows=tuple(_unsampled(row) for row in batch.rows))


def _unsampled(row: Row) -> Row:
    return row if row.sample is None else replace(row, sample=_SAMPLED_ELSEWHERE)


def follow(
    group: TensorParallel,
    operations: Mapping[str, Callable[..., object]],
    *,
    settle: Callable[[], None],
    messages: Messages = OPERATIONS,
) -> None:
    """Does what rank 0 tells until it says stop; `settle` runs after each operation.

    An operation that refuses with a typed error does so on rank 0 as well, which tells whoever asked: all go on.
    Raises WorkerLost when rank 0 or another rank is gone, UnreadableMessage for bytes that are none of `messages`, and
    whatever else an operation raises. In each case the group is closed first, so that no rank waits for this one.
    """
    assert group.rank > 0, "rank 0 leads"
    try:
        while True:
            name, arguments = messages.decode(group.broadcast())
            if name == _STOP:
                return
            try:
                operations[name](*arguments)
            except WorkerLost:
                raise
            except BatonError as error:
                log.info("rank %d refused %s: %s", group.rank, name, error)
            settle()
    except UnreadableMessage as error:
        log.error("rank %d leaves its group: %s", group.rank, error)
        raise
    finally:
        group.close()


def share_address(group: TensorParallel, address: LaneAddress) -> LaneAddress:
    """Rank 0's address, on every rank. Raises as `follow` does."""
    name, arguments = OPERATIONS.decode(group.broadcast(OPERATIONS.encode("meet", (address,))))
    if name != "meet":
        raise UnreadableMessage(f"rank {group.rank} got {name!r} before it knew where its lanes meet")
    met: LaneAddress = arguments[0]
    return met


class HostedStore(BoardStore):
    """Rank 0's meeting place, with the board it lies on. Not torch's TCPStore: that one asks DNS for the name of each
    rank that comes, and one lost packet holds the start up for five seconds."""

    def __init__(self, host: str, port: int, *, key: bytes, timeout_s: float) -> None:
        board = Board(host, port, key=key)
        super().__init__(host, board.port, "", key=board.key, wait_s=timeout_s)
        self.port = board.port
        self.key = board.key
        self._board = board

    def close(self) -> None:
        super().close()
        self._board.close()


def open_store(host: str, port: int = 0, *, key: bytes = b"", timeout_s: float = 60.0) -> HostedStore:
    """Rank 0's meeting place. `store.port` is the port it listens on when `port` is 0, `store.key` what the other ranks
    need when no `key` is given."""
    return HostedStore(host, port, key=key, timeout_s=timeout_s)


def find_store(host: str, port: int, *, key: bytes, timeout_s: float = 60.0) -> BoardStore:
    """The store that rank 0 opens, or has opened, at this address. Raises WorkerLost when none is opened there, or one
    with another key."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return BoardStore(host, port, "", key=key, wait_s=timeout_s)
        except WrongKey as error:
            raise WorkerLost(f"{host}:{port} is not where the ranks of this worker meet: {error}") from error
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise WorkerLost(f"no rank 0 at {host}:{port} after {timeout_s:g} s: {error}") from error
        time.sleep(_KNOCK_S)


def meet(store: BoardStore | None, *, rank: int, size: int, name: str, device: str, timeout_s: float) -> TensorParallel:
    """The group of a worker's ranks, once all have come. `store` is not needed, nor used, when there is one rank.

    `name` tells this group from others over the same store: give every incarnation of a worker its own. `timeout_s`
    bounds the wait here and every later collective. The group closes the store with itself. Raises WorkerLost when a
    rank does not come.
    """
    if size == 1:
        return Solo()
    assert store is not None, "several ranks need a store to meet over"
    try:
        return RankGroup(
            store, rank=rank, size=size, name=name, device=device, timeout_s=timeout_s, closing=store.close
        )
    except (DistError, RuntimeError, OSError) as error:
        store.close()
        raise WorkerLost(f"rank {rank}: not all {size} ranks of {name} came within {timeout_s:g} s: {error}") from error
