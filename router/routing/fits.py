"""Estimators of seconds, learned from observations: a line per pool and lane, a factor per worker, and their errors.

An observation counts half after `HALF_LIFE_S`, or after `HALF_COUNT` newer ones. An outlier is moved near the line
before it counts: a stall teaches little, a change of speed is learned soon. Pure: time is an argument.
"""

from __future__ import annotations

import math

from protos.codec import Value
from router.routing.candidate_columns import Line
from router.routing.prefill_speeds import counted


class Decayed:
    """Half of each sum remains after `half_life_s`, and after `half_count` further observations."""

    def __init__(self, num_sums: int = 1, *, half_life_s: float, half_count: float = math.inf) -> None:
        self.sums = [0.0] * num_sums
        self._half_life_s = half_life_s
        self._each = 1 / half_count
        self._since_s = 0.0

    def at(self, now: float) -> list[float]:
        return self._left(max(0.0, now - self._since_s) / self._half_life_s)

    def age(self, now: float) -> None:
        self.sums = self._left(self._each + max(0.0, now - self._since_s) / self._half_life_s)
        self._since_s = now

    def add(self, *values: float) -> None:
        self.sums = [total + value for total, value in zip(self.sums, values, strict=True)]

    def _left(self, halvings: float) -> list[float]:
        share = 0.5**halvings
        return [total * share for total in self.sums]


HALF_LIFE_S = 300.0
HALF_COUNT = 32
TRUST = 2.0  # observations that the prior counts for
SURE = 8.0  # observations after which outliers can be recognised, and workers distinguished from their pool
DOUBT = 1.5  # standard errors by which a worker must differ from its pool
OUTLIER = 4.0  # mean errors: an observation further from the line is an outlier
FAR = 10.0  # times the expected duration: an early observation counts for at most that


class PredictionErrors(Value, frozen=True, kw_only=True):
    """The errors of recent predictions in seconds: the mean size, and the mean with early and late ones cancelling
    out."""

    num_observed: int = 0
    mean_s: float = 0.0
    bias_s: float = 0.0


class ErrorTracker:
    def __init__(self) -> None:
        self.so_far = PredictionErrors()

    def observe(self, seconds: float, expected: float, *, sure: bool) -> float:
        before, error = self.so_far, seconds - expected
        share = max(1 / (before.num_observed + 1), 1 - 0.5 ** (1 / HALF_COUNT))
        size = min(abs(error), 2 * OUTLIER * before.mean_s) if sure else abs(error)
        after = self.so_far = PredictionErrors(
            num_observed=before.num_observed + 1,
            mean_s=before.mean_s + share * (size - before.mean_s),
            bias_s=before.bias_s + share * (error - before.bias_s),
        )
        bound = OUTLIER * after.mean_s
        return expected + min(max(error, -bound), bound) if sure else seconds


