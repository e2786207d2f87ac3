"""From a seat to a worker: what every pool does alike. A pool adds its role and its ends of the lanes.

open_worker   rank 0: meet the other ranks, read the model, make engine and role ──▶ Parts, for a Worker
follow        the others: meet, read, then do what rank 0 says until it stops or is lost
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from kvtransfer.transport import Receiver, Sender
from protos.values import LaneAddress, TicketStats, WorkerInfo, WorkerRole
from workers.config import Seat, WorkerConfig
from workers.engine.build import Rank, build_engine, device_of, follow_rank0, make_dock, open_rank
from workers.engine.role import Role
from workers.kv.blocks import BlockPool
from workers.kv.mover import Mover
from workers.models.loader import Progress
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader, find_store, meet, open_store
from workers.rpc.server import Reserve
from workers.rpc.worker import Parts, no_tickets


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """One rank's ends of its worker's lanes; a worker that moves no KV has neither."""

    sender: Sender[Any] | None = None
    receiver: Receiver[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A role and what it answers to the outside."""

    role: Role
    reserve: Reserve | None = None
    tickets: Callable[[float], Sequence[TicketStats]] = no_tickets
    num_tickets: Callable[[], int] = field(default=int)


MakeEnds = Callable[[Rank, Seat], Ends]
MakePost = Callable[[Rank, Mover, BlockPool], Post]


def open_worker(
    config: WorkerConfig,
    seat: Seat,
    *,
    kind: WorkerRole,
    make_ends: MakeEnds,
    make_post: MakePost,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Parts:
    """Rank 0 of a worker. Blocks while the weights are read. Raises as `open_rank` does."""
    assert seat.rank == 0, f"rank {seat.rank} follows"
    store = open_store(seat.store_host, seat.store_port) if seat.size > 1 else None
    group = _meet(config, seat, store)
    rank = open_rank(config, group, on_progress=on_progress)
    leader = Leader(group)
    ends = make_ends(rank, seat)
    dock = make_dock(rank, sender=ends.sender, receiver=ends.receiver)
    mover = Mover(dock, leader.tell)
    posts: list[Post] = []

    def make_role(pool: BlockPool) -> Role:
        posts.append(make_post(rank, mover, pool))
        return posts[0].role

    engine = build_engine(rank, leader, make_role, incarnation=seat.incarnation, clock=clock)
    (post,) = posts

    def close() -> None:
        mover.close()
        leader.close()

    return Parts(
        info=_info(rank, seat, kind, ends),
        engine=engine,
        close=close,
        reserve=post.reserve,
        tickets=post.tickets,
        num_tickets=post.num_tickets,
        lanes=mover.lanes,
    )


def follow(config: WorkerConfig, seat: Seat, *, make_ends: MakeEnds) -> None:
    """Ranks above 0. Returns when rank 0 stops; raises WorkerLost when a rank is gone."""
    group = _meet(config, seat, find_store(seat.store_host, seat.store_port))
    rank = open_rank(config, group)
    ends = make_ends(rank, seat)
    follow_rank0(rank, make_dock(rank, sender=ends.sender, receiver=ends.receiver))


def _meet(config: WorkerConfig, seat: Seat, store: Store | None) -> TensorParallel:
    return meet(
        store,
        rank=seat.rank,
        size=seat.size,
        name=f"{seat.worker_id}#{seat.incarnation}",
        device=device_of(config),
        timeout_s=config.collective_timeout_s,
    )


def _info(rank: Rank, seat: Seat, kind: WorkerRole, ends: Ends) -> WorkerInfo:
    """`lane` is where this worker's KV is sent from or met; without lanes it only names the worker."""
    end = ends.receiver or ends.sender
    unmet = LaneAddress(worker_id=seat.worker_id, incarnation=seat.incarnation, host=seat.host, port=0)
    return WorkerInfo(
        worker_id=seat.worker_id,
        incarnation=seat.incarnation,
        role=kind,
        model=rank.name,
        address="",
        layout=rank.layout,
        lane=end.address if end is not None else unmet,
        max_model_len=rank.scheduler.max_model_len,
        vocab_size=rank.scheduler.vocab_size,
        device=rank.device,
        num_blocks=rank.storage.num_blocks,
    )
