"""Fits step times, and the time of a request besides its steps, to measurements of a running cluster:
a + b * sampled rows + c * computed tokens + d * tokens read back + e * tokens attended, none below 0.

A step lasts from its engine's tick to the end of publishing its result. The rest of a request is its time to the first
token less its steps, measured on requests that were alone in the cluster until then: HTTP, tokenising, routing, and the
way to a worker and back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.simulate.latency.step_work import StepWork
from protos.hints import counted

NUM_ROUNDS = 10
STALLED = 4.0
"""A step that took this many times its usual time was stalled: another program had its core. Its length says nothing
about the step."""
CUT = 0.99
"""The slowest hundredth of requests counts as no slower than the next one."""
NUM_GROUPS = 20
NOTHING = StepWork(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A `Latency`. `request_s`: time of a request besides its steps. `error`: the mean of |predicted / measured - 1|
    over groups of equal points; `worst`: the largest. Both are None if there are no more points than coefficients, as
    any model fits them."""

    base_s: float
    row_s: float
    token_s: float
    read_s: float
    attended_s: float
    request_s: float = 0.0
    num_points: int = 0
    error: float | None = None
    worst: float | None = None

    def step_s(self, step: StepWork) -> float:
        return (
            self.base_s
            + self.row_s * step.num_rows
            + self.token_s * step.num_tokens
            + self.read_s * step.num_read
            + self.attended_s * step.num_attended
        )

    def __str__(self) -> str:
        steps = counted(self.num_points, "step")
        if self.error is None or self.worst is None:
            off = "too few points to know its error: measure more, of different sizes"
        else:
            off = f"off by {self.error:.1%} on average, {self.worst:.1%} at most"
        return f"calibrated on {steps}: {off}; a request takes {self.request_s * 1000:.1f} ms beside them"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step and its time. A client that measured it also waited for the time of `num_requests` besides their steps;
    with `NOTHING` as the step, for that alone."""

    step: StepWork
    seconds: float
    num_requests: int = 0


def calibrate(points: Sequence[MeasuredStep]) -> Calibrated:
    """Least squares of errors relative to the prediction, with coefficients of at least 0. (Relative to the
    measurement, short steps would weigh more than long ones, and the fit would lie below the mean.) Raises ValueError
    without points."""
    if not any(point.step.num_rows for point in points):
        raise ValueError("no step was measured")
    seconds = np.array([point.seconds for point in points])
    columns = np.array(
        [[float(point.step.num_rows > 0), *point.step[:4], point.num_requests] for point in points], dtype=np.float64
    )
    is_step = columns[:, 0] > 0
    fitted, predicted, used = _fitted(columns, seconds, is_step)
    tells = len(np.unique(columns[is_step & used], axis=0)) > np.count_nonzero(fitted)
    error, worst = _errors(predicted[is_step & used], seconds[is_step & used]) if tells else (None, None)
    return Calibrated(
        base_s=float(fitted[0]),
        row_s=float(fitted[1]),
        token_s=float(fitted[2]),
        read_s=float(fitted[3]),
        attended_s=float(fitted[4]),
        request_s=float(fitted[5]),
        num_points=int(is_step.sum()),
        error=error,
        worst=worst,
    )


def _fitted(columns: Any, seconds: Any, is_step: Any) -> tuple[Any, Any, Any]:
    """Coefficients, their predictions, and which points were not stalled; each round is weighted by the previous
    prediction."""
    weights = np.where(is_step, np.median(seconds[is_step]), seconds.mean())
    kept, used = seconds.copy(), np.full(len(seconds), True)
    if not is_step.all():
        rests = seconds[~is_step]
        kept[~is_step] = np.minimum(rests, np.quantile(rests, CUT, method="lower"))
    for _ in range(NUM_ROUNDS):
        fitted = non_negative(columns[used] / weights[used, None], kept[used] / weights[used])
        predicted = weights = np.maximum(columns @ fitted, 1e-9)
        used = (seconds < STALLED * predicted) | ~is_step
    return fitted, predicted, used


def _errors(predicted: Any, seconds: Any) -> tuple[float, float]:
    """Mean and largest error over groups with equal predictions, so that the scatter of single steps is not an
    error."""
    groups = np.array_split(np.argsort(predicted, kind="stable"), min(NUM_GROUPS, len(predicted)))
    off = [abs(float(predicted[group].sum() / seconds[group].sum()) - 1) for group in groups]
    return float(np.mean(off)), max(off)


def non_negative(matrix: Any, target: Any) -> Any:
    """Least squares; columns whose coefficient would be negative are left out."""
    scale = np.linalg.norm(matrix, axis=0)
    fitted, active = np.zeros(matrix.shape[1]), scale > 0
    while active.any():
        solved = np.linalg.lstsq(matrix[:, active] / scale[active], target, rcond=None)[0]
        if solved.min() >= 0:
            fitted[active] = solved / scale[active]
            break
        active[np.flatnonzero(active)[solved.argmin()]] = False
    return fitted


def read_points(path: Path) -> list[MeasuredStep]:
    """Each step of each worker in the output of `baton bench --profile FILE`, with the host's work."""
    return _steps_of_profile(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


@dataclass(slots=True, eq=False)
class _Seen:
    """A step of a profile; times in microseconds."""

    step: StepWork
    begin: float
    end: float


def _steps_of_profile(events: Sequence[dict[str, Any]]) -> list[MeasuredStep]:
    """Steps of each engine's thread (with steps in flight a step lasts until the next one ends), and the time of
    requests besides their steps."""
    steps, ticks, latest = list[_Seen](), dict[int, float](), dict[int, _Seen]()
    for event in sorted((one for one in events if one["ph"] == "X"), key=lambda one: (one["ts"], -one["dur"])):
        pid, end = event["pid"], event["ts"] + event["dur"]
        if event["name"] == "tick":
            ticks[pid] = event["ts"]
            latest.pop(pid, None)
        elif event["name"] == "apply" and pid in ticks:
            if "num_read" not in (args := event["args"]):
                raise ValueError("it has no num_read, as older recordings have none: record it again")
            step = StepWork(*(float(args[name]) for name in ("num_rows", "num_tokens", "num_read", "num_attended")))
            latest[pid] = _Seen(step=step, begin=ticks.pop(pid), end=end)
            steps.append(latest[pid])
        elif event["name"] == "tell" and pid in latest:
            latest.pop(pid).end = end
    points = [MeasuredStep(step=one.step, seconds=(one.end - one.begin) / 1e6) for one in steps]
    rests = _rests(steps, [one for one in events if one.get("cat") == "request"])
    return points + [MeasuredStep(step=NOTHING, seconds=rest / 1e6, num_requests=1) for rest in rests]


def _rests(steps: Sequence[_Seen], events: Sequence[Mapping[str, Any]]) -> list[float]:
    """The time besides their steps of requests that were alone until their first token, in microseconds."""
    lives: dict[Any, dict[str, float]] = {}
    for event in events:
        lives.setdefault(event["id"], {})[event["ph"]] = event["ts"]
    whole = sorted(
        ((life["b"], life["n"], life["e"]) for life in lives.values() if len(life) == 3), key=lambda life: life[0]
    )
    rests, busy_until = [], 0.0
    for number, (begin, first, end) in enumerate(whole):
        is_alone = busy_until < begin and (number + 1 == len(whole) or whole[number + 1][0] > first)
        busy_until = max(busy_until, end)
        own = [one for one in steps if begin <= one.begin and one.end <= first]
        while len(own) > 1 and own[-1].step.num_tokens == own[-1].step.num_rows:
            own.pop()  # the next token's, which is computed while the first one is on its way
        if is_alone and own:
            rests.append(first - begin - sum(one.end - one.begin for one in own))
    return rests
