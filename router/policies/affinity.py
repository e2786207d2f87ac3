"""Session affinity: a conversation stays with one worker, while that worker is not overloaded.

Workers are ordered by a hash of session and worker (rendezvous hashing: Thaler and Ravishankar, 1998), so that only the
sessions of a worker that leaves move. The policy chooses the first worker in that order that has room: a queue shorter
than `BOUND` times the mean (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018).
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil

import numpy as np

from router.config import RouterConfig
from router.policies.base import Policy, RequestView
from router.policies.pair import ShortRemainder, pair
from router.policies.scores import PoolScores, pool_scores
from router.policies.table import CandidateTable

BOUND = 1.25


def session_affinity(config: RouterConfig) -> Policy:
    return pair("session_affinity", prefill=_session_order, decode=_session_order, short=ShortRemainder.of(config))


def _session_order(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """The term `place` is the worker's place in the session's order; workers without room come after all that have
    room. A request without a session counts as a session of its own."""
    session, count = view.session or view.request_id, len(candidates)
    num_requests = candidates.num_requests
    most = ceil(BOUND * (num_requests.sum() + 1) / count)
    draws = [_draw(session, worker_id) for worker_id in candidates.workers.worker_ids]
    place = np.empty(count)
    place[sorted(range(count), key=draws.__getitem__, reverse=True)] = np.arange(count)
    return pool_scores(candidates, place=place, no_room=count * (num_requests + 1 > most).astype(np.float64))


def _draw(session: str, worker_id: str) -> bytes:
    return blake2b(f"{session}\0{worker_id}".encode(), digest_size=8).digest()
