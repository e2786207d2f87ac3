"""How long clients wait between two tokens, as a histogram that compiled code counts in, too (`shortcut.c`)."""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence

MAX_BOUNDS = 32


class _Counts(ctypes.Structure):
    _fields_ = (
        ("sum", ctypes.c_double),
        ("bounds", ctypes.c_double * MAX_BOUNDS),
        ("counts", ctypes.c_uint64 * (MAX_BOUNDS + 1)),
        ("num", ctypes.c_uint32),
    )


class TokenGaps:
    """Gaps of all answers of an endpoint. `bounds` are the buckets' upper ends, in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert len(bounds) <= MAX_BOUNDS
        self._bounds = tuple(bounds)
        self._counts = _Counts(0.0, tuple(bounds), (), len(bounds))
        self.address = ctypes.addressof(self._counts)

    def add(self, gap_s: float, count: int = 1) -> None:
        self._counts.counts[bisect_left(self._bounds, gap_s)] += count
        self._counts.sum += gap_s * count

    @property
    def sum_s(self) -> float:
        return float(self._counts.sum)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper end and how many gaps are no longer, as Prometheus has them."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, None), self._counts.counts, strict=False):
            total += count
            found.append(("+Inf" if bound is None else str(bound), float(total)))
        return found


class AnswerGaps:
    """Those of one answer's only choice, between which `last_s` (by the loop's clock) is when its last token came."""

    __slots__ = ("last_s", "of_all")

    def __init__(self, of_all: TokenGaps, last_s: float) -> None:
        self.of_all = of_all
        self.last_s = last_s
