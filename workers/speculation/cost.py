"""How long a step takes, by its number of computed positions: measured, and fitted where nothing was measured. Pure.

Each number of positions (above `EXACT` some neighbouring numbers together) has a mean of its steps, which fades while
steps of other numbers are measured. An estimate is that mean, drawn towards a straight line through all means, the more
the older it is: so one slow step does not rule out a number of positions forever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

EXACT = 32
KEEP = 0.9
"""Weight of a measurement after the next one of the same number of positions."""
FADE = 0.995
"""Weight of a measurement after each one of another number of positions."""
LINE_WEIGHT = 0.3
"""Measurements that the line counts for."""
FIRST_SLOPE = 0.03
"""Assumed share of a step's time that one more position takes. It is low, so that drafts are tried."""
FIRST_SPREAD = 0.1
"""Weighted squares of positions, about their mean, that this assumption counts for: when measurements of other numbers
have faded, it counts alone."""
MOST_JUMP = 4.0
"""A step that took so much longer than estimated counts as this much: the machine did something else."""


@dataclass(slots=True)
class _Mean:
    seconds: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class StepSeconds:
    """Steps of one engine in which all rows decode."""

    _means: dict[int, _Mean] = field(default_factory=dict)
    _first_s: float = 0.0
    _slope_s: float = 0.0

    def observe(self, num_positions: int, elapsed_s: float) -> None:
        place = _place(num_positions)
        mean = self._means.get(place)
        for other in self._means.values():
            other.weight *= FADE
        if mean is None:
            mean = self._means[place] = _Mean()
        elif mean.weight > 1.0:
            elapsed_s = min(elapsed_s, MOST_JUMP * mean.seconds)
        weight = mean.weight * KEEP
        mean.seconds = (mean.seconds * weight + elapsed_s) / (weight + 1)
        mean.weight = weight + 1
        self._fit()

    def seconds(self, num_positions: int) -> float:
        """0 until a step was measured."""
        line = self._first_s + self._slope_s * num_positions
        mean = self._means.get(_place(num_positions))
        if mean is None:
            return line
        return (mean.seconds * mean.weight + line * LINE_WEIGHT) / (mean.weight + LINE_WEIGHT)

    def _fit(self) -> None:
        """Fits a line by weighted least squares that does not fall; its slope is drawn to the assumed one."""
        total = sum([mean.weight for mean in self._means.values()])
        middle = sum([place * mean.weight for place, mean in self._means.items()]) / total
        middle_s = sum([mean.seconds * mean.weight for mean in self._means.values()]) / total
        spread = sum([mean.weight * (place - middle) ** 2 for place, mean in self._means.items()])
        moment = sum([m.weight * (place - middle) * (m.seconds - middle_s) for place, m in self._means.items()])
        assumed_s = FIRST_SLOPE * middle_s / max(1.0, middle)
        self._slope_s = max(0.0, (moment + FIRST_SPREAD * assumed_s) / (spread + FIRST_SPREAD))
        self._first_s = middle_s - self._slope_s * middle


def _place(num_positions: int) -> int:
    """The number under which this one is counted: itself up to `EXACT`, then multiples of an eighth of the power of two
    below."""
    if num_positions <= EXACT:
        return num_positions
    unit = 1 << (num_positions.bit_length() - 4)
    return num_positions // unit * unit
