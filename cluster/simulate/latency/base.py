"""The interface of the models of a step's time, and the model that is fitted to measured steps.

roofline of each kind of kernel (`cluster.simulate.latency.roofline`) aiconfigurator measured kernels, looked up
(`cluster.simulate.latency.aiconfigurator`) calibrated a + b * sampled rows + c * computed tokens + d * tokens read
back, none below 0, fitted to measurements (`cluster.simulate.latency.calibration`), and how single steps scatter about
that
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
    """The work of a step. `num_rows`: sequences; `num_tokens`: computed tokens; `num_read`: KV positions that are read,
    once per row; `num_attended`: pairs of a computed position and one it attends to. Means over steps may be fractions.
    """

    num_rows: float
    num_tokens: float
    num_read: float
    num_attended: float
    num_single: float = 0.0
    num_single_read: float = 0.0


class Latency(Protocol):
    """The usual time of a step. A device's `chance` varies single steps; None for no variation."""

    def step_s(self, step: StepWork) -> float: ...

    def chance(self, key: str) -> Chance | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """`request_s`: time of a request besides its steps. `ratios`: quantiles of measured / usual time of single steps,
    with mean 1; empty if unknown. `stalls_per_s` and `stalls_s`: how often, per second of steps, another program had
    the core, and how long. `error`: the mean of |predicted / measured - 1| over the fitted points, or over groups of
    equal points; `worst`: the largest. Both are None if there are no more points than coefficients, as any model fits
    them."""

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
        """The variation of one device."""
        return Chance(self, key) if self.ratios or self.stalls_s else None

    @property
    def spread(self) -> float:
        """The standard deviation of `ratios`."""
        return float(np.std(self.ratios)) if self.ratios else 0.0

    @property
    def stalled(self) -> float:
        """The factor by which stalls lengthen steps."""
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
    """The time of a step that usually takes `usual_s`. It depends on `key` and the step's number only, so that the
    order of calls does not matter. Mixed as in Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
    (2014)."""

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
        """A number from 0 to 1."""
        state = (self._key + number * 0x9E3779B97F4A7C15) & _WORD
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _WORD
        return (state ^ (state >> 31)) * 2.0**-64 * (1 - 2**-53)


WindowShares = Sequence[tuple[int | None, float]]
"""The windows of a model's layers (None: no window), each with its share of the layers; empty if there are none."""


def windowed_step_of(rows: Sequence[tuple[int, int]], shares: WindowShares) -> StepWork:
    """The same of a model with windows: what is read and attended to is the mean over its layers."""
    num_read = num_attended = num_single_read = 0.0
    for window, share in shares:
        for computed, context in rows:
            first = 0 if window is None else max(0, context - computed + 1 - window)
            num_read += share * (context - first)
            num_attended += share * (_attended(context, window) - _attended(context - computed, window))
            if computed == 1:
                num_single_read += share * (context - first)
    num_single = sum([computed == 1 for computed, _ in rows])
    num_tokens = sum([computed for computed, _ in rows])
    return StepWork(len(rows), num_tokens, num_read, num_attended, num_single, num_single_read)


def _attended(num_tokens: int, window: int | None) -> int:
    """Pairs of one of the first `num_tokens` positions and one that it attends to."""
    growing = num_tokens if window is None else min(num_tokens, window)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * growing


def step_of(rows: Sequence[tuple[float, float]]) -> StepWork:
    """Adds up (computed tokens, context after them) of every row."""
    num_tokens = num_read = num_attended = num_single = num_single_read = 0.0
    for computed, context in rows:
        num_tokens += computed
        num_read += context
        num_attended += computed * (context - (computed - 1) / 2)
        if computed == 1:
            num_single += 1.0
            num_single_read += context
    return StepWork(len(rows), num_tokens, num_read, num_attended, num_single, num_single_read)
