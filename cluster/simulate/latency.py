"""How long a step takes: from a roofline of public figures, or from steps that were measured.

roofline    max(arithmetic / rate, bytes / bandwidth) + what its kernels' launches and its reductions cost
calibrated  a + b * sampled rows + c * computed tokens + d * tokens read back, none below 0, fitted to measurements;
            and what a request takes beside its steps: its way to a worker and its first token's way back
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from cluster.simulate.shapes import Gpu, Model
from protos.errors import Misconfigured


class Step(NamedTuple):
    """What a step's time depends on. `num_rows` sequences, `num_tokens` computed in all; `num_read`: positions of KV
    that are read, each once a row; `num_attended`: pairs of a computed position and one it looks at. Fractions are of
    a mean over steps."""

    num_rows: float
    num_tokens: float
    num_read: float
    num_attended: float


class Latency(Protocol):
    """Never shorter for a step with more context: that is what leaps rely on."""

    def step_s(self, step: Step) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Williams, Waterman, Patterson, "Roofline" (2009), over a whole step, on `tp` GPUs of a host.

    `compute_share` and `memory_share` are what large matrix products and streaming reads reach of the makers' figures
    on these cards; `launch_s` is a step's host work and kernel launches, `reduce_s` the latency of one all-reduce.
    """

    gpu: Gpu
    model: Model
    tp: int = 1
    compute_share: float = 0.6
    memory_share: float = 0.75
    launch_s: float = 0.002
    reduce_s: float = 8e-6

    def step_s(self, step: Step) -> float:
        gpu, model, tp = self.gpu, self.model, self.tp
        rate = (gpu.flops if model.weight_bytes > 1 else gpu.fp8_flops) * tp * self.compute_share
        flops = 2 * model.active_params * step.num_tokens
        flops += 4 * model.layers * model.heads * model.head_dim * step.num_attended
        moved = model.touched_params(step.num_tokens) * model.weight_bytes + step.num_read * model.kv_bytes
        device_s = max(flops / rate, moved / (gpu.memory_rate * tp * self.memory_share))
        return device_s + self.launch_s + self._reduce_s(step.num_tokens)

    def _reduce_s(self, num_tokens: float) -> float:
        """Two all-reduces a layer, each 2 (tp - 1) / tp of the activations over every GPU's link."""
        if self.tp == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden * 2 * 2 * (self.tp - 1) / self.tp
        return 2 * self.model.layers * (self.reduce_s + num_bytes / self.gpu.link_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step, or the mean of several, and how long it took. A client that saw it also waited for what `num_requests`
    take beside their steps."""

    step: Step
    seconds: float
    num_requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """`request_s` is what a request takes beside its steps. `error` is the mean of |predicted / measured - 1| over the
    points it was fitted to, `worst` the largest."""

    base_s: float
    row_s: float
    token_s: float
    read_s: float
    attended_s: float
    request_s: float = 0.0
    num_points: int = 0
    error: float = 0.0
    worst: float = 0.0

    def step_s(self, step: Step) -> float:
        return (
            self.base_s
            + self.row_s * step.num_rows
            + self.token_s * step.num_tokens
            + self.read_s * step.num_read
            + self.attended_s * step.num_attended
        )

    def __str__(self) -> str:
        return (
            f"calibrated on {self.num_points} steps: off by {self.error:.1%} on average, {self.worst:.1%} at most; "
            f"a request takes {self.request_s * 1000:.1f} ms beside them"
        )


def calibrate(points: Sequence[Measured]) -> Calibrated:
    """Least squares of relative errors with no coefficient below 0. Raises Misconfigured without points."""
    if not points:
        raise Misconfigured("--calibration: there is no measured step in it", param="calibration")
    seconds = np.array([point.seconds for point in points])
    columns = np.array([[1.0, *point.step, point.num_requests] for point in points], dtype=np.float64)
    fitted = non_negative(columns / seconds[:, None], np.ones(len(points)))
    off = np.abs(columns @ fitted / seconds - 1)
    return Calibrated(
        base_s=float(fitted[0]),
        row_s=float(fitted[1]),
        token_s=float(fitted[2]),
        read_s=float(fitted[3]),
        attended_s=float(fitted[4]),
        request_s=float(fitted[5]),
        num_points=len(points),
        error=float(off.mean()),
        worst=float(off.max()),
    )


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


def read_points(path: Path) -> list[Measured]:
    """From a JSON list of steps: `rows` (pairs of computed tokens and context after them, one a sequence) and
    `seconds`. From what `baton bench --profile FILE` wrote: each step of each worker, with the host's work. Or from
    what `baton bench --concurrency N --json FILE` wrote: the mean time per token is that of the mean step, in which N
    sequences are, and the others' prompts are read; with N = 1 the mean time to the first token is a step that reads a
    prompt, and what a request takes besides. Raises Misconfigured."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfigured(f"--calibration {path}: {error.strerror}", param="calibration") from error
    except ValueError as error:
        raise Misconfigured(f"--calibration {path}: it is not JSON: {error}", param="calibration") from error
    try:
        if isinstance(content, dict):
            return _steps_of_profile(content["traceEvents"]) if "traceEvents" in content else _steps_of_bench(content)
        return [
            Measured(
                step=step_of([(int(computed), int(context)) for computed, context in one["rows"]]),
                seconds=float(one["seconds"]),
            )
            for one in content
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise Misconfigured(
            f"--calibration {path}: give a JSON list of steps with rows and seconds, or what baton bench wrote with "
            f"--profile, or with --concurrency and --json ({error!r})",
            param="calibration",
        ) from error


def _steps_of_profile(events: Sequence[dict[str, Any]]) -> list[Measured]:
    """A step lasts from the tick before it was planned to the end of what it changed, on the engine's thread: with
    steps in flight, as long as steps follow one another."""
    steps, ticks = [], {}
    for event in sorted((one for one in events if one["ph"] == "X"), key=lambda one: (one["ts"], -one["dur"])):
        if event["name"] == "tick":
            ticks[event["pid"]] = event["ts"]
        elif event["name"] == "apply" and event["pid"] in ticks:
            if "num_read" not in (told := event["args"]):
                raise ValueError("it was recorded before steps told what they read: record it again")
            step = Step(*(float(told[name]) for name in ("num_rows", "num_tokens", "num_read", "num_attended")))
            steps.append(Measured(step=step, seconds=(event["ts"] + event["dur"] - ticks.pop(event["pid"])) / 1e6))
    return steps


def _steps_of_bench(document: dict[str, Any]) -> list[Measured]:
    if (at_once := document["workload"]["concurrency"]) is None:
        raise ValueError("it was measured with arrivals: run the bench with --concurrency")
    figures = document["figures"]
    prompt = figures["num_prompt_tokens"] / figures["num_completed"]
    answer = figures["num_output_tokens"] / figures["num_completed"]
    alone, context = step_of([(prompt, prompt)]), prompt + answer / 2
    read = (at_once - 1) / answer  # prompts a step: the others' are read while this answer is written
    mean = Step(
        num_rows=at_once,
        num_tokens=at_once + read * alone.num_tokens,
        num_read=at_once * context + read * alone.num_read,
        num_attended=at_once * context + read * alone.num_attended,
    )
    steps = [Measured(step=mean, seconds=figures["tpot_s"]["mean"])]
    if at_once == 1:
        steps.append(Measured(step=alone, seconds=figures["ttft_s"]["mean"], num_requests=1))
    return steps


def step_of(rows: Sequence[tuple[float, float]]) -> Step:
    """From (computed tokens, context after them) of every row."""
    num_tokens = num_read = num_attended = 0.0
    for computed, context in rows:
        num_tokens += computed
        num_read += context
        num_attended += computed * (context - (computed - 1) / 2)
    return Step(num_rows=len(rows), num_tokens=num_tokens, num_read=num_read, num_attended=num_attended)
