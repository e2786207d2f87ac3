"""A decode worker: the engine with the role that receives KV, and the receiving ends of its lanes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from decode_pool.config import DecodeConfig
from decode_pool.role import DecodeRole, reservations
from kvtransfer.transports.collective import CollectiveTransport
from protos.values import WorkerRole
from workers.config import Seat, WorkerConfig
from workers.engine.build import Rank
from workers.kv.blocks import BlockPool
from workers.kv.mover import Mover
from workers.models.loader import Progress
from workers.rpc import assembly
from workers.rpc.assembly import Ends
from workers.rpc.worker import Bell, Parts


def open_worker(
    config: WorkerConfig, seat: Seat, pool: DecodeConfig | None = None, *, on_progress: Progress | None = None
) -> Parts:
    """Rank 0. Raises as `workers.engine.build.open_rank` does."""
    parts, role = assembly.assemble(
        config,
        seat,
        kind=WorkerRole.DECODE,
        make_ends=_ends,
        make_role=partial(_role, pool or DecodeConfig()),
        on_progress=on_progress,
    )
    return replace(parts, reserve=reservations(role, parts.engine), tickets=role.tickets)


def follow(config: WorkerConfig, seat: Seat) -> None:
    """Ranks above 0: until rank 0 stops, or WorkerLost."""
    assembly.follow(config, seat, make_ends=_ends)


def _ends(rank: Rank, seat: Seat, bell: Bell) -> Ends:
    """Rank 0 opens the meeting place of the lanes and tells the others where it is."""
    transport = CollectiveTransport(rank=seat.rank, device=rank.device)
    if seat.rank == 0:
        receiver = transport.receiver(assembly.lane_address(seat), rank.layout, wake=bell.ring)
        rank.group.broadcast(receiver.address)
    else:
        met = rank.group.broadcast(assembly.lane_address(seat))
        receiver = transport.receiver(met, rank.layout, wake=bell.ring)
    return Ends(receiver=receiver)


def _role(settings: DecodeConfig, rank: Rank, mover: Mover, pool: BlockPool) -> DecodeRole:
    return DecodeRole(mover, pool, rank.layout, settings, prefix_key=rank.model.prefix_key)
