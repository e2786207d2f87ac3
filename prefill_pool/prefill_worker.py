"""A prefill worker: the engine with the prefill role, and its endpoints of the lanes."""

from __future__ import annotations

from prefill_pool.prefill_role import PrefillRole
from protos.values import WorkerRole
from workers.models.filling import Progress
from workers.rpc.assembly import assemble
from workers.rpc.worker import WorkerParts
from workers.worker_config import RankId, TransferConfig, WorkerConfig


def open_worker(
    config: WorkerConfig,
    rank_id: RankId,
    transfers: TransferConfig | None = None,
    *,
    on_progress: Progress | None = None,
) -> WorkerParts:
    """Opens rank 0. Raises as `workers.build_rank.open_rank` does."""
    return assemble(
        config, rank_id, kind=WorkerRole.PREFILL, role=PrefillRole, transfers=transfers, on_progress=on_progress
    )
