"""A prefill worker: the engine with the prefill role, and its endpoints of the lanes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from prefill_pool.config import PrefillConfig
from prefill_pool.role import PrefillRole
from protos.values import WorkerRole
from workers.build import LoadedRank
from workers.config import RankId, WorkerConfig
from workers.kv.blocks import BlockPool
from workers.models.loader import Progress
from workers.rpc import assembly
from workers.rpc.worker import WorkerParts
from workers.transfer.receive import reservations
from workers.transfer.transfer_leader import TransferLeader


def open_worker(
    config: WorkerConfig, rank_id: RankId, pool: PrefillConfig | None = None, *, on_progress: Progress | None = None
) -> WorkerParts:
    """Rank 0. Raises as `workers.build.open_rank` does."""
    parts, role = assembly.assemble(
        config,
        rank_id,
        kind=WorkerRole.PREFILL,
        make_endpoints=partial(assembly.lane_endpoints, config.lanes),
        make_role=partial(_role, pool or PrefillConfig()),
        on_progress=on_progress,
    )
    return replace(parts, reserve=reservations(role.incoming, parts.engine), tickets=role.tickets)


def follow(config: WorkerConfig, rank_id: RankId) -> None:
    """Ranks above 0: until rank 0 stops, or WorkerLost."""
    assembly.follow(config, rank_id, make_endpoints=partial(assembly.lane_endpoints, config.lanes))


def _role(settings: PrefillConfig, rank: LoadedRank, transfers: TransferLeader, pool: BlockPool) -> PrefillRole:
    return PrefillRole(transfers, pool, rank.layout, settings, prefix_key=rank.model.prefix_key)
