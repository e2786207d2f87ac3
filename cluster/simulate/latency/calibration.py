"""Fits step times, and the time of a request besides its steps, to measurements of a running cluster.

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

from cluster.simulate.latency.base import Calibrated, StepWork, step_of
from protos.errors import Misconfigured
from protos.hints import unusable

NUM_ROUNDS = 10
STALLED = 4.0
"""A step that took this many times its usual time was stalled: another program had its core. Its length says nothing
about the step."""
LEAST_STALLS = 5
"""With fewer steps stalls are not left out: their frequency would be unknown."""
CUT = 0.99
"""The slowest hundredth of requests counts as no slower than the next one."""
NUM_RATIOS = 100
LEAST_FOR_RATIOS = 200
"""With fewer single steps no scatter is reported."""
NUM_GROUPS = 20
NOTHING = StepWork(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step, or the mean of `several`, and its time. A client that measured it also waited for the time of
    `num_requests` besides their steps; with `NOTHING` as the step, for that alone."""

    step: StepWork
    seconds: float
    num_requests: int = 0
    several: bool = False


def calibrate(points: Sequence[MeasuredStep]) -> Calibrated:
    """Least squares of errors relative to the prediction, with coefficients of at least 0. (Relative to the
    measurement, short steps would weigh more than long ones, and the fit would lie below the mean.) Raises
    Misconfigured without points."""
    if not any(point.step.num_rows for point in points):
        raise Misconfigured("--calibration: there is no measured step in it", param="calibration")
    seconds = np.array([point.seconds for point in points])
    columns = np.array(
        [[float(point.step.num_rows > 0), *point.step[:4], point.num_requests] for point in points], dtype=np.float64
    )
    is_step = columns[:, 0] > 0
    fitted, predicted, used = _fitted(columns, seconds, is_step)
    tells = len(np.unique(columns[is_step & used], axis=0)) > np.count_nonzero(fitted)
    error, worst = _errors(predicted[is_step & used], seconds[is_step & used]) if tells else (None, None)
    single = is_step & np.array([not point.several and not point.num_requests for point in points])
    excess = (seconds - predicted)[single & ~used]
    stalls = _quantiles(excess) if len(excess) >= LEAST_STALLS else ()
    ratios = (seconds / predicted)[single & used]
    return Calibrated(
        base_s=float(fitted[0]),
        row_s=float(fitted[1]),
        token_s=float(fitted[2]),
        read_s=float(fitted[3]),
        attended_s=float(fitted[4]),
        request_s=float(fitted[5]),
        ratios=_quantiles(ratios / ratios.mean()) if len(ratios) >= LEAST_FOR_RATIOS else (),
        stalls_s=stalls,
        stalls_per_s=len(excess) / float(predicted[single].sum()) if stalls else 0.0,
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


def _quantiles(values: Any) -> tuple[float, ...]:
    """Enough quantiles to describe the distribution, with the same mean."""
    num = min(NUM_RATIOS, len(values))
    quantiles = np.quantile(values, (np.arange(num) + 0.5) / num)
    return tuple(float(one) for one in quantiles * (values.mean() / quantiles.mean()))


def non_negative(matrix: Any, target: Any) -> Any:
    """Least squares with every coefficient at least 0: the active-set method of Lawson and Hanson (1974), ch. 23."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    num = scaled.shape[1]
    found, passive = np.zeros(num), np.zeros(num, dtype=bool)
    for _ in range(10 * num):
        gain = scaled.T @ (target - scaled @ found)
        if passive.all() or gain[~passive].max() <= 1e-10:
            break
        passive[np.where(passive, -np.inf, gain).argmax()] = True
        while True:
            trial = np.zeros(num)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            if trial[passive].min() > 0:
                break
            falling = passive & (trial <= 0)
            reach = (found[falling] / (found[falling] - trial[falling])).min()
            found = found + reach * (trial - found)
            passive &= found > 1e-15
        found = trial
    return found / scale


def read_points(path: Path) -> list[MeasuredStep]:
    """Reads measured steps. Raises Misconfigured.

    - a JSON list of steps: `rows` (pairs of computed tokens and context after them, one a sequence) and `seconds`
    - the output of `baton bench --profile FILE`: each step of each worker, with the host's work
    - the output of `baton bench --concurrency N --json FILE`: the mean time per token is that of the mean step, which
      has N sequences and prefills the others' prompts; with N = 1 the mean time to the first token is a step that
      prefills a prompt, plus the time of a request besides its steps
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfigured(f"--calibration {path}: {unusable(error)}", param="calibration") from error
    except ValueError as error:
        raise Misconfigured(f"--calibration {path}: it is not JSON: {error}", param="calibration") from error
    try:
        points = _points(content)
        if not any(point.step.num_rows for point in points):
            raise ValueError("there is no measured step in it")
        return points
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error}; " if isinstance(error, ValueError) else ""
        raise Misconfigured(
            f"--calibration {path}: {why}give a JSON list of steps with rows and seconds, or what baton bench wrote "
            "with --profile, or with --concurrency and --json",
            param="calibration",
        ) from error


def _points(content: Any) -> list[MeasuredStep]:
    if isinstance(content, dict):
        return _steps_of_profile(content["traceEvents"]) if "traceEvents" in content else _steps_of_bench(content)
    return [
        MeasuredStep(
            step=step_of([(int(computed), int(context)) for computed, context in one["rows"]]),
            seconds=float(one["seconds"]),
        )
        for one in content
    ]


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


def _steps_of_bench(document: dict[str, Any]) -> list[MeasuredStep]:
    if (at_once := document["workload"]["concurrency"]) is None:
        raise ValueError("it was measured with arrivals: run the bench with --concurrency")
    figures = document["figures"]
    prompt = figures["num_prompt_tokens"] / figures["num_completed"]
    answer = figures["num_output_tokens"] / figures["num_completed"]
    alone, context = step_of([(prompt, prompt)]), prompt + answer / 2
    read = (at_once - 1) / answer  # prompts per step: the others' prompts are prefilled while this answer decodes
    mean = StepWork(
        num_rows=at_once,
        num_tokens=at_once + read * alone.num_tokens,
        num_read=at_once * context + read * alone.num_read,
        num_attended=at_once * context + read * alone.num_attended,
    )
    steps = [MeasuredStep(step=mean, seconds=figures["tpot_s"]["mean"], several=True)]
    if at_once == 1:
        steps.append(MeasuredStep(step=alone, seconds=figures["ttft_s"]["mean"], num_requests=1, several=True))
    return steps
