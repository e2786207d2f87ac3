"""Rank 0 leads the ranks of one worker: the followers repeat each of its operations, in the same order.

    rank 0    followers.launch(batch) ── broadcast ──▶ rank 1, 2 ...   follow: runner.launch(batch)
              runner.launch(batch) ◀════ collectives of the layers ════▶ runner.launch(batch)

A rank that fails leaves the group. A rank in a collective then gets WorkerLost, immediately if the failed process
ended, or after the group's timeout if it hangs. So does a rank that begins a collective later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

from msgspec.structs import replace
from torch.distributed import DistError

from kvtransfer.transports.rendezvous.rendezvous_key import WrongKey
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousServer, RendezvousStore
from protos.codec import Messages
from protos.errors import BatonError, UnreadableMessage, WorkerLost
from protos.listening import netloc
from protos.values import LOOPBACK, LaneAddress, SamplingParams
from workers.batch import Batch, PendingStep, Pipeline, Row, RowLimits, Sample
from workers.parallel.group import RankGroup, Solo, TensorParallel
from workers.parallel.operations import LANE_ADDRESS, MESSAGES, STOP, RankOperations

log = logging.getLogger("baton.worker")

_RETRY_S = 0.02

Part = TypeVar("Part")

_SAMPLED_ELSEWHERE = Sample(params=SamplingParams(), index=0)


class Leader:
    """Rank 0's connection to the other ranks. With a single rank there are no followers and no costs.

    `followers` makes every other rank do an operation, in the order of the calls. It raises WorkerLost.
    """

    def __init__(self, group: TensorParallel, messages: Messages = MESSAGES) -> None:
        assert group.rank == 0, f"rank {group.rank} cannot lead"
        self._group = group
        self._messages = messages
        self.alone = group.size == 1
        self.followers = cast(RankOperations, _Followers(self._send, messages))

    def everywhere(self, part: Part) -> Part:
        """Wraps `part` of rank 0: the followers run each operation before rank 0 does."""
        return part if self.alone else cast(Part, _Everywhere(part, self.followers, self._messages))

    def close(self) -> None:
        """Ends the followers and the group, even if they have already ended."""
        try:
            self._send(STOP)
        except WorkerLost as error:
            log.info("not all followers got the message to stop: %s", error)
        finally:
            self._group.close()

    def _send(self, name: str, *arguments: object) -> None:
        if not self.alone:
            self._group.broadcast(self._messages.encode(name, arguments))


class _Followers:
    """`RankOperations` as messages to the followers."""

    def __init__(self, send: Callable[..., None], messages: Messages) -> None:
        for name in messages.bodies:
            setattr(self, name, partial(send, name))


class _Everywhere:
    """A part of rank 0. Each operation is sent to the followers before it runs here."""

    def __init__(self, part: object, followers: RankOperations, messages: Messages) -> None:
        self._part = part
        for name in messages.bodies:
            if (here := getattr(part, name, None)) is not None:
                setattr(self, name, partial(_do, getattr(followers, name), here))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _do(elsewhere: Callable[..., None], here: Callable[..., Any], *arguments: object) -> Any:
    elsewhere(*arguments)
    return here(*arguments)


class LeadingRunner:
    """The runner of a whole worker: rank 0's own, with the followers repeating its steps."""

    def __init__(self, leader: Leader, runner: Pipeline) -> None:
        self._leader = leader
        self._runner = runner

    @property
    def row_limits(self) -> RowLimits:
        return self._runner.row_limits

    def launch(self, batch: Batch) -> PendingStep:
        if not self._leader.alone:
            self._leader.followers.launch(for_followers(batch))
        return self._runner.launch(batch)


def for_followers(batch: Batch) -> Batch:
    """Returns the batch without the data for sampling, but with the rows that sample: their logits are gathered."""
    return Batch(rows=tuple(_unsampled(row) for row in batch.rows))


def _unsampled(row: Row) -> Row:
    return row if row.sample is None else replace(row, sample=_SAMPLED_ELSEWHERE)


