"""Predicts each worker's seconds to a first token, between tokens and until KV arrives, from measured ones.

    measured by the worker (its load) ──────┐
    observed of its pool ── LinearFit ──────┴─▶ Line ── observed of it: SlowdownFactor ──▶ CandidateTable ──▶ policies
                                                        └─▶ errors ──▶ `baton_prediction_*`

The estimators are in `router.routing.fits`. Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple

import numpy as np

from protos.values import WorkerLoad, WorkerRole
from router.routing.candidate_columns import (
    FEW,
    PREDICTED_ROWS,
    CandidateTable,
    Floats,
    LaneLatencies,
    Line,
    Numbers,
    WorkerSet,
    where,
)
from router.routing.fits import HALF_COUNT, LinearFit, PredictionErrors, SlowdownFactor
from router.routing.prefill_speeds import PrefillSpeeds, slowness
from router.routing.recent_work import RecentWork, halved, since_whole, whole
from router.routing.ttft_overhead import TtftOverhead


class WorkerFeatures(NamedTuple, Generic[Numbers]):
    """The predictor's numbers about one worker. Unknown numbers are NaN."""

    num_running: Numbers
    prefill_tokens_per_s: Numbers  # measured by the worker
    step_s: Numbers
    load_fixed_s: Numbers
    load_each_s: Numbers
    lane_fixed_s: Numbers  # for a byte of KV, measured by the worker
    lane_each_s: Numbers
    fitted_fixed_s: Numbers  # with the router's observations
    fitted_each_s: Numbers
    prefill_ratio: Numbers  # measured over expected
    step_ratio: Numbers
    awaits_fit: Numbers  # the worker has received KV and has not measured a lane: the line of all lanes is its prior
    recent_tokens: Numbers
    recent_at: Numbers  # on its pool's clock


class PoolNumbers(NamedTuple, Generic[Numbers]):
    prefill_fixed_s: Numbers
    prefill_each_s: Numbers
    step_fixed_s: Numbers
    step_each_s: Numbers
    prefill_tokens_per_s: Numbers
    has_steps: Numbers
    recent_share: Numbers
    recent_at: Numbers
    is_colocated: Numbers


# Priors, between a laptop and the largest GPU; a few requests correct them.
PREFILL = Line(fixed_s=0.005, each_s=1e-4)
STEP = Line(fixed_s=0.02, each_s=1e-4)
TRANSFER = Line(fixed_s=0.0, each_s=1e-9)
LOAD = Line(fixed_s=0.0, each_s=1e-10)  # from host memory, per byte, for a worker that has not loaded anything yet
UNOBSERVED = {"prefill_time": PREFILL, "load_time": LOAD, "step_time": STEP, "transfer_time": TRANSFER}


