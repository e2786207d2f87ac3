"""Assembles a worker, in the same way for each pool. A pool adds its role.

assemble   rank 0: connect to the other ranks, read the model, make role and engine ──▶ WorkerParts, for a Worker
follow the others: connect, read, then repeat rank 0's operations until it stops or is lost
"""

from __future__ import annotations

import os
import time

import torch

from kvtransfer.hashing import compiled
from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transports.collective.collective import CollectiveTransport
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousStore
from protos.model_files.digests import read_digests
from protos.model_files.opening import open_model
from protos.values import LaneAddress, WorkerInfo, WorkerRole
from workers.adapters.names import parse_adapters
from workers.build_rank import LoadedRank, build_engine, device_of, follow_rank0, make_transfer, open_rank
from workers.engine.served_adapters import ServedAdapters
from workers.kv.block_pool import BlockPool
from workers.models.filling import Progress
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader, find_store, join_group, open_store, share_address
from workers.rpc.worker import WakeUp, WorkerParts
from workers.speculation.registry import OFF
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.receive import reservations
from workers.transfer.transfer_leader import TransferLeader
from workers.transfer.transfer_role import TransferRole
from workers.worker_config import RankId, TransferConfig, WorkerConfig


def assemble(
    config: WorkerConfig,
    rank_id: RankId,
    *,
    kind: WorkerRole,
    role: type[TransferRole],
    transfers: TransferConfig | None = None,
    on_progress: Progress | None = None,
) -> WorkerParts:
    """Assembles rank 0 of a worker. Blocks while the weights are read. Raises as `open_rank` does."""
    assert rank_id.rank == 0, f"rank {rank_id.rank} must call follow()"
    compiled()  # compiled now if necessary, not during the first request
    store = open_store(rank_id.store_host, rank_id.store_port, key=rank_id.store_key) if rank_id.size > 1 else None
    group = _meet(config, rank_id, store)
    rank = open_rank(config, group, on_progress=on_progress)
    wake_up = WakeUp()
    transfer = _open_lanes(config.lanes, rank, rank_id, wake_up)
    leader = Leader(group)
    lanes = TransferLeader(transfer, config.lanes, everywhere=leader.everywhere(transfer))

    def role_for(pool: BlockPool) -> TransferRole:
        return role(lanes, pool, rank.layout, transfers, prefix_key=rank.model.prefix_key)

    engine = build_engine(rank, leader, role_for, incarnation=rank_id.incarnation, clock=time.monotonic)
    if engine.adapters is not None:
        for name, path in parse_adapters(config.adapters).items():
            engine.adapters.load(name, engine.adapters.check(name, path))
    lanes.record(engine.timeline)
    assert isinstance(engine.role, TransferRole)

    def close() -> None:
        lanes.close()
        leader.close()

    return WorkerParts(
        info=_info(config, rank, rank_id, kind, lanes.address, engine.adapters),
        engine=engine,
        close=close,
        reserve=reservations(engine.role.incoming, engine),
        tickets=engine.role.tickets,
        lanes=lanes.lanes,
        wake_up=wake_up,
    )


def follow(config: WorkerConfig, rank_id: RankId) -> None:
    """Runs a rank above 0, with the settings of rank 0. Returns when rank 0 stops; raises
    WorkerLost if a rank has ended."""
    group = _meet(config, rank_id, find_store(rank_id.store_host, rank_id.store_port, key=rank_id.store_key))
    rank = open_rank(config, group)
    follow_rank0(rank, _open_lanes(config.lanes, rank, rank_id, WakeUp()))


def _open_lanes(config: LaneConfig, rank: LoadedRank, rank_id: RankId, wake_up: WakeUp) -> RankTransfer[torch.Tensor]:
    """Opens one rank's ends of its worker's lanes, which wake the worker when there is something to poll. Every rank
    calls it at the same time: rank 0 opens the rendezvous server and sends its address to the others."""
    lanes = CollectiveTransport(rank=rank_id.rank, device=rank.device, host=rank_id.host, config=config)
    address = LaneAddress(worker_id=rank_id.worker_id, incarnation=rank_id.incarnation, host=rank_id.host, port=0)
    if rank_id.rank == 0:
        receiver = lanes.receiver(address, rank.layout, wake=wake_up.notify)
        share_address(rank.group, receiver.address)
    else:
        receiver = lanes.receiver(share_address(rank.group, address), rank.layout, wake=wake_up.notify)
    sender = lanes.sender(address, rank.layout, wake=wake_up.notify)
    return make_transfer(rank, sender=sender, receiver=receiver)


def _meet(config: WorkerConfig, rank_id: RankId, store: RendezvousStore | None) -> TensorParallel:
    assert rank_id.size == 1 or rank_id.store_key, "the launcher gives all ranks of a worker one store_key"
    return join_group(
        store,
        rank=rank_id.rank,
        size=rank_id.size,
        name=f"{rank_id.worker_id}#{rank_id.incarnation}",
        device=device_of(config),
        timeout_s=config.collective_timeout_s,
        host=rank_id.group_host,
    )


def _info(
    config: WorkerConfig,
    rank: LoadedRank,
    rank_id: RankId,
    kind: WorkerRole,
    lane: LaneAddress,
    adapters: ServedAdapters | None,
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=rank_id.worker_id,
        incarnation=rank_id.incarnation,
        role=kind,
        model=rank.name,
        address="",
        layout=rank.layout,
        lane=lane,
        max_model_len=rank.scheduler.max_model_len,
        vocab_size=rank.scheduler.vocab_size,
        device=rank.device,
        num_blocks=rank.storage.num_blocks // len(rank.layout.groups),
        reads_further=True,
        process_id=os.getpid(),
        weights=rank.weights,
        adapters=adapters.served.adapters if adapters is not None else (),
        revision=config.revision,
        model_path=config.model,
        digests=read_digests(open_model(config.model)),
        dtype=rank.dtype,
        model_len=rank.model.max_model_len,
        speculation=config.speculate if rank.speculation is not None else OFF,
    )
