"""How long clients wait between two tokens: one histogram for all answers of an endpoint."""

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


class ItlHistogram:
    """`bounds` are the buckets' upper ends, in seconds. Compiled code counts at `address`."""

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
        """The upper bound of each bucket and the number of gaps up to it, as Prometheus has them."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, None), self._counts.counts, strict=False):
            total += count
            found.append(("+Inf" if bound is None else str(bound), float(total)))
        return found


class ChoiceTimes:
    """The times of a choice's first and last token, by the loop's clock, and the number of its tokens."""

    __slots__ = ("first_s", "itl", "last_s", "num_tokens")

    def __init__(self, itl: ItlHistogram) -> None:
        self.itl = itl
        self.first_s = self.last_s = 0.0
        self.num_tokens = 0

    def begin(self, num_tokens: int, now: float) -> None:
        self.first_s = self.last_s = now
        self.num_tokens = num_tokens

    def came(self, num_tokens: int, now: float) -> None:
        """Tokens after the first ones, together."""
        self.itl.add((now - self.last_s) / num_tokens, num_tokens)
        self.took(num_tokens, now)

    def took(self, num_tokens: int, last_s: float) -> None:
        """Tokens of which a sink has counted the gaps."""
        self.last_s = last_s
        self.num_tokens += num_tokens
