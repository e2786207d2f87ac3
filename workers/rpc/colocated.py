"""A worker that serves prefill and decode in one process: no KV leaves it."""

from __future__ import annotations

from protos.values import WorkerRole
from workers.config import Seat, WorkerConfig
from workers.engine.build import Rank
from workers.engine.role import Colocated
from workers.kv.blocks import BlockPool
from workers.kv.mover import Mover
from workers.models.loader import Progress
from workers.rpc import assembly
from workers.rpc.assembly import Ends
from workers.rpc.worker import Bell, Parts


def open_worker(config: WorkerConfig, seat: Seat, *, on_progress: Progress | None = None) -> Parts:
    """Rank 0. Raises as `workers.engine.build.open_rank` does."""
    parts, _ = assembly.assemble(
        config, seat, kind=WorkerRole.COLOCATED, make_ends=_no_ends, make_role=_role, on_progress=on_progress
    )
    return parts


def follow(config: WorkerConfig, seat: Seat) -> None:
    """Ranks above 0: until rank 0 stops, or WorkerLost."""
    assembly.follow(config, seat, make_ends=_no_ends)


def _no_ends(rank: Rank, seat: Seat, bell: Bell) -> Ends:
    return Ends()


def _role(rank: Rank, mover: Mover, pool: BlockPool) -> Colocated:
    return Colocated()
