"""The role of a decode worker: takes over sequences with their KV, and migrates them when it must.

    reserve ─▶ ticket ─▶ KV arrives ─▶ admissible: the request adopts its blocks ─▶ decodes ─▶ migrate: elsewhere

A request without a ticket is served whole: short prompts, requests that have lost their pair, and all requests where
there is no other pool.
"""

from __future__ import annotations

from workers.batch import Batch
from workers.scheduling.request import Request
from workers.scheduling.role import Disposition
from workers.transfer.transfer_role import TransferRole


class DecodeRole(TransferRole):
    def admissible(self, request: Request, now: float) -> bool:
        if request.ticket is None:
            return self.incoming.pulled(request)
        return self.incoming.adopted(request, request.ticket)

    def after_prefill(self, request: Request) -> Disposition:
        return Disposition.KEEP

    def launching(self, batch: Batch, now: float) -> None:
        """Nothing: KV of a migration is pushed between two steps, and a token's is little."""
