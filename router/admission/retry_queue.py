"""Retry times of refused requests. Each request gets a time behind those refused before it, at the rate of prefill.

Refused requests return. If all returned at the same moment, they would find the same queue again. So each keeps a place
in a second queue, in the same fair order, which advances by the tokens that are really prefilled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from router.admission.fair_queue import Entry, FairQueue
from router.routing.fits import Decayed

HALF_LIFE_S = 3.0
CALM_S = 10.0  # seconds without a refusal after which the rate is measured again, because the fleet was not busy
LEAST_MEASURED_S = 1.0
MAX_REMEMBERED = 512


class Rate:
    def __init__(self, *, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._begun_s: float | None = None
        self._num_tokens = Decayed(half_life_s=half_life_s)
        self.num_observed = 0

    def begin(self, now: float) -> None:
        self._begun_s, self._num_tokens, self.num_observed = now, Decayed(half_life_s=self._half_life_s), 0

    def observe(self, num_tokens: int, now: float) -> None:
        self.num_observed += 1
        self._num_tokens.age(now)
        self._num_tokens.add(num_tokens)

    def at(self, now: float) -> float | None:
        """The rate; None until it has been measured for long enough, and while nothing is prefilled."""
        [num_tokens] = self._num_tokens.at(now)
        if self._begun_s is None or now - self._begun_s < LEAST_MEASURED_S or not num_tokens:
            return None
        left = float(0.5 ** ((now - self._begun_s) / self._half_life_s))
        return num_tokens / (self._half_life_s / math.log(2) * (1 - left))


class Returning:
    """Refused requests whose turn has not come yet. Time is an argument."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._line = FairQueue(weights)
        self._rate = Rate()
        self._credit = 0.0
        self._moved_s = 0.0
        self._refused_s = -math.inf

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._line.weigh(weights)

    def read(self, num_tokens: int, *, now: float) -> None:
        self._rate.observe(num_tokens, now)

    def after_s(self, entry: Entry, *, speed: float, now: float) -> float:
        """Seconds for which requests refused before `entry` keep the fleet busy, at the measured rate or else at
        `speed` tokens per second. Entries that are refused later return after this one."""
        if now - self._refused_s > CALM_S:
            self._rate.begin(now)
        self._refused_s = now
        rate = self._rate.at(now) or speed
        self._move(rate, now)
        due = replace(entry, deadline_s=math.inf)
        num_ahead = self._line.tokens_ahead(due)
        self._line.push(due)
        if len(self._line) > MAX_REMEMBERED and (last := self._line.last()) is not None:
            self._line.remove(last)
        return num_ahead / rate if rate else 0.0

    def check_integrity(self) -> None:
        self._line.check_integrity()

    def _move(self, rate: float, now: float) -> None:
        self._credit += rate * (now - self._moved_s)
        self._moved_s = now
        while (head := self._line.peek()) is not None and head.num_tokens <= self._credit:
            self._credit -= head.num_tokens
            self._line.charge(head.tenant, num_input=head.num_tokens)
            self._line.remove(head)
        if not self._line:
            self._credit = 0.0
