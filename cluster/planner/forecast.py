"""Forecasts requests from the present rate and from the same time of other days."""

from __future__ import annotations

import math
from collections.abc import Sequence

QUARTER_S = 900.0
NUM_QUARTERS = 96
_WEIGHT = 0.3
"""The weight of a day: a week ago counts for a twelfth."""
_MOST_GROWTH = 3.0
"""The profile promises at most so many times the present rate."""


def learned(profile: Sequence[float], at_s: float, rate: float, lasted_s: float) -> tuple[float, ...]:
    """Returns the profile after `lasted_s` seconds with this rate of requests."""
    quarter = _quarter(at_s)
    before = profile[quarter]
    weight = 1.0 - (1.0 - _WEIGHT) ** (lasted_s / QUARTER_S)
    changed = list(profile)
    changed[quarter] = rate if not before else before + weight * (rate - before)
    return tuple(changed)


def expected(profile: Sequence[float], at_s: float, rate: float, ahead_s: float) -> float:
    """Returns the largest rate within the next `ahead_s` seconds. An unknown day changes nothing."""
    here = profile[_quarter(at_s)]
    if not here:
        return rate
    quarters = range(_quarter(at_s), _quarter(at_s) + math.ceil(ahead_s / QUARTER_S) + 1)
    until_s = at_s % 86400.0 + ahead_s
    ahead = max(profile[quarter % NUM_QUARTERS] for quarter in quarters if quarter * QUARTER_S <= until_s)
    return rate * min(_MOST_GROWTH, max(1.0, ahead / here))


def _quarter(at_s: float) -> int:
    return int(at_s % 86400.0 // QUARTER_S)
