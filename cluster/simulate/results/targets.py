"""Targets of a swept cluster: shares of requests within bounds.

``TTFT p90 < 2 s`` holds if at least 90 % of the requests have their first token within 2 s. Requests that failed or
were never sent are within no bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.bench_report import Objective, RequestRecord
from protos.errors import Misconfigured

METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
_TEXT = re.compile(r"(\w+)\s+p(\d+(?:\.\d+)?)\s*<?=?\s*(\d+(?:\.\d+)?)\s*(ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileTarget:
    """A `share` of the requests must be within `bound_s` by one metric, or meet the `objective`."""

    share: float
    metric: str = ""
    bound_s: float = math.inf
    objective: Objective | None = None

    @classmethod
    def parse(cls, text: str) -> PercentileTarget:
        """Parses "ttft p90 < 2 s" or "tpot p99 50ms". Raises Misconfigured."""
        parsed = _TEXT.fullmatch(text.strip().lower())
        metric, percent, bound, unit = parsed.groups() if parsed else ("", "0", "0", "s")
        if metric not in METRICS or not 0 < float(percent) < 100 or not float(bound) > 0:
            raise Misconfigured(
                f"objectives.targets: {text!r}: give a metric of {', '.join(METRICS)}, a percentile between p0 and "
                "p100, and a time, such as 'ttft p90 < 2 s'",
                param="objectives.targets",
            )
        return cls(share=float(percent) / 100, metric=metric, bound_s=float(bound) / (1000 if unit == "ms" else 1))

    def __str__(self) -> str:
        if self.objective is not None:
            return f"the objective for {self.share:.0%} of the requests"
        return f"{self.name} < {self.bound_s * 1000:g} ms"

    @property
    def name(self) -> str:
        return "met" if self.objective is not None else f"{self.metric.upper()} p{self.share * 100:g}"

    def reached(self, records: Sequence[RequestRecord], num_not_asked: int) -> Reached:
        num_asked = len(records) + num_not_asked
        if self.objective is not None:
            num_within, value_s = sum(map(self.objective.met, records)), math.nan
        else:
            num_asked -= sum(self._is_without(record) for record in records)
            values = sorted(self._value_s(record) for record in records if not self._is_without(record))
            num_within = sum(value < self.bound_s for value in values)
            place = math.ceil(self.share * num_asked) - 1
            value_s = values[place] if 0 <= place < len(values) else math.inf
        return Reached(target=self, share=num_within / num_asked if num_asked else 1.0, value_s=value_s)

    def _is_without(self, record: RequestRecord) -> bool:
        """A complete answer of one token has no time per further token."""
        return not record.error and getattr(record, METRICS[self.metric]) is None

    def _value_s(self, record: RequestRecord) -> float:
        return math.inf if record.error else float(getattr(record, METRICS[self.metric]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    target: PercentileTarget
    share: float
    value_s: float

    @property
    def is_met(self) -> bool:
        return self.share >= self.target.share

    @property
    def ratio(self) -> float:
        """0 if no bound could be kept, above 1 with something to spare."""
        if self.target.objective is not None:
            return self.share / self.target.share if self.target.share else 1.0 + self.share
        return self.target.bound_s / self.value_s if self.value_s else math.inf

    @property
    def figure(self) -> str:
        if self.target.objective is not None:
            return f"{self.share:.1%}"
        return f"{self.value_s * 1000:,.1f}" if math.isfinite(self.value_s) else "never"


def targets_of(objective: Objective, attainment: float, texts: Sequence[str]) -> tuple[PercentileTarget, ...]:
    """Raises Misconfigured for invalid targets, or for none."""
    share = (PercentileTarget(share=attainment, objective=objective),) if objective.given else ()
    targets = (*share, *(PercentileTarget.parse(text) for text in texts))
    if not targets:
        raise Misconfigured(
            "objectives: clusters are compared by targets: give targets = ['ttft p90 < 2 s'], ttft_ms or tpot_ms",
            param="objectives.targets",
        )
    return targets
