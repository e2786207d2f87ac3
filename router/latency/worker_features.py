"""What the predictor knows of workers, each alone: numbers by name, of one worker or, as columns, of many."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from router.policies.table import Floats

Numbers = TypeVar("Numbers", float, Floats)
"""One worker's, or an array of all of theirs."""


class Standing(NamedTuple, Generic[Numbers]):
    """What is known of one worker alone, or of many; NaN where nothing is. A line has a fixed part, and what each unit
    takes."""

    role: Numbers  # its place among all
    num_running: Numbers
    read_speed: Numbers  # tokens a second, as the worker measures it; 0 before
    step_s: Numbers
    lane_s: Numbers  # a byte, as the worker measures it
    load_fixed_s: Numbers
    load_each_s: Numbers
    reading_ratio: Numbers  # how many times longer than expected it takes
    stepping_ratio: Numbers
    awaits_fit: Numbers  # has received, and measured nothing itself: then all lanes' line is what is believed
    fitted_fixed_s: Numbers
    fitted_each_s: Numbers
    recent_tokens: Numbers
    recent_at: Numbers  # by its pool's clock


NOTHING_KNOWN: Standing[float] = Standing(*[math.nan] * len(Standing._fields))


@overload
def where(condition: NDArray[np.bool_], one: Floats | float, other: Floats | float) -> Floats: ...
@overload
def where(condition: bool, one: float, other: float) -> float: ...
def where(condition: bool | NDArray[np.bool_], one: Floats | float, other: Floats | float) -> Floats | float:
    """Of numbers as of arrays."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return one if condition else other
