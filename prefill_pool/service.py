"""A prefill worker: the engine with the role that pushes KV, and the sending ends of its lanes."""

from __future__ import annotations

from functools import partial

from kvtransfer.transports.collective import CollectiveTransport
from prefill_pool.config import PrefillConfig
from prefill_pool.role import PrefillRole
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
    config: WorkerConfig, seat: Seat, pool: PrefillConfig | None = None, *, on_progress: Progress | None = None
) -> Parts:
    """Rank 0. Raises as `workers.engine.build.open_rank` does."""
    parts, _ = assembly.assemble(
        config,
        seat,
        kind=WorkerRole.PREFILL,
        make_ends=_ends,
        make_role=partial(_role, seat, pool or PrefillConfig()),
        on_progress=on_progress,
    )
    return parts


def follow(config: WorkerConfig, seat: Seat) -> None:
    """Ranks above 0: until rank 0 stops, or WorkerLost."""
    assembly.follow(config, seat, make_ends=_ends)


def _ends(rank: Rank, seat: Seat, bell: Bell) -> Ends:
    transport = CollectiveTransport(rank=seat.rank, device=rank.device)
    return Ends(sender=transport.sender(assembly.lane_address(seat), rank.layout, wake=bell.ring))


def _role(seat: Seat, settings: PrefillConfig, rank: Rank, mover: Mover, pool: BlockPool) -> PrefillRole:
    return PrefillRole(mover, seat.worker_id, rank.layout, settings)
