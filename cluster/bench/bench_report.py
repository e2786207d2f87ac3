"""Computes the figures of a run from its records: pure arithmetic, no clock.

    sent          first token      ...      last token
      ├── TTFT ──────┤├─ITL─┤├─ITL─┤├─ITL─┤      TPOT = (last - first) / (n - 1)
      └──────────────────── E2E ───────────┘

docs/benchmarking.md defines them in words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.config.scenario import ObjectivesTable


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Seconds are since the start of the run, by a monotonic clock.

    - `due_s`: None in a closed loop
    - `sent_s`: None if it was not sent
    - `arrivals_s`: of each event with tokens
    - `num_cached`: None if the server does not report it
    - `status`: of HTTP; 0 without an answer
    - `error`: "" for a complete answer, else a stable code
    - `retry_after_s`: of a refusal
    - `ended_s`: of the answer's end
    """

    index: int
    due_s: float | None = None
    sent_s: float | None = None
    arrivals_s: tuple[float, ...] = ()
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int | None = None
    status: int = 0
    error: str = ""
    message: str = ""
    retry_after_s: float | None = None
    ended_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sent to the first token."""
        return self._since_sent(0)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from sent to the last token."""
        return self._since_sent(-1)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        if self.num_output < 2 or not self.arrivals_s:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output - 1)

    @property
    def gaps_s(self) -> Iterable[float]:
        """Seconds between events with tokens (ITL)."""
        return (after - before for before, after in pairwise(self.arrivals_s))

    @property
    def late_s(self) -> float | None:
        return None if self.due_s is None or self.sent_s is None else self.sent_s - self.due_s

    def _since_sent(self, event: int) -> float | None:
        if self.sent_s is None or not self.arrivals_s:
            return None
        return self.arrivals_s[event] - self.sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The TTFT and TPOT of a good answer; None: not required."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def of(cls, table: ObjectivesTable) -> Objective:
        ttft_s, tpot_s = (None if ms is None else ms / 1000 for ms in (table.ttft_ms, table.tpot_ms))
        return cls(ttft_s=ttft_s, tpot_s=tpot_s)

    @property
    def given(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, record: RequestRecord) -> bool:
        """An answer of one token has no TPOT to exceed."""
        if record.error or record.ttft_s is None:
            return False
        in_time = self.ttft_s is None or record.ttft_s <= self.ttft_s
        return in_time and (self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Interpolated linearly between neighbouring values."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rates are per second of `duration_s`: from the first request sent to the last token received.

    Times, tokens and rates include complete answers only; `errors` counts failures by code. `goodput` (good answers a
    second) and `good_share` (of all requests) are None without an objective.
    """

    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput: float | None
    good_share: float | None
    cached_share: float | None
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    late_s: Percentiles | None


def make_report(records: Sequence[RequestRecord], objective: Objective) -> Report:
    whole = [record for record in records if not record.error]
    duration_s = _duration_s(records)
    num_prompt = sum(record.num_prompt for record in whole)
    num_output = sum(record.num_output for record in whole)
    num_good = sum(objective.met(record) for record in records) if objective.given else None

    def rate(num: int) -> float:
        return num / duration_s if duration_s > 0 else 0.0

    return Report(
        num_requests=len(records),
        num_completed=len(whole),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        requests_per_s=rate(len(whole)),
        output_tokens_per_s=rate(num_output),
        total_tokens_per_s=rate(num_prompt + num_output),
        goodput=None if num_good is None else rate(num_good),
        good_share=num_good / len(records) if num_good is not None and records else None,
        cached_share=_cached_share(whole),
        ttft_s=spread(record.ttft_s for record in whole),
        tpot_s=spread(record.tpot_s for record in whole),
        itl_s=spread(gap for record in whole for gap in record.gaps_s),
        e2e_s=spread(record.e2e_s for record in whole),
        late_s=spread(record.late_s for record in records),
    )


def spread(values: Iterable[float | None]) -> Percentiles | None:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Percentiles(
        num=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between neighbours, like numpy's default."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _duration_s(records: Sequence[RequestRecord]) -> float:
    sent = [record.sent_s for record in records if record.sent_s is not None]
    came = [record.arrivals_s[-1] for record in records if record.arrivals_s]
    return max(came) - min(sent) if sent and came else 0.0


def _cached_share(whole: Sequence[RequestRecord]) -> float | None:
    telling = [record for record in whole if record.num_cached is not None]
    num_prompt = sum(record.num_prompt for record in telling)
    return sum(record.num_cached or 0 for record in telling) / num_prompt if num_prompt else None
