"""Invariants of a request between two steps."""

from __future__ import annotations

from workers.kv.blocks import BlockPool
from workers.scheduling.request import Request, State


def check_request(request: Request, pool: BlockPool, num_due: int) -> None:
    """Asserts a request's invariants. `num_due` tokens are sampled for it by steps in flight."""
    size = pool.block_size
    assert len(request.block_ids) * size >= request.num_planned
    assert request.num_sealed <= request.num_computed // size
    if request.state is State.RUNNING:
        assert request.num_to_compute >= 1, "a running request has nothing to compute"
        assert request.num_computed <= request.num_planned <= request.num_expected
        assert request.num_sealed == request.num_computed // size
        assert request.num_due == num_due
    if request.state is State.WAITING:
        assert (request.adopted or request.onload is not None) == bool(request.block_ids)
        assert request.block_ids or not request.num_computed
        assert request.num_due == 0
    for index in range(request.num_sealed):
        sealed = pool.hash_of(request.block_ids[index])
        assert sealed in (None, request.hashes[index]), "a block has another hash than its request"
