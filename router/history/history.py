"""The last hour of a gateway: a ring of periods, kept by each gateway process and merged when somebody reads it.

    HistorySampler ── a HistoryPeriod every 10 s ──▶ History (ring) ── with the rings of the other processes ──▶ merged

Periods begin at multiples of `PERIOD_S` of the wall clock, so that those of all processes are the same ones. A period
keeps counts by histogram bucket: quantiles of several processes cannot be computed from the quantiles of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

PERIOD_S = 10
NUM_PERIODS = 3600 // PERIOD_S


class HistoryPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway process measured in a period.

    - `at`: the end of the period, in seconds since 1970, a multiple of `PERIOD_S`
    - `ttft`, `gaps`: times to a first token and between two tokens, counted by histogram bucket
    - `requests`, `output_tokens`, `prompt_tokens`: rates, a second
    - `prompt`, `cached`: prompt tokens, and how many of them were found in a cache
    - `waiting`, `in_flight`: requests in line at the gateway, and all of them, at the end of the period
    - `worker_waiting`: requests that wait in workers
    - `kv`: for each pool, KV blocks in use and all; `ready`: for each pool, workers that take work
    """

    at: int
    ttft: Sequence[int]
    gaps: Sequence[int]
    requests: float
    output_tokens: float
    prompt_tokens: float
    prompt: int
    cached: int
    waiting: int
    in_flight: int
    worker_waiting: int
    kv: Mapping[str, Sequence[int]]
    ready: Mapping[str, int]


class History:
    """The ring of one gateway process, written and read on its event loop."""

    def __init__(self) -> None:
        self._ring: deque[HistoryPeriod] = deque(maxlen=NUM_PERIODS)

    @property
    def last_at(self) -> int:
        """The end of the latest period; 0 before the first one."""
        return self._ring[-1].at if self._ring else 0

    def add(self, period: HistoryPeriod) -> None:
        assert period.at > self.last_at, "periods are added in their order"
        self._ring.append(period)

    def since(self, at: int) -> Sequence[HistoryPeriod]:
        """The periods that ended later, oldest first."""
        return [period for period in self._ring if period.at > at]


def merged(rings: Iterable[Sequence[HistoryPeriod]]) -> Sequence[HistoryPeriod]:
    """Merges the periods of all gateway processes, oldest first."""
    same: dict[int, list[HistoryPeriod]] = {}
    for ring in rings:
        for period in ring:
            same.setdefault(period.at, []).append(period)
    return [_together(same[at]) for at in sorted(same)[-NUM_PERIODS:]]


def _together(periods: Sequence[HistoryPeriod]) -> HistoryPeriod:
    """What processes count themselves is added up; all of them see the same workers."""
    if len(periods) == 1:
        return periods[0]
    latest = periods[0]
    return HistoryPeriod(
        at=latest.at,
        ttft=[sum(counts) for counts in zip(*(one.ttft for one in periods), strict=True)],
        gaps=[sum(counts) for counts in zip(*(one.gaps for one in periods), strict=True)],
        requests=sum(one.requests for one in periods),
        output_tokens=sum(one.output_tokens for one in periods),
        prompt_tokens=sum(one.prompt_tokens for one in periods),
        prompt=sum(one.prompt for one in periods),
        cached=sum(one.cached for one in periods),
        waiting=sum(one.waiting for one in periods),
        in_flight=sum(one.in_flight for one in periods),
        worker_waiting=max(one.worker_waiting for one in periods),
        kv={pool: max(tuple(one.kv.get(pool, (0, 0))) for one in periods) for pool in latest.kv},
        ready={pool: max(one.ready.get(pool, 0) for one in periods) for pool in latest.ready},
    )


def view(period: HistoryPeriod, ttft_bounds: Sequence[float], gap_bounds: Sequence[float]) -> dict[str, Any]:
    """The period as /admin/history shows it. Bounds are the upper ends of the buckets, in seconds. A figure of which
    nothing was measured is None."""
    return {
        "at": period.at,
        "ttft_p50_s": quantile(ttft_bounds, period.ttft, 0.5),
        "ttft_p95_s": quantile(ttft_bounds, period.ttft, 0.95),
        "tpot_p50_s": quantile(gap_bounds, period.gaps, 0.5),
        "tpot_p95_s": quantile(gap_bounds, period.gaps, 0.95),
        "requests_per_s": period.requests,
        "output_tokens_per_s": period.output_tokens,
        "prompt_tokens_per_s": period.prompt_tokens,
        "hit_rate": period.cached / period.prompt if period.prompt else None,
        "waiting": period.waiting,
        "worker_waiting": period.worker_waiting,
        "in_flight": period.in_flight,
        "kv_use": {pool: used / whole for pool, (used, whole) in period.kv.items() if whole},
        "ready": period.ready,
    }


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """The value that `part` of the counted values do not exceed, interpolated in its bucket as Prometheus's
    histogram_quantile does: beyond the last bound, that bound. None where nothing was counted."""
    rank, below, low = part * sum(counts), 0.0, 0.0
    if not rank:
        return None
    for high, count in zip(bounds, counts, strict=False):
        if below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below, low = below + count, high
    return bounds[-1]
