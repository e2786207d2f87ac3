"""The rate at which running jobs end, which is the rate at which waiting ones begin. Pure: time is an argument.

ends ÷ time         since the queue formed; too low while jobs that began together have not ended
running ÷ service   Little's law. A job is expected to run for twice the mean age of the running ones, or for less
                    if they have more than half of their `max_tokens`
the same of the     Until `YOUNG` of the running jobs have ended: a few long answers make all seem long. The best of
youngest            all numbers of youngest jobs counts, from `YOUNG` of all on"""

from __future__ import annotations

import numpy as np

from router.admission.retry_queue import Rate

HALF_LIFE_S = 10.0
LEAST_JOBS = 8  # running or ended jobs, before their rate refuses others
YOUNG = 0.25  # share of the running jobs


class Turnover:
    """The rate of one gateway process. `num_output`: tokens of the running jobs."""

    def __init__(self) -> None:
        self._ended = Rate(half_life_s=HALF_LIFE_S)  # since the queue formed
        self.num_output = self._num_asked = 0
        self._began_s: dict[int, float] = {}  # of the running jobs, the oldest first

    def form_queue(self, now: float) -> None:
        """Measures ends anew: before, workers had too little to do."""
        self._ended.begin(now)

    def begin(self, number: int, max_tokens: int, *, now: float) -> None:
        self._num_asked += max_tokens
        self._began_s[number] = now

    def end(self, number: int, max_tokens: int, num_output: int, *, now: float) -> None:
        self._num_asked -= max_tokens
        self.num_output -= num_output
        del self._began_s[number]
        self._ended.observe(1, now)

    def at(self, now: float) -> float:
        ended = self._ended.at(now) or 0.0
        num_running = len(self._began_s)
        if num_running < LEAST_JOBS:
            return ended
        ages_s = now - np.fromiter(self._began_s.values(), np.float64)
        rates = np.arange(1, num_running + 1) ** 2 / np.maximum(1e-6, 2 * np.cumsum(ages_s[::-1]))  # of the youngest
        all_rate = 2 * rates[-1] * max(0.5, self.num_output / max(1, self._num_asked))
        num_young = max(LEAST_JOBS, int(YOUNG * num_running))
        young_rate = rates[num_young - 1 :].max() if self._ended.num_observed < num_young else 0.0
        return float(max(ended, all_rate, young_rate))

    @property
    def is_sure(self) -> bool:
        return max(len(self._began_s), self._ended.num_observed) >= LEAST_JOBS