class LinearFit:
    """Fits seconds = fixed + each x amount to observations. The prior counts like `TRUST` observations."""

    def __init__(self) -> None:
        self.errors = ErrorTracker()
        self._observed = Decayed(5, half_life_s=HALF_LIFE_S, half_count=HALF_COUNT)  # 1, x, y, xx, xy
        self._known: tuple[Line, Line] | None = None  # a prior, and the line fitted with it

    def observe(self, amount: float, seconds: float, *, prior: Line, now: float) -> None:
        """Compares the observation with `line(prior)` as it was before this call."""
        self._observed.age(now)
        expected = self.line(prior)(amount)
        seconds = self.errors.observe(seconds, expected, sure=self.sure)
        if prior.fixed_s and not self.sure:
            seconds = min(seconds, FAR * expected)  # first observations include touching memory and loading code
        self._observed.add(1, amount, seconds, amount * amount, amount * seconds)
        self._known = None

    @property
    def known(self) -> bool:
        return self._observed.sums[0] > 0

    @property
    def sure(self) -> bool:
        return self._observed.sums[0] >= SURE

    def line(self, prior: Line) -> Line:
        """The fitted line; neither part is negative. The prior counts as observations at the amounts seen so far."""
        if not self.known:
            return prior
        if self._known is None or self._known[0] != prior:
            self._known = (prior, self._fitted(prior))
        return self._known[1]

    def _fitted(self, prior: Line) -> Line:
        weight, x, y, xx, xy = self._observed.sums
        amount = x / weight or 1.0
        half = TRUST / 2  # half of it at amount 0, half at twice the mean
        weight, x, xx = weight + 2 * half, x + half * 2 * amount, xx + half * (2 * amount) ** 2
        y += half * (prior(0) + prior(2 * amount))
        xy += half * 2 * amount * prior(2 * amount)
        spread = weight * xx - x * x
        each = (weight * xy - x * y) / spread if spread > 0 else 0.0
        fixed = (y - each * x) / weight
        if each < 0:  # amounts explain nothing: the prior, scaled to the mean
            ratio = y / (weight * prior(x / weight)) if prior(x / weight) > 0 else 0.0
            return Line(fixed_s=prior.fixed_s * ratio, each_s=prior.each_s * ratio)
        if fixed < 0:
            return Line(each_s=xy / xx)
        return Line(fixed_s=fixed, each_s=each)


class SlowdownFactor:
    """How many times longer than `line` one worker took recently.

    A single number is learned from few observations. A difference that could be chance is ignored: otherwise one of
    several equal workers would get all cheap requests, and a conversation would leave its cached prefix.
    """

    def __init__(self) -> None:
        self.errors = ErrorTracker()
        # weight, seconds taken and expected, deviations from the mean, expected seconds by amount, reported slowness
        self._observed = Decayed(6, half_life_s=HALF_LIFE_S, half_count=HALF_COUNT)
        self._reported = 1.0

    def set_slowness(self, slower: float) -> None:
        """Sets the slowness that the worker's own measurement implies. Lines include it where `counted` does, so past
        observations are rescaled: otherwise it would count twice."""
        share = counted(slower) / counted(self._reported)
        self._reported = slower
        weight, took_s, expected_s, off_s, each_s, reported = self._observed.sums
        if share != 1.0 and weight:
            since = slower * weight / reported
            expected_s += (share - 1) * each_s
            self._observed.sums = [weight, took_s * since, expected_s, off_s * since, each_s * share, slower * weight]

    def observe(self, amount: float, seconds: float, *, line: Line, now: float, learn: bool = True) -> None:
        """Compares the observation with `of(line)` as it was before this call. With `learn` False, while the pool's
        line is unreliable, only the error is kept."""
        if not learn:
            self.errors.observe(seconds, self.of(line)(amount), sure=False)
            return
        observed, expected_s = self._observed, line(amount)
        observed.age(now)
        seconds = self.errors.observe(seconds, self.of(line)(amount), sure=observed.sums[0] >= SURE)
        observed.add(1, seconds, expected_s, 0.0, line.each_s * amount, self._reported)
        observed.sums[3] += abs(seconds - self._mean * expected_s)

    def of(self, line: Line) -> Line:
        ratio = self.ratio
        return Line(fixed_s=line.fixed_s * ratio, each_s=line.each_s * ratio)

    @property
    def ratio(self) -> float:
        weight, _, expected_s, off_s, *_ = self._observed.sums
        if not expected_s:
            return 1.0
        above, error = self._mean - 1, off_s / expected_s / math.sqrt(weight)
        if abs(above) <= DOUBT * error:
            return 1.0
        return 1 + above * (1 - (DOUBT * error / above) ** 2)  # Breiman's garrote: certain differences count in full

    @property
    def _mean(self) -> float:
        weight, took_s, expected_s, *_ = self._observed.sums
        believed_s = TRUST * expected_s / weight
        return max(0.0, took_s + believed_s) / (expected_s + believed_s)
