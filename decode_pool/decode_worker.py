"""A decode worker: the engine with the role that takes sequences over, and its ends of the lanes."""

from __future__ import annotations

from decode_pool.decode_role import DecodeRole
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
    kind: WorkerRole = WorkerRole.DECODE,
    on_progress: Progress | None = None,
) -> WorkerParts:
    """Rank 0. A COLOCATED worker differs in its name alone: no prefill worker computes prompts for it. Raises as
    `workers.build_rank.open_rank` does."""
    return assemble(config, rank_id, kind=kind, role=DecodeRole, transfers=transfers, on_progress=on_progress)
