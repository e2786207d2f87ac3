"""The role of a prefill worker: pushes the KV of prompts to the decode worker that reserved blocks for it.

    admissible ── opens the lane ──▶ computing ── after_prefill: HOLD ──▶ held ── all offered ──▶ released
                                        │  tick: pushes what has become full  │
                                        │  launching: arms the last step, which pushes the rest layer by layer
                                        └──── lane lost, lease over, abort ───┴──▶ failed, or dropped

While no decode worker is ready, a prefill worker serves whole requests and takes sequences over."""

from __future__ import annotations

from workers.batch import Batch
from workers.scheduling.request import Request
from workers.scheduling.role import Disposition
from workers.transfer.transfer_role import TransferRole


class PrefillRole(TransferRole):
    def admissible(self, request: Request, now: float) -> bool:
        """A request without a ticket is served to its end here, and so is one with blocks reserved here: it comes from
        a worker that drains, while no decode worker is left."""
        if request.ticket is not None and self.takes_over(request.ticket):
            return self.incoming.adopted(request, request.ticket)
        if request.ticket is not None and not self.outgoing.begin(request, request.ticket, now):
            return False
        return self.incoming.pulled(request)

    def after_prefill(self, request: Request) -> Disposition:
        match self.outgoing.completed(request):
            case None:
                return Disposition.KEEP
            case True:
                return Disposition.RELEASE
            case False:
                return Disposition.HOLD

    def launching(self, batch: Batch, now: float) -> None:
        self.outgoing.launching(batch, now)
