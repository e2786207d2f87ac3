"""A predictor's view of one worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from protos.values import WorkerLoad, WorkerRole
from router.routing.candidate_columns import Candidate, CandidateTable
from router.routing.predictor import Predictor


def predicted(
    predictor: Predictor, worker_id: str, role: WorkerRole, load: WorkerLoad, *, now: float, **known: Any
) -> Candidate:
    """The worker as a candidate with the predictor's expectations; `load_time` is by bytes."""
    table = CandidateTable.of([Candidate(worker_id=worker_id, role=role, **known)])
    features = np.array([predictor.features(worker_id, role, load, now=now)]).T
    predictor.predict(table, features, now=now)
    return table[0]