class Predictor:
    """The fits of all workers and lanes. A worker without observations gets the predictions of its pool."""

    def __init__(self) -> None:
        self._prefill: dict[str, SlowdownFactor] = {}
        self._step: dict[str, SlowdownFactor] = {}
        self._transfer: dict[str, LinearFit] = {}
        self._pools: dict[WorkerRole, tuple[LinearFit, LinearFit]] = {
            role: (LinearFit(), LinearFit()) for role in WorkerRole
        }
        self._overheads = {role: TtftOverhead() for role in WorkerRole}
        self._all_lanes = LinearFit()
        self._offered = _NOTHING_OFFERED
        self._priors: dict[str, _Prior] = {}  # of workers that are not in the latest table
        self._fits_of_lanes: dict[str, dict[str, LinearFit]] = {}
        self._lanes: dict[str, LaneLatencies] = {}
        self._recent = {role: RecentWork() for role in WorkerRole}
        self._speeds = {role: PrefillSpeeds() for role in WorkerRole}
        self._changed: dict[str, None] = {}
        self.answer_tokens = 64.0

    # -- predictions ---------------------------------------------------------------------------------------------------

    def features(self, worker_id: str, role: WorkerRole, load: WorkerLoad, *, now: float) -> WorkerFeatures[float]:
        """The features of one worker. They stay the same until the worker's load changes or `changed` returns the
        worker."""
        speeds, measured = self._speeds[role], load.transfer_bytes > 0
        speeds.report(worker_id, load.prefill_tokens_per_s)
        self._overheads[role].add(worker_id)
        prefill = self._prefill.get(worker_id)
        step = None if role is WorkerRole.COLOCATED else self._step.get(worker_id)
        if prefill is not None:
            prefill.set_slowness(speeds.slower(worker_id))
        lane = Line(each_s=load.transfer_s / load.transfer_bytes) if measured else _UNKNOWN
        transfer = self._transfer.get(worker_id)
        fitted = transfer.line(lane) if transfer is not None and measured else lane
        onload = _load_line(load)
        return WorkerFeatures(
            load.num_running,
            speeds.of(worker_id) or math.nan,
            load.decode_step_s,
            onload.fixed_s,
            onload.each_s,
            lane.fixed_s,
            lane.each_s,
            fitted.fixed_s,
            fitted.each_s,
            prefill.ratio if prefill is not None else 1.0,
            step.ratio if step is not None else 1.0,
            transfer is not None and not measured,
            *whole(*self._recent[role].of(worker_id, now=now)),
        )

    def changed(self) -> Sequence[str]:
        """Workers whose features have changed since the last call: after an observation, or when other workers' reports
        change how theirs counts."""
        crossed = [worker_id for speeds in self._speeds.values() for worker_id in speeds.crossed()]
        changed, self._changed = tuple(dict.fromkeys((*self._changed, *crossed))), {}
        return changed

    def predict(self, table: CandidateTable, features: Floats, *, now: float) -> None:
        """Fills in the predicted lines and the recent tokens of the table's workers. `features` has a row for each
        field of `WorkerFeatures`. Later observations are compared with these predictions."""
        roles, numbers = table.workers.role_numbers
        priors: Priors
        pools, lane = [self._pool_numbers(role, now) for role in roles], self._all_lanes.line(TRANSFER)
        if len(table) <= FEW:
            each = [
                expected(WorkerFeatures(*worker), pools[number], lane)
                for worker, number in zip(features.T.tolist(), numbers.tolist(), strict=True)
            ]
            priors, predicted = [row[0] for row in each], np.array([row[1] for row in each]).T
        else:
            workers: WorkerFeatures[Floats] = WorkerFeatures(*features)
            columns, lines = expected(workers, PoolNumbers(*np.array(pools, dtype=np.float64).T[:, numbers]), lane)
            priors, predicted = np.array(columns).T, np.array(lines)
        self._offer(table.workers, priors)
        table.values[PREDICTED_ROWS] = predicted
        for place in features[_AWAITS_FIT].nonzero()[0].tolist():
            fitted = self._transfer[table.workers.worker_ids[place]].line(lane)
            table.lines[6:, place] = fitted.fixed_s, fitted.each_s

    def _pool_numbers(self, role: WorkerRole, now: float) -> PoolNumbers[float]:
        prefill, step = self._pools[role]
        prefill_line, step_line = prefill.line(PREFILL), step.line(STEP)
        return PoolNumbers(
            prefill_line.fixed_s,
            prefill_line.each_s,
            step_line.fixed_s,
            step_line.each_s,
            self._speeds[role].mean or math.nan,
            step.known,
            *since_whole(self._recent[role].clock(now)),
            role is WorkerRole.COLOCATED,
        )

    def overhead_s(self, role: WorkerRole, *, now: float) -> float:
        return self._overheads[role].at(now)

    @property
    def lanes(self) -> Mapping[str, LaneLatencies]:
        return self._lanes

    def errors(self) -> Mapping[str, tuple[PredictionErrors, PredictionErrors]]:
        return {
            worker_id: (
                self._prefill[worker_id].errors.so_far if worker_id in self._prefill else PredictionErrors(),
                self._step[worker_id].errors.so_far if worker_id in self._step else PredictionErrors(),
            )
            for worker_id in self._prefill.keys() | self._step.keys()
        }

    def routed(self, worker_id: str, role: WorkerRole, num_tokens: int, *, beside: int, now: float) -> None:
        self._recent[role].give(worker_id, num_tokens + self._slowed_tokens(role, beside), now=now)
        self._changed[worker_id] = None

    # -- observations: of a worker that has left, only its pool learns -------------------------------------------------

    def saw_first_token(
        self, worker_id: str, role: WorkerRole, *, num_tokens: float, seconds: float, now: float, on_idle: bool = False
    ) -> None:
        """Records a first token `seconds` after its decision. The worker had `num_tokens` to prefill before it.
        `on_idle`: the worker had no other request at the decision."""
        pool = self._pools[role][0]
        if (prior := self._prior_of(worker_id)) is not None:
            pace = self._prefill.setdefault(worker_id, SlowdownFactor())
            pace.observe(num_tokens, seconds, line=prior.prefill, now=now, learn=pool.sure)
            self._changed[worker_id] = None
        pool.observe(num_tokens, seconds, prior=PREFILL, now=now)
        if on_idle:  # on a busy worker the time includes steps of other requests
            pooled_s = pool.line(PREFILL).each_s
            each_s = pooled_s if prior is None else max(prior.prefill.each_s, pooled_s)
            self._overheads[role].observe(seconds, prefill_s=num_tokens * each_s, now=now)

    def saw_answer(
        self, worker_id: str, role: WorkerRole, *, num_sequences: float, num_tokens: int, seconds: float, now: float
    ) -> None:
        pool = self._pools[role][1]
        if (prior := self._prior_of(worker_id)) is not None:
            pace = self._step.setdefault(worker_id, SlowdownFactor())
            pace.observe(num_sequences, seconds, line=prior.step, now=now, learn=pool.sure)
            self._changed[worker_id] = None
        pool.observe(num_sequences, seconds, prior=STEP, now=now)
        self.answer_tokens += (num_tokens - self.answer_tokens) / HALF_COUNT

    def saw_transfer(self, prefill_id: str, decode_id: str, *, num_bytes: float, seconds: float, now: float) -> None:
        if self._prior_of(prefill_id) is not None and (decode_prior := self._prior_of(decode_id)) is not None:
            prior = decode_prior.transfer
            lane = self._fits_of_lanes.setdefault(prefill_id, {}).setdefault(decode_id, LinearFit())
            lane.observe(num_bytes, seconds, prior=prior, now=now)
            self._lanes.setdefault(prefill_id, LaneLatencies()).set(decode_id, lane.line(prior))
            self._transfer.setdefault(decode_id, LinearFit()).observe(num_bytes, seconds, prior=prior, now=now)
            self._changed[decode_id] = None
        self._all_lanes.observe(num_bytes, seconds, prior=TRANSFER, now=now)

    def drop(self, worker_id: str) -> None:
        self._prefill.pop(worker_id, None)
        self._step.pop(worker_id, None)
        self._transfer.pop(worker_id, None)
        self._keep_priors()
        self._priors.pop(worker_id, None)
        self._changed.pop(worker_id, None)
        for role in WorkerRole:
            self._recent[role].drop(worker_id)
            self._speeds[role].drop(worker_id)
            self._overheads[role].drop(worker_id)
        for by_worker in (self._fits_of_lanes, self._lanes):
            by_worker.pop(worker_id, None)
        for prefill_id in [prefill_id for prefill_id, fits in self._fits_of_lanes.items() if fits.pop(worker_id, None)]:
            self._lanes[prefill_id].drop(worker_id)
            if not self._lanes[prefill_id]:
                del self._lanes[prefill_id], self._fits_of_lanes[prefill_id]

    # ------------------------------------------------------------------------------------------------------------------

    def _slowed_tokens(self, role: WorkerRole, beside: int) -> float:
        """The prompt tokens that could be computed in the time by which one more answer delays others; 0 except for
        colocated workers."""
        prefill, step = self._pools[role]
        each_s = prefill.line(PREFILL).each_s
        if role is not WorkerRole.COLOCATED or not each_s:
            return 0.0
        return self.answer_tokens * step.line(STEP).each_s * beside / each_s

    def _offer(self, workers: WorkerSet, priors: Priors) -> None:
        if workers is not self._offered[0]:
            self._keep_priors()
        self._offered = (workers, priors)

    def _keep_priors(self) -> None:
        workers, priors = self._offered
        self._priors.update((worker_id, _prior(priors[place])) for worker_id, place in workers.places.items())
        self._offered = _NOTHING_OFFERED

    def _prior_of(self, worker_id: str) -> _Prior | None:
        workers, priors = self._offered
        place = workers.places.get(worker_id)
        return self._priors.get(worker_id) if place is None else _prior(priors[place])