def follow(
    group: TensorParallel,
    parts: Iterable[object],
    *,
    after_each: Callable[[], None],
    messages: Messages = MESSAGES,
) -> None:
    """Calls the methods that rank 0 sends until it sends STOP, and `after_each` after each. A method belongs to one of
    `parts`.

    A typed error of an operation is raised on rank 0 as well, which reports it: all ranks continue. Raises WorkerLost
    if rank 0 or another rank has ended, UnreadableMessage for bytes that are none of `messages`, and any other error of
    an operation. In each case the group is closed first, so that no rank waits for this one.
    """
    assert group.rank > 0, "rank 0 leads"
    operations = {name: getattr(part, name) for part in parts for name in messages.bodies if hasattr(part, name)}
    try:
        while True:
            name, arguments = messages.decode(group.broadcast())
            if name == STOP:
                return
            try:
                operations[name](*arguments)
            except WorkerLost:
                raise
            except BatonError as error:
                log.info("rank %d refused %s: %s", group.rank, name, error)
            after_each()
    except UnreadableMessage as error:
        log.error("rank %d leaves its group: %s", group.rank, error)
        raise
    finally:
        group.close()


def share_address(group: TensorParallel, address: LaneAddress) -> LaneAddress:
    """Rank 0's address, on every rank. Raises as `follow` does."""
    name, arguments = MESSAGES.decode(group.broadcast(MESSAGES.encode(LANE_ADDRESS, (address,))))
    if name != LANE_ADDRESS:
        raise UnreadableMessage(f"rank {group.rank} got {name!r} before the address at which its lanes meet")
    address_of_rank0: LaneAddress = arguments[0]
    return address_of_rank0


class HostedStore(RendezvousStore):
    """Rank 0's store, with its server. Not torch's TCPStore: that one looks up the name of each rank in DNS, and one
    lost packet delays the start by five seconds."""

    def __init__(self, host: str, port: int, *, key: bytes, timeout_s: float) -> None:
        server = RendezvousServer(host, port, key=key)
        super().__init__(host, server.port, "", key=server.key, wait_s=timeout_s)
        self.port = server.port
        self.key = server.key
        self._server = server

    def close(self) -> None:
        super().close()
        self._server.close()


def open_store(host: str, port: int = 0, *, key: bytes = b"", timeout_s: float = 60.0) -> HostedStore:
    """Opens rank 0's store. With `port` 0, `store.port` is the chosen port; without a `key`, `store.key` is the key for
    the other ranks."""
    return HostedStore(host, port, key=key, timeout_s=timeout_s)


def find_store(host: str, port: int, *, key: bytes, timeout_s: float = 60.0) -> RendezvousStore:
    """Connects to the store that rank 0 opens at this address. Raises WorkerLost without a store, or for one with
    another key."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return RendezvousStore(host, port, "", key=key, wait_s=timeout_s)
        except WrongKey as error:
            raise WorkerLost(f"{netloc(host, port)} is not where the ranks of this worker meet: {error}") from error
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise WorkerLost(f"no rank 0 at {netloc(host, port)} after {timeout_s:g} s: {error}") from error
        time.sleep(_RETRY_S)


def join_group(
    store: RendezvousStore | None,
    *,
    rank: int,
    size: int,
    name: str,
    device: str,
    timeout_s: float,
    host: str = LOOPBACK,
) -> TensorParallel:
    """Returns the group of a worker's ranks, once all have joined. With one rank, `store` is not used.

    `name` distinguishes this group from others over the same store: give every incarnation of a worker its own.
    `timeout_s` bounds the wait here and every later collective. gloo listens at `host`. The group closes the store with
    itself. Raises WorkerLost if a rank does not join.
    """
    if size == 1:
        return Solo()
    assert store is not None, "several ranks need a store to meet over"
    try:
        return RankGroup(
            store, rank=rank, size=size, name=name, device=device, timeout_s=timeout_s, host=host, closing=store.close
        )
    except (DistError, RuntimeError, OSError) as error:
        store.close()
        raise WorkerLost(f"rank {rank}: not all {size} ranks of {name} came within {timeout_s:g} s: {error}") from error
