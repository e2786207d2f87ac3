"""The planner's observation of recent requests, the line and the loads of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.planner.planner_values import FleetObjective, Observation, PoolObservation
from cluster.planner.queueing import mean
from protos.values import WorkerRole
from router.fleet_owner import GatewaySight, RequestSample, WorkerSight
from router.routing.fits import LinearFit
from router.routing.predictor import STEP

NUM_QUANTILES = 20
_SERVING, _LEAVING = "ready", "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenRequest:
    """`is_read`: its first token came within the window. `is_slow`: only later tokens were late."""

    sample: RequestSample
    is_late: bool
    is_slow: bool
    is_read: bool


class Observer:
    """Learns how the time of a step grows with the sequences in it."""

    def __init__(self, objective: FleetObjective, *, window_s: float) -> None:
        self._objective = objective
        self._window_s = window_s
        self._steps = {role: LinearFit() for role in WorkerRole}

    def look(
        self,
        sights: Sequence[GatewaySight],
        *,
        at_s: float,
        roles: Iterable[WorkerRole],
        pending_since_s: Mapping[WorkerRole, Sequence[float]],
        num_silent: int = 0,
    ) -> Observation | None:
        """Builds an observation from gateways' reports. `at_s`: when the latest one came, in seconds since 1970. None
        without a report."""
        if not sights:
            return None
        requests = [request for sight in sights for request in self._requests(sight)]
        ended = [request for request in requests if request.sample.ended_s is not None]
        over = [*ended, *(request for request in requests if request.sample.ended_s is None and request.is_late)]
        samples = [request.sample for request in requests if request.is_read]
        uncached = sorted(sample.num_prompt_tokens - sample.num_cached_tokens for sample in samples)
        written = [request.sample for request in ended if request.sample.num_tokens]
        context = mean([request.sample.num_prompt_tokens + request.sample.num_tokens / 2 for request in ended])
        workers = sights[-1].workers
        return Observation(
            at_s=at_s,
            window_s=self._window_s,
            num_arrived=round(sum(sight.num_arrived * self._window_s / max(1e-9, sight.covered_s) for sight in sights)),
            num_ended=len(over),
            num_late=sum(request.is_late for request in over),
            num_slow=sum(request.is_slow for request in over),
            num_waiting=sum(sight.num_waiting for sight in sights),
            uncached_tokens=quantiles(uncached),
            answer_tokens=mean([sample.num_tokens for sample in written]),
            pools={
                role: self._pool(role, workers, tuple(pending_since_s.get(role, ())), context, sights[-1].now_s)
                for role in roles
            },
            num_silent=num_silent + sum(sight.covered_s < self._window_s / 2 for sight in sights),
        )

    def _requests(self, sight: GatewaySight) -> Iterable[_SeenRequest]:
        begin_s = sight.now_s - self._window_s
        for sample in sight.samples:
            if sample.ended_s is None or sample.ended_s >= begin_s:
                begins_late, is_slow = self._begins_late(sample, sight.now_s), self._is_slow(sample)
                yield _SeenRequest(
                    sample=sample,
                    is_late=begins_late or is_slow,
                    is_slow=is_slow and not begins_late,
                    is_read=(sample.first_s or 0.0) >= begin_s,
                )

    def _begins_late(self, sample: RequestSample, now: float) -> bool:
        waited_until_s = next(at_s for at_s in (sample.first_s, sample.ended_s, now) if at_s is not None)
        return sample.failed or waited_until_s - sample.received_s > self._objective.ttft_s

    def _is_slow(self, sample: RequestSample) -> bool:
        gaps = sample.num_tokens - 1
        if sample.ended_s is None or sample.first_s is None or sample.last_s is None or gaps <= 0:
            return False
        return (sample.last_s - sample.first_s) / gaps > self._objective.tpot_s

    def _pool(
        self, role: WorkerRole, workers: Sequence[WorkerSight], pending: tuple[float, ...], context: float, now: float
    ) -> PoolObservation:
        mine = [worker for worker in workers if worker.role is role]
        serving = [worker for worker in mine if worker.state == _SERVING]
        fit = self._steps[role]
        for worker in serving:
            if worker.decode_step_s > 0 and worker.num_running:
                fit.observe(worker.num_running, worker.decode_step_s, prior=STEP, now=now)
        line = fit.line(STEP)
        speeds = [worker.prefill_tokens_per_s for worker in serving if worker.prefill_tokens_per_s > 0]
        return PoolObservation(
            serving=len(serving),
            pending_since_s=pending,
            num_leaving=sum(worker.state == _LEAVING for worker in mine),
            prefill_tokens_per_s=mean(speeds),
            step_fixed_s=line.fixed_s if fit.known else 0.0,
            step_each_s=line.each_s,
            num_seats=_seats(serving, context),
        )


def quantiles(ordered: Sequence[float]) -> tuple[float, ...]:
    """Returns `NUM_QUANTILES` values of equal shares, or all of fewer."""
    if len(ordered) <= NUM_QUANTILES:
        return tuple(ordered)
    return tuple(ordered[int((place + 0.5) * len(ordered) / NUM_QUANTILES)] for place in range(NUM_QUANTILES))


def _seats(serving: Sequence[WorkerSight], context: float) -> int:
    """Sequences of a mean length that a worker's KV memory holds; 0 if unknown."""
    if not serving or context <= 0:
        return 0
    return min(int(worker.num_kv_tokens / context) for worker in serving)
