"""What the models of a step's time have in common, and the one that is fitted to steps of one's own.

roofline        of each kind of kernel (`cluster.simulate.latency.roofline`)
aiconfigurator  measured kernels, looked up (`cluster.simulate.latency.aiconfigurator`)
calibrated      a + b * sampled rows + c * computed tokens + d * tokens read back, none below 0, fitted to measurements
                (`cluster.simulate.latency.calibration`), and how single steps scatter about that
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from protos.hints import counted

_WORD = 2**64 - 1


class StepWork(NamedTuple):
    """What a step's time depends on. `num_rows` sequences, `num_tokens` computed in all; `num_read`: positions of KV
    that are read, each once a row; `num_attended`: pairs of a computed position and one it looks at. Fractions are of
    a mean over steps."""

    num_rows: float
    num_tokens: float
    num_read: float
    num_attended: float
    num_single: float = 0.0
    num_single_read: float = 0.0


class Latency(Protocol):
    """How long a step usually takes; `chance` of a device says how single ones differ, None if they do not."""

    def step_s(self, step: StepWork) -> float: ...

    def chance(self, key: str) -> Chance | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """`request_s` is what a request takes beside its steps. `ratios`: how long single steps took, of what is told here,
    as that many quantiles whose mean is 1; none where that is not known. So many times in a second of steps something
    else had their core, `stalls_s` long. `error` is the mean of
    |predicted / measured - 1| over the points it was fitted to, or over groups of points that are alike, `worst` the
    largest; None where there are no more points than fitted coefficients, which any model would meet."""

    base_s: float
    row_s: float
    token_s: float
    read_s: float
    attended_s: float
    request_s: float = 0.0
    ratios: tuple[float, ...] = ()
    stalls_s: tuple[float, ...] = ()
    stalls_per_s: float = 0.0
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

    def chance(self, key: str) -> Chance | None:
        """Of one device."""
        return Chance(self, key) if self.ratios or self.stalls_s else None

    @property
    def spread(self) -> float:
        """The standard deviation of `ratios`."""
        return float(np.std(self.ratios)) if self.ratios else 0.0

    @property
    def stalled(self) -> float:
        """How much stalls add to steps' time."""
        return self.stalls_per_s * float(np.mean(self.stalls_s)) if self.stalls_s else 0.0

    def __str__(self) -> str:
        steps = counted(self.num_points, "step")
        if self.error is None or self.worst is None:
            off = "too few points to know its error: measure more, of different sizes"
        else:
            off = f"off by {self.error:.1%} on average, {self.worst:.1%} at most"
        scatter = f"; single ones scatter by {self.spread:.0%}, stalls take {self.stalled:.0%}" if self.ratios else ""
        rest = f"; a request takes {self.request_s * 1000:.1f} ms beside them" if self.request_s else ""
        return f"calibrated on {steps}: {off}{scatter}{rest}"


class Chance:
    """How long a device's step takes that usually takes `usual_s`: besides, a function of `key` and the step's number
    alone, so that it does not matter when it is asked for. Mixed as in Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators" (2014)."""

    def __init__(self, calibrated: Calibrated, key: str) -> None:
        self._ratios = calibrated.ratios or (1.0,)
        self._stalls_s = calibrated.stalls_s
        self._stalls_per_s = calibrated.stalls_per_s
        self._key = random.Random(key).getrandbits(64)

    def step_s(self, number: int, usual_s: float) -> float:
        taken_s = usual_s * self._ratios[int(self._share(3 * number) * len(self._ratios))]
        if self._stalls_s and self._share(3 * number + 1) < usual_s * self._stalls_per_s:
            taken_s += self._stalls_s[int(self._share(3 * number + 2) * len(self._stalls_s))]
        return taken_s

    def _share(self, number: int) -> float:
        """From 0 to 1."""
        state = (self._key + number * 0x9E3779B97F4A7C15) & _WORD
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _WORD
        return (state ^ (state >> 31)) * 2.0**-64 * (1 - 2**-53)


def step_of(rows: Sequence[tuple[float, float]]) -> StepWork:
    """From (computed tokens, context after them) of every row."""
    num_tokens = num_read = num_attended = num_single = num_single_read = 0.0
    for computed, context in rows:
        num_tokens += computed
        num_read += context
        num_attended += computed * (context - (computed - 1) / 2)
        if computed == 1:
            num_single += 1.0
            num_single_read += context
    return StepWork(len(rows), num_tokens, num_read, num_attended, num_single, num_single_read)
