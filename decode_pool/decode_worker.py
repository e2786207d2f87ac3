"""A decode worker: the engine with the role that takes sequences over, and its ends of the lanes."""

from __future__ import annotations

from decode_pool.decode_config import DecodeConfig
from decode_pool.decode_role import DecodeRole
from protos.values import WorkerRole
from workers.build_rank import LoadedRank
from workers.kv.block_pool import BlockPool
from workers.models.filling import Progress
from workers.rpc.assembly import assemble
from workers.rpc.worker import WorkerParts
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import RankId, WorkerConfig


def open_worker(
    config: WorkerConfig,
    rank_id: RankId,
    pool: DecodeConfig | None = None,
    *,
    kind: WorkerRole = WorkerRole.DECODE,
    on_progress: Progress | None = None,
) -> WorkerParts:
    """Rank 0. A COLOCATED worker differs in its name alone: no prefill worker computes prompts for it. Raises as
    `workers.build_rank.open_rank` does."""

    def make_role(rank: LoadedRank, transfers: TransferLeader, blocks: BlockPool) -> DecodeRole:
        return DecodeRole(transfers, blocks, rank.layout, pool, prefix_key=rank.model.prefix_key)

    return assemble(config, rank_id, kind=kind, make_role=make_role, on_progress=on_progress)
