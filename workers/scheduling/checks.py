"""Invariants of a scheduler between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import chain, pairwise

from workers.kv.block_pool import PASSED, BlockPool, page_hash
from workers.scheduling.request import Request, State


def check_request(request: Request, pool: BlockPool, num_due: int) -> None:
    """Asserts a request's invariants. `num_due` tokens are sampled for it by steps in flight."""
    size = pool.block_size
    assert all(len(table) * size >= request.num_planned for table in request.tables)
    assert request.num_sealed <= request.num_computed // size
    if request.state is State.RUNNING:
        assert request.num_to_compute >= 1, "a running request has nothing to compute"
        assert request.num_computed <= request.num_planned <= request.num_expected
        assert request.num_sealed == request.num_computed // size
        assert request.num_due == num_due
        behind = pool.windows.num_passed(request.num_computed)
        assert request.num_passed == behind, "a page behind the window is held, or one within it was given back"
    if request.state is State.WAITING:
        assert (request.adopted or request.onload is not None) == bool(request.block_ids)
        assert request.block_ids or not request.num_computed
        assert request.num_due == 0
    for group, (table, passed) in enumerate(zip(request.tables, request.num_passed, strict=True)):
        assert all(entry == PASSED for entry in table[:passed])
        for index in range(passed, request.num_sealed):
            sealed = pool.hash_of(table[index])
            assert sealed in (None, page_hash(request.hashes[index], group)), (
                "a block has another hash than its request"
            )


def check_queues(requests: Collection[Request], waiting: Sequence[Request], running: Sequence[Request]) -> None:
    """Asserts that every request that is not held is in the queue of its state, and that queues are sorted by rank."""
    for queue, state in ((waiting, State.WAITING), (running, State.RUNNING)):
        assert all(request.state is state for request in queue)
        assert all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order"
    held = [request for request in requests if request.state is State.HELD]
    assert len(held) + len(waiting) + len(running) == len(requests)


def check_blocks(
    pool: BlockPool,
    requests: Collection[Request],
    sampling: Sequence[Container[Request]],
    held_elsewhere: Iterable[Iterable[int]],
) -> None:
    """Asserts that every reference in the pool belongs to a request or is in `held_elsewhere`, and each request's
    invariants. `sampling`: the requests that each step in flight samples."""
    pool.check_integrity()
    references = Counter(chain.from_iterable(held_elsewhere))
    for request in requests:
        references.update(chain.from_iterable(request.held()))
        check_request(request, pool, sum(request in step for step in sampling))
    check_references(pool, references)


def check_references(pool: BlockPool, references: Mapping[int, int]) -> None:
    """Asserts that the pool counts the references of each block as their holders do."""
    for block_id in range(pool.num_blocks):
        held_by, counted = references[block_id], pool.num_references(block_id)
        assert held_by == counted, f"block {block_id} has {counted} references, its holders know of {held_by}"
