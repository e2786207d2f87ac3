"""Session affinity: a conversation stays with one worker, while that worker is not overloaded.

Workers are ordered by a hash of session and worker (rendezvous hashing: Thaler and Ravishankar, 1998), so that only the
sessions of a worker that leaves move. The first in that order with room is chosen; room is a queue under `BOUND` times
the mean (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from router.policies.base import Candidate, RequestView, Score, score

BOUND = 1.25


def session_affinity(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
    """`place` in the session's order; whoever has no room comes after everybody who has. A request without a session
    is one of its own."""
    session = view.session or view.request_id
    num_requests = sum(candidate.num_requests for candidate in candidates) + 1
    most = ceil(BOUND * num_requests / len(candidates))
    order = sorted(candidates, key=lambda candidate: _draw(session, candidate.worker_id), reverse=True)
    place = {candidate.worker_id: number for number, candidate in enumerate(order)}
    return [
        score(
            candidate,
            place=place[candidate.worker_id],
            no_room=len(candidates) * float(candidate.num_requests + 1 > most),
        )
        for candidate in candidates
    ]


def _draw(session: str, worker_id: str) -> bytes:
    return blake2b(f"{session}\0{worker_id}".encode(), digest_size=8).digest()
