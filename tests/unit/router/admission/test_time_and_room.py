"""The work that a gateway may give to workers before more waits in its own queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protos.values import WorkerRole
from router.admission.time_and_room import Room
from router.routing.candidate_columns import Candidate, CandidateTable

ROOM = Room(max_backlog_s=0.5, max_waiting=4)
COLOCATED, PREFILL, DECODE = WorkerRole.COLOCATED, WorkerRole.PREFILL, WorkerRole.DECODE


def worker(role: WorkerRole, number: int = 0, **load: Any) -> Candidate:
    idle = Candidate(
        worker_id=f"{role}{number}", role=role, num_free_blocks=100, num_blocks=100, prefill_tokens_per_s=1000.0
    )
    return replace(idle, **load)


def full(role: WorkerRole, number: int = 0) -> Candidate:
    return worker(role, number, num_requests=9, num_free_blocks=2)


def behind(role: WorkerRole, number: int = 0) -> Candidate:
    return worker(role, number, queued_prefill_tokens=800, num_waiting=2)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    ("workers", "fits"),
    [
        ((worker(PREFILL), worker(DECODE)), True),
        ((behind(PREFILL), worker(DECODE)), False),
        ((worker(PREFILL, num_waiting=4), worker(DECODE)), False),
        ((worker(PREFILL), full(DECODE)), False),
        ((worker(PREFILL), worker(DECODE, num_requests=9, num_waiting=3)), True),
        ((worker(PREFILL), worker(DECODE, num_requests=9, num_waiting=4)), False),  # it has blocks, and no seats
        ((behind(PREFILL), worker(DECODE), worker(COLOCATED)), True),
        ((behind(PREFILL), worker(DECODE), behind(COLOCATED)), False),
        ((behind(PREFILL), full(DECODE), full(COLOCATED)), False),
        ((worker(DECODE),), True),
        ((behind(DECODE),), False),
        ((worker(COLOCATED),), True),
        ((worker(PREFILL),), True),  # it stands in for the decode pool
        ((behind(PREFILL),), False),
        ((full(PREFILL),), False),
        ((), True),  # nobody is here: that is for the dispatcher to say
    ],
)
def test_a_pair_takes_work_while_prefill_and_blocks_allow(
    workers: tuple[Candidate, ...], fits: bool, count: int
) -> None:
    """An idle decode worker is no reason to give a prefill worker more than it can begin with."""
    many = [
        replace(candidate, worker_id=f"{candidate.worker_id}.{number}")
        for candidate in workers
        for number in range(count)
    ]
    assert ROOM.fits(CandidateTable.of(many), num_blocks=10) is fits
