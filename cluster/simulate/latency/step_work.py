"""The work of a step, and the interface of step times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StepWork(NamedTuple):
    """`num_rows`: sequences; `num_tokens`: computed; `num_read`: KV positions, once per row; `num_attended`: pairs of a
    computed position and one it attends to; `num_single`: rows of one token. Means over steps may be fractions."""

    num_rows: float
    num_tokens: float
    num_read: float
    num_attended: float
    num_single: float = 0.0
    num_single_read: float = 0.0


class Latency(Protocol):
    def step_s(self, step: StepWork) -> float: ...


WindowShares = Sequence[tuple[int | None, float]]
"""The windows of a model's layers (None: no window) with their shares of the layers; empty without windows."""


def windowed_step_of(rows: Sequence[tuple[int, int]], shares: WindowShares) -> StepWork:
    """Adds up rows as `step_of` does. Positions read and attended to are means over the layers."""
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
    """Counts pairs of a position below `num_tokens` and a position to which it attends."""
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
