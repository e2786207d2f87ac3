"""From a seat to a worker: what every pool does alike. A pool adds its role and its ends of the lanes.

assemble   rank 0: meet the other ranks, read the model, make role and engine ──▶ Parts, for a Worker
follow     the others: meet, read, then do what rank 0 says until it stops or is lost
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtransfer.config import LaneConfig
from kvtransfer.hashing import fastest
from kvtransfer.registry import transport
from kvtransfer.transport import Receiver, Sender
from kvtransfer.transports.rendezvous.store import RendezvousStore
from protos.values import LaneAddress, WorkerInfo, WorkerRole
from workers.build import Rank, build_engine, device_of, follow_rank0, make_transfer, open_rank
from workers.config import Seat, WorkerConfig
from workers.kv.blocks import BlockPool
from workers.models.loader import Progress
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader, find_store, meet, open_store, share_address
from workers.rpc.worker import Bell, Parts
from workers.scheduling.role import Role
from workers.transfer.transfer_leader import TransferLeader

RoleT = TypeVar("RoleT", bound=Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """One rank's ends of its worker's lanes; a worker that moves no KV has neither."""

    sender: Sender[Any] | None = None
    receiver: Receiver[Any] | None = None


MakeEnds = Callable[[Rank, Seat, Bell], Ends]
"""Called on every rank at the same time. Lanes ring the bell when there is something to poll."""


def assemble(
    config: WorkerConfig,
    seat: Seat,
    *,
    kind: WorkerRole,
    make_ends: MakeEnds,
    make_role: Callable[[Rank, TransferLeader, BlockPool], RoleT],
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Parts, RoleT]:
    """Rank 0 of a worker, and its role. Blocks while the weights are read. Raises as `open_rank` does."""
    assert seat.rank == 0, f"rank {seat.rank} follows"
    fastest()  # compiled now, if it must be, and not under the first request
    store = open_store(seat.store_host, seat.store_port, key=seat.store_key) if seat.size > 1 else None
    group = _meet(config, seat, store)
    rank = open_rank(config, group, on_progress=on_progress)
    bell = Bell()
    ends = make_ends(rank, seat, bell)
    leader = Leader(group)
    transfer = make_transfer(rank, sender=ends.sender, receiver=ends.receiver)
    transfers = TransferLeader(transfer, config.lanes, everywhere=leader.everywhere(transfer))
    roles: list[RoleT] = []

    def role_for(pool: BlockPool) -> RoleT:
        roles.append(make_role(rank, transfers, pool))
        return roles[0]

    engine = build_engine(rank, leader, role_for, incarnation=seat.incarnation, clock=clock)
    transfers.record(engine.timeline)

    def close() -> None:
        transfers.close()
        leader.close()

    info = _info(rank, seat, kind, ends)
    return Parts(info=info, engine=engine, close=close, lanes=transfers.lanes, bell=bell), roles[0]


def follow(config: WorkerConfig, seat: Seat, *, make_ends: MakeEnds) -> None:
    """Ranks above 0. Returns when rank 0 stops; raises WorkerLost when a rank is gone."""
    group = _meet(config, seat, find_store(seat.store_host, seat.store_port, key=seat.store_key))
    rank = open_rank(config, group)
    ends = make_ends(rank, seat, Bell())
    follow_rank0(rank, make_transfer(rank, sender=ends.sender, receiver=ends.receiver))


def lane_ends(config: LaneConfig, rank: Rank, seat: Seat, bell: Bell) -> Ends:
    """Of a worker that pushes and is pushed to. Rank 0 opens the meeting place of the lanes and tells the others where
    it is."""
    lanes = transport(config.transport)(rank=seat.rank, device=rank.device, config=config)
    if seat.rank == 0:
        receiver = lanes.receiver(lane_address(seat), rank.layout, wake=bell.ring)
        share_address(rank.group, receiver.address)
    else:
        met = share_address(rank.group, lane_address(seat))
        receiver = lanes.receiver(met, rank.layout, wake=bell.ring)
    return Ends(sender=lanes.sender(lane_address(seat), rank.layout, wake=bell.ring), receiver=receiver)


def _meet(config: WorkerConfig, seat: Seat, store: RendezvousStore | None) -> TensorParallel:
    assert seat.size == 1 or seat.store_key, "the launcher gives all ranks of a worker one store_key"
    return meet(
        store,
        rank=seat.rank,
        size=seat.size,
        name=f"{seat.worker_id}#{seat.incarnation}",
        device=device_of(config),
        timeout_s=config.collective_timeout_s,
    )


def lane_address(seat: Seat) -> LaneAddress:
    """What this worker is called on its lanes; nobody is met there yet."""
    return LaneAddress(worker_id=seat.worker_id, incarnation=seat.incarnation, host=seat.host, port=0)


def _info(rank: Rank, seat: Seat, kind: WorkerRole, ends: Ends) -> WorkerInfo:
    end = ends.receiver or ends.sender
    return WorkerInfo(
        worker_id=seat.worker_id,
        incarnation=seat.incarnation,
        role=kind,
        model=rank.name,
        address="",
        layout=rank.layout,
        lane=end.address if end is not None else lane_address(seat),
        max_model_len=rank.scheduler.max_model_len,
        vocab_size=rank.scheduler.vocab_size,
        device=rank.device,
        num_blocks=rank.storage.num_blocks,
        reads_further=True,
        process_id=os.getpid(),
    )
