"""The last hour of a gateway: a ring of periods, one every 10 s, which begin at multiples of `PERIOD_S` of the wall
clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

PERIOD_S = 10
NUM_PERIODS = 3600 // PERIOD_S


class HistoryPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: the end of the period, seconds since 1970. `ttft`, `gaps`: times to a first token and between tokens,
    counted by histogram bucket. `requests`, `output_tokens`, `prompt_tokens`: rates a second. `prompt`, `cached`:
    prompt tokens, all and cached. `kv`: KV blocks in use and all, by pool. `ready`: workers that take work, by
    pool."""

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
        return self._ring[-1].at if self._ring else 0

    def add(self, period: HistoryPeriod) -> None:
        assert period.at > self.last_at, "periods are added in their order"
        self._ring.append(period)

    def since(self, at: int) -> Sequence[HistoryPeriod]:
        return [period for period in self._ring if period.at > at]


def view(period: HistoryPeriod, ttft_bounds: Sequence[float], gap_bounds: Sequence[float]) -> dict[str, Any]:
    """Bounds are the upper ends of the buckets, in seconds. A figure without a measurement is None."""
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
    """Interpolates within a bucket as Prometheus's histogram_quantile does. None if nothing was counted."""
    rank, below, low = part * sum(counts), 0.0, 0.0
    if not rank:
        return None
    for high, count in zip(bounds, counts, strict=False):
        if below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below, low = below + count, high
    return bounds[-1]
