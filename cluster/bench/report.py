"""From what was seen of each request to the figures of a run: pure arithmetic over values, no clock of its own.

    sent          first token      ...      last token
      ├── TTFT ──────┤├─ITL─┤├─ITL─┤├─ITL─┤      TPOT = (last - first) / (n - 1)
      └──────────────────── E2E ───────────┘

docs/benchmarking.md has the definitions in words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from protos.errors import Misconfigured


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Seconds are since the start of the run, by a clock that never goes back.

    `due_s` is when it should have been sent (None where nothing said when), `sent_s` when it was: None if it never
    came to that. `arrivals_s` has the arrival of each event that brought tokens. `num_cached` is None where the server
    does not tell. `status` is HTTP's, 0 where none came. `error` is "" for a whole answer, else a stable code.
    `retry_after_s` is what whoever refused it said, None if nothing; `ended_s` when the last word had come.
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
        """Sent to first token."""
        return self._since_sent(0)

    @property
    def e2e_s(self) -> float | None:
        """Sent to last token."""
        return self._since_sent(-1)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None for an answer of fewer than two."""
        if self.num_output < 2 or not self.arrivals_s:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output - 1)

    @property
    def gaps_s(self) -> Iterable[float]:
        """Between events that brought tokens: what a reader sees stutter (ITL)."""
        return (after - before for before, after in pairwise(self.arrivals_s))

    @property
    def late_s(self) -> float | None:
        """How long after its time the load client, not the server, sent it."""
        return None if self.due_s is None or self.sent_s is None else self.sent_s - self.due_s

    def _since_sent(self, event: int) -> float | None:
        if self.sent_s is None or not self.arrivals_s:
            return None
        return self.arrivals_s[event] - self.sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an answer must keep to be good; None: that does not matter."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for flag, seconds in (("--ttft-ms", self.ttft_s), ("--tpot-ms", self.tpot_s)):
            if seconds is not None and not 0 < seconds < math.inf:
                raise Misconfigured(f"{flag} {seconds * 1000:g}: give milliseconds, above 0", param=flag[2:])

    @property
    def given(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, record: RequestRecord) -> bool:
        """A failed request never meets it; an answer of one token has no TPOT to miss."""
        if record.error or record.ttft_s is None:
            return False
        in_time = self.ttft_s is None or record.ttft_s <= self.ttft_s
        return in_time and (self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """How values are spread; percentiles are interpolated between the two nearest values."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run's figures. Rates are per second of `duration_s`: from the first request sent to the last token come.

    Times, token counts and rates are of whole answers only; failures are counted in `errors`, by code.
    `goodput` (answers a second that met the objective) and `good_share` (of all requests) are None without one,
    `cached_share` (of prompt tokens) where the server does not tell.
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
    """None where there is nothing to be spread."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Percentiles(
        num=len(known),
        mean=math.fsum(known) / len(known),
        p50=percentile(known, 50),
        p90=percentile(known, 90),
        p99=percentile(known, 99),
        max=known[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, at least one; linear between neighbours, as numpy does it."""
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