_UNKNOWN = Line(fixed_s=math.nan, each_s=math.nan)


_AWAITS_FIT = WorkerFeatures._fields.index("awaits_fit")
Priors = Sequence[tuple[float, ...]] | Floats
"""The numbers of a `_Prior` for each worker."""
_NOTHING_OFFERED: tuple[WorkerSet, Priors] = (WorkerSet((), ()), ())


class _Prior(NamedTuple):
    prefill: Line
    step: Line
    transfer: Line


def _prior(numbers: Iterable[float]) -> _Prior:
    values = [float(number) for number in numbers]
    return _Prior(
        *(Line(fixed_s=fixed_s, each_s=each_s) for fixed_s, each_s in zip(values[::2], values[1::2], strict=True))
    )


def expected(
    worker: WorkerFeatures[Numbers], pool: PoolNumbers[Numbers], lane: Line
) -> tuple[tuple[Numbers, ...], tuple[Numbers, ...]]:
    """The numbers of a `_Prior` and those of `PREDICTED_ROWS`, for one worker or, as columns, for many. `lane` is the
    line of all lanes."""
    slower = slowness(worker.prefill_tokens_per_s, pool.prefill_tokens_per_s)
    is_measured = pool.prefill_tokens_per_s == pool.prefill_tokens_per_s
    prefill_each_s = where(is_measured, slower / pool.prefill_tokens_per_s, pool.prefill_each_s)
    # An old slow step must not keep an idle worker idle: the pool's step counts instead.
    as_pool = (worker.num_running < pool.has_steps) | (worker.step_s == 0)
    own_s = worker.step_s - pool.step_each_s * worker.num_running
    step_fixed_s = where(as_pool, pool.step_fixed_s, where(own_s > 0, own_s, 0.0))
    # A colocated worker's steps are long while it has prompts. They show where prompts went, not where the next prompt
    # should go. So the pool's line counts, scaled by the worker's prefill speed.
    step_fixed_s = where(pool.is_colocated, pool.step_fixed_s * slower, step_fixed_s)
    step_each_s = where(pool.is_colocated, pool.step_each_s * slower, pool.step_each_s)
    lane_fixed_s, lane_each_s, fitted_fixed_s, fitted_each_s = (
        where(own == own, own, expected_s)
        for own, expected_s in (
            (worker.lane_fixed_s, lane.fixed_s),
            (worker.lane_each_s, lane.each_s),
            (worker.fitted_fixed_s, lane.fixed_s),
            (worker.fitted_each_s, lane.each_s),
        )
    )
    recent_tokens = worker.recent_tokens * halved(pool.recent_share, worker.recent_at - pool.recent_at)
    return (
        (pool.prefill_fixed_s, prefill_each_s, step_fixed_s, step_each_s, lane_fixed_s, lane_each_s),
        (
            recent_tokens,
            pool.prefill_fixed_s * worker.prefill_ratio,
            prefill_each_s * worker.prefill_ratio,
            worker.load_fixed_s,
            worker.load_each_s,
            step_fixed_s * worker.step_ratio,
            step_each_s * worker.step_ratio,
            fitted_fixed_s,
            fitted_each_s,
        ),
    )


def _load_line(load: WorkerLoad) -> Line:
    host = load.host
    return Line(each_s=host.load_s / host.loaded_bytes) if host is not None and host.loaded_bytes else LOAD
