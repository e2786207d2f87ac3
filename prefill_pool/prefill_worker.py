"""A prefill worker: the engine with the prefill role, and its endpoints of the lanes."""

from __future__ import annotations

from prefill_pool.prefill_config import PrefillConfig
from prefill_pool.prefill_role import PrefillRole
from protos.values import WorkerRole
from workers.build_rank import LoadedRank
from workers.kv.block_pool import BlockPool
from workers.models.filling import Progress
from workers.rpc.assembly import assemble
from workers.rpc.worker import WorkerParts
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import RankId, WorkerConfig


def open_worker(
    config: WorkerConfig, rank_id: RankId, pool: PrefillConfig | None = None, *, on_progress: Progress | None = None
) -> WorkerParts:
    """Opens rank 0. Raises as `workers.build_rank.open_rank` does."""

    def make_role(rank: LoadedRank, transfers: TransferLeader, blocks: BlockPool) -> PrefillRole:
        return PrefillRole(transfers, blocks, rank.layout, pool, prefix_key=rank.model.prefix_key)

    return assemble(config, rank_id, kind=WorkerRole.PREFILL, make_role=make_role, on_progress=on_progress)
