"""A prefill worker: the engine with the role that reads prompts for others, and its ends of the lanes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from prefill_pool.config import PrefillConfig
from prefill_pool.role import PrefillRole
from protos.values import WorkerRole
from workers.build import Rank
from workers.config import Seat, WorkerConfig
from workers.kv.blocks import BlockPool
from workers.models.loader import Progress
from workers.rpc import assembly
from workers.rpc.worker import Parts
from workers.transfer.receive import reservations
from workers.transfer.transfer_leader import TransferLeader


def open_worker(
    config: WorkerConfig, seat: Seat, pool: PrefillConfig | None = None, *, on_progress: Progress | None = None
) -> Parts:
    """Rank 0. Raises as `workers.build.open_rank` does."""
    parts, role = assembly.assemble(
        config,
        seat,
        kind=WorkerRole.PREFILL,
        make_ends=partial(assembly.lane_ends, config.lanes),
        make_role=partial(_role, pool or PrefillConfig()),
        on_progress=on_progress,
    )
    return replace(parts, reserve=reservations(role.incoming, parts.engine), tickets=role.tickets)


def follow(config: WorkerConfig, seat: Seat) -> None:
    """Ranks above 0: until rank 0 stops, or WorkerLost."""
    assembly.follow(config, seat, make_ends=partial(assembly.lane_ends, config.lanes))


def _role(settings: PrefillConfig, rank: Rank, transfers: TransferLeader, pool: BlockPool) -> PrefillRole:
    return PrefillRole(transfers, pool, rank.layout, settings, prefix_key=rank.model.prefix_key)
