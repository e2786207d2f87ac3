"""Assembles a worker, in the same way for each pool. A pool adds its role and its endpoints of the lanes.

assemble   rank 0: connect to the other ranks, read the model, make role and engine ──▶ WorkerParts, for a Worker
follow     the others: connect, read, then do what rank 0 sends until it stops or is lost
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
from workers.build import LoadedRank, build_engine, device_of, follow_rank0, make_transfer, open_rank
from workers.config import RankId, WorkerConfig
from workers.kv.blocks import BlockPool
from workers.models.loader import Progress
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader, find_store, join_group, open_store, share_address
from workers.rpc.worker import WakeUp, WorkerParts
from workers.scheduling.role import Role
from workers.transfer.transfer_leader import TransferLeader

RoleT = TypeVar("RoleT", bound=Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEndpoints:
    """One rank's ends of its worker's lanes; a worker that moves no KV has neither."""

    sender: Sender[Any] | None = None
    receiver: Receiver[Any] | None = None


MakeEndpoints = Callable[[LoadedRank, RankId, WakeUp], LaneEndpoints]
"""Called on every rank at the same time. Lanes notify the worker when there is something to poll."""


def assemble(
    config: WorkerConfig,
    rank_id: RankId,
    *,
    kind: WorkerRole,
    make_endpoints: MakeEndpoints,
    make_role: Callable[[LoadedRank, TransferLeader, BlockPool], RoleT],
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[WorkerParts, RoleT]:
    """Rank 0 of a worker, and its role. Blocks while the weights are read. Raises as `open_rank` does."""
    assert rank_id.rank == 0, f"rank {rank_id.rank} must call follow()"
    fastest()  # compiled now, if need be, rather than during the first request
    store = open_store(rank_id.store_host, rank_id.store_port, key=rank_id.store_key) if rank_id.size > 1 else None
    group = _meet(config, rank_id, store)
    rank = open_rank(config, group, on_progress=on_progress)
    wake_up = WakeUp()
    endpoints = make_endpoints(rank, rank_id, wake_up)
    leader = Leader(group)
    transfer = make_transfer(rank, sender=endpoints.sender, receiver=endpoints.receiver)
    transfers = TransferLeader(transfer, config.lanes, everywhere=leader.everywhere(transfer))
    roles: list[RoleT] = []

    def role_for(pool: BlockPool) -> RoleT:
        roles.append(make_role(rank, transfers, pool))
        return roles[0]

    engine = build_engine(rank, leader, role_for, incarnation=rank_id.incarnation, clock=clock)
    transfers.record(engine.timeline)

    def close() -> None:
        transfers.close()
        leader.close()

    info = _info(rank, rank_id, kind, endpoints)
    return WorkerParts(info=info, engine=engine, close=close, lanes=transfers.lanes, wake_up=wake_up), roles[0]


def follow(config: WorkerConfig, rank_id: RankId, *, make_endpoints: MakeEndpoints) -> None:
    """Ranks above 0. Returns when rank 0 stops; raises WorkerLost when a rank is gone."""
    group = _meet(config, rank_id, find_store(rank_id.store_host, rank_id.store_port, key=rank_id.store_key))
    rank = open_rank(config, group)
    endpoints = make_endpoints(rank, rank_id, WakeUp())
    follow_rank0(rank, make_transfer(rank, sender=endpoints.sender, receiver=endpoints.receiver))


def lane_endpoints(config: LaneConfig, rank: LoadedRank, rank_id: RankId, wake_up: WakeUp) -> LaneEndpoints:
    """Of a worker that pushes and is pushed to. Rank 0 opens the meeting place of the lanes and tells the others where
    it is."""
    lanes = transport(config.transport)(rank=rank_id.rank, device=rank.device, config=config)
    if rank_id.rank == 0:
        receiver = lanes.receiver(lane_address(rank_id), rank.layout, wake=wake_up.notify)
        share_address(rank.group, receiver.address)
    else:
        met = share_address(rank.group, lane_address(rank_id))
        receiver = lanes.receiver(met, rank.layout, wake=wake_up.notify)
    return LaneEndpoints(
        sender=lanes.sender(lane_address(rank_id), rank.layout, wake=wake_up.notify), receiver=receiver
    )


def _meet(config: WorkerConfig, rank_id: RankId, store: RendezvousStore | None) -> TensorParallel:
    assert rank_id.size == 1 or rank_id.store_key, "the launcher gives all ranks of a worker one store_key"
    return join_group(
        store,
        rank=rank_id.rank,
        size=rank_id.size,
        name=f"{rank_id.worker_id}#{rank_id.incarnation}",
        device=device_of(config),
        timeout_s=config.collective_timeout_s,
    )


def lane_address(rank_id: RankId) -> LaneAddress:
    """This worker on its lanes, before rank 0 has opened their rendezvous."""
    return LaneAddress(worker_id=rank_id.worker_id, incarnation=rank_id.incarnation, host=rank_id.host, port=0)


def _info(rank: LoadedRank, rank_id: RankId, kind: WorkerRole, endpoints: LaneEndpoints) -> WorkerInfo:
    end = endpoints.receiver or endpoints.sender
    return WorkerInfo(
        worker_id=rank_id.worker_id,
        incarnation=rank_id.incarnation,
        role=kind,
        model=rank.name,
        address="",
        layout=rank.layout,
        lane=end.address if end is not None else lane_address(rank_id),
        max_model_len=rank.scheduler.max_model_len,
        vocab_size=rank.scheduler.vocab_size,
        device=rank.device,
        num_blocks=rank.storage.num_blocks,
        reads_further=True,
        process_id=os.getpid(),
    )
