"""Recent requests of a gateway, as the planner needs them. Without a planner a request costs one comparison."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from protos.event_loop import loop_time
from router.fleet_owner import GatewaySight, RequestSample, WorkerSight
from router.jobs import WorkerView
from router.observe.request_observer import EndedRequest, ObservedRequest
from router.traces.request_trace import RequestTrace

MAX_KEPT = 20_000
MAX_SAMPLES = 1_000
"""Samples of one report; of more requests an even part is sent."""
_ANSWERED = ("stop", "length", "cancelled")


class RequestSamples:
    """An observer that counts the requests that begin and keeps those that ended, while `window_s` is above 0."""

    def __init__(self) -> None:
        self.window_s = 0.0
        self._since_s = 0.0
        self._arrived: deque[tuple[float, int]] = deque(maxlen=MAX_KEPT)
        self._ended: deque[RequestSample] = deque(maxlen=MAX_KEPT)

    def watch(self, window_s: float) -> None:
        """Keeps samples of the last `window_s` seconds; 0 keeps none."""
        if window_s and not self.window_s:
            self._since_s = loop_time()
        elif not window_s:
            self._arrived.clear()
            self._ended.clear()
        self.window_s = window_s

    def began(self, request: ObservedRequest) -> None:
        if self.window_s:
            self._arrived.append((loop_time(), len(request.records)))

    def ended(self, ended: EndedRequest) -> None:
        if self.window_s:
            self._ended.extend(map(sample_of, ended.request.records))

    def covered_s(self, now: float) -> float:
        return min(self.window_s, now - self._since_s)

    def num_arrived(self, now: float) -> int:
        while self._arrived and self._arrived[0][0] < now - self.window_s:
            self._arrived.popleft()
        return sum(count for _, count in self._arrived)

    def latest(self, now: float) -> Sequence[RequestSample]:
        while self._ended and (self._ended[0].ended_s or now) < now - self.window_s:
            self._ended.popleft()
        return tuple(self._ended)


def sample_of(record: RequestTrace) -> RequestSample:
    times = record.timestamps
    return RequestSample(
        received_s=record.received_s, first_s=times.first_s, last_s=times.last_s, ended_s=times.ended_s,
        num_prompt_tokens=record.num_prompt_tokens, num_cached_tokens=times.num_cached_tokens,
        num_tokens=times.num_tokens,
        failed=times.ended_s is not None and times.last_s is None and record.outcome not in _ANSWERED,
    )  # fmt: skip


def sight_of(
    gateway_id: str,
    samples: Sequence[RequestSample],
    workers: Iterable[WorkerView],
    *,
    now: float,
    covered_s: float,
    num_arrived: int,
    num_waiting: int,
) -> GatewaySight:
    """An even part of the samples is sent if there are more than `MAX_SAMPLES`."""
    step = -(-len(samples) // MAX_SAMPLES) or 1
    return GatewaySight(
        gateway_id=gateway_id,
        now_s=now,
        covered_s=covered_s,
        num_arrived=num_arrived,
        num_waiting=num_waiting,
        samples=tuple(samples[::step]),
        workers=tuple(_worker(worker) for worker in workers if worker.info is not None),
    )


def _worker(worker: WorkerView) -> WorkerSight:
    assert worker.info is not None, "a worker without a role is not reported"
    load = worker.load
    return WorkerSight(
        worker_id=worker.worker_id, role=worker.info.role, state=worker.state, num_running=load.num_running,
        queued_prefill_tokens=load.queued_prefill_tokens, decode_step_s=load.decode_step_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s, num_kv_tokens=load.num_blocks * worker.info.layout.block_size,
    )  # fmt: skip
