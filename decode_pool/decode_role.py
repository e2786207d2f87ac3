"""The role of a decode worker: takes over sequences with their KV, and migrates them when it must.

    reserve ─▶ ticket ─▶ KV arrives ─▶ admissible: the request adopts its blocks ─▶ decodes ─▶ migrate: elsewhere

A request without a ticket is served whole: short prompts, requests that have lost their pair, and all requests where
there is no other pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from decode_pool.decode_config import DecodeConfig
from protos.values import KVLayout
from workers.batch import Batch
from workers.kv.block_pool import BlockPool
from workers.scheduling.request import Request
from workers.scheduling.role import Disposition
from workers.scheduling.scheduler import no_key
from workers.transfer.receive import ReservationLimits
from workers.transfer.send import CHUNK_BYTES
from workers.transfer.transfer_leader import TransferLeader
from workers.transfer.transfer_role import RoleSettings, TransferRole


class DecodeRole(TransferRole):
    """`pool` is the engine's own, `layout` this worker's, `prefix_key` as the scheduler's. Not thread-safe: the
    engine's thread calls everything."""

    def __init__(
        self,
        transfers: TransferLeader,
        pool: BlockPool,
        layout: KVLayout,
        config: DecodeConfig | None = None,
        *,
        prefix_key: Callable[[int], bytes] = no_key,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        settings = replace(settings_of(config or DecodeConfig()), chunk_bytes=chunk_bytes)
        super().__init__(transfers, pool, layout, settings, prefix_key=prefix_key)

    @classmethod
    def replacing(cls, role: TransferRole, config: DecodeConfig | None = None) -> DecodeRole:
        """The role of a worker that had another one until now, as `TransferRole.replaced_by`."""
        return role.replaced_by(cls, settings_of(config or DecodeConfig()))

    def admissible(self, request: Request, now: float) -> bool:
        if request.ticket is None:
            return self.incoming.pulled(request)
        return self.incoming.adopted(request, request.ticket)

    def after_prefill(self, request: Request) -> Disposition:
        return Disposition.KEEP

    def launching(self, batch: Batch, now: float) -> None:
        """Nothing: KV of a migration is pushed between two steps, and a token's is little."""


def settings_of(config: DecodeConfig) -> RoleSettings:
    return RoleSettings(
        limits=ReservationLimits(
            headroom=config.headroom, retry_after_s=config.retry_after_s, max_lease_s=config.max_lease_s
        )
    )
