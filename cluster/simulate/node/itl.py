"""The time between the tokens of each answer (ITL), from the ends of the workers' steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from cluster.bench.bench_report import Percentiles

RESOLUTION = math.log(1.005)  # bins of half a percent: the precision of percentiles, for any number of tokens


class Gaps:
    """The gaps of all answers of a run; the pause of a migration is a gap, too."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}  # by attempt
        self._attempts: dict[str, str] = {}  # the last attempt of each job with a client, "" before the first
        self._seen: dict[int, tuple[int, float]] = {}  # by bin of the logarithm: number of gaps, and their sum
        self._max_s = 0.0

    def begun(self, job: str) -> None:
        """A client waits for the job's tokens from now on."""
        self._attempts[job] = ""

    def made(self, request_ids: Sequence[str], ends_s: Sequence[float]) -> None:
        """Records that each of these steps produced a token of each request."""
        first_s, last_s = ends_s[0], self._last_s
        befores_s = [last_s.get(request_id) for request_id in request_ids]
        last_s.update(dict.fromkeys(request_ids, ends_s[-1]))
        if befores_s.count(befores_s[0]) == len(befores_s) and befores_s[0] is not None:  # the usual case
            num_awaited = len(befores_s)
            self._count(first_s - befores_s[0], num_awaited)
        else:
            num_awaited = self._count_each(first_s, request_ids, befores_s)
        for before_s, after_s in pairwise(ends_s if num_awaited else ()):
            self._count(after_s - before_s, num_awaited)

    def ended(self, job: str) -> None:
        """The client has gone: later tokens do not count."""
        self._last_s.pop(self._attempts.pop(job), None)

    def assert_idle(self) -> None:
        assert not self._attempts, f"{len(self._attempts)} jobs have ended whose gaps are waited for"
        assert not self._last_s, f"the last tokens of {len(self._last_s)} attempts are kept, whose jobs have ended"

    def _count_each(self, first_s: float, request_ids: Sequence[str], befores_s: Sequence[float | None]) -> int:
        """Returns the number of requests with a waiting client."""
        num_awaited, since_s = 0, dict[float, int]()
        for request_id, before_s in zip(request_ids, befores_s, strict=True):
            if before_s is None:
                job = request_id.rpartition(".")[0]
                if job not in self._attempts:
                    del self._last_s[request_id]
                    continue
                before_s = self._begin(job, request_id)
            num_awaited += 1
            if before_s is not None:
                since_s[before_s] = since_s.get(before_s, 0) + 1
        for before_s, times in since_s.items():
            self._count(first_s - before_s, times)
        return num_awaited

    def _begin(self, job: str, request_id: str) -> float | None:
        before, self._attempts[job] = self._attempts[job], request_id
        return self._last_s.pop(before, None)

    def spread(self) -> Percentiles | None:
        """Returns None if no answer had two tokens."""
        ordered = [self._seen[key] for key in sorted(self._seen)]
        num = sum(count for count, _ in ordered)
        if not num:
            return None
        mean = math.fsum(total for _, total in ordered) / num
        p50, p90, p99 = (_percentile(ordered, num, percent) for percent in (50, 90, 99))
        return Percentiles(num=num, mean=mean, p50=p50, p90=p90, p99=p99, max=self._max_s)

    def _count(self, gap_s: float, times: int) -> None:
        key = math.floor(math.log(max(gap_s, 1e-9)) / RESOLUTION)
        count, total = self._seen.get(key, (0, 0.0))
        self._seen[key] = (count + times, total + times * gap_s)
        self._max_s = max(self._max_s, gap_s)


def _percentile(ordered: Sequence[tuple[int, float]], num: int, percent: float) -> float:
    rank = (num - 1) * percent / 100
    passed = 0
    for count, total in ordered:
        passed += count
        if passed > rank:
            return total / count
    raise AssertionError("the rank is below the number of gaps")
