"""Cached blocks that a request can start from. Pure: no torch, no clock."""

from __future__ import annotations

from workers.batch import MEAN
from workers.kv.block_pool import BlockPool, CachedPrefix
from workers.scheduling.pending_blocks import PendingBlocks
from workers.scheduling.request import Request


class PrefixHits:
    """Over the blocks of one scheduler: cached, on the host, or being computed."""

    def __init__(self, pool: BlockPool, pending: PendingBlocks) -> None:
        self._pool = pool
        self._pending = pending

    def match(self, request: Request) -> CachedPrefix | None:
        """Cached blocks from which the request can start; None while another request computes more of its blocks. Then
        it waits until their last common block is cached, or the other request is gone."""
        if request.block_ids:
            return self._pool.match_prefix(())
        if request.waiting_on_block in self._pending:
            return None
        usable = request.hashes[: num_cacheable(request, self._pool.block_size)]
        matched = self._pool.match_prefix(usable)
        num_pending = self._pending.num_leading(usable[matched.num_leading :])
        request.waiting_on_block = usable[matched.num_leading + num_pending - 1] if num_pending else None
        return matched if request.waiting_on_block is None else None

    def savings(self, request: Request) -> int:
        """Tokens that a new request need not compute, unless a block is evicted before its turn."""
        usable = request.hashes[: num_cacheable(request, self._pool.block_size)]
        num_blocks = self._pool.match_tiers(usable, self._pool.match_prefix(usable)).num_blocks
        num_blocks += self._pending.num_leading(usable[num_blocks:])
        return num_blocks * self._pool.block_size


def num_cacheable(request: Request, block_size: int) -> int:
    """The number of blocks that need not be computed if they are cached. The last token is left out, because its logits
    are needed, and so are prompt positions whose logprobs or mean were requested."""
    limit = 0 if request.sampling.pooling == MEAN else request.num_tokens - 1
    if request.owes_prompt_logprobs:
        limit = min(limit, request.num_prompt_reported)
    return limit // block_size
