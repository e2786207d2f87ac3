"""The rate at which running jobs end, which is the rate at which waiting ones begin. Pure: time is an argument.

    ends ÷ time         since the queue formed; too low while jobs that began together have not ended
    running ÷ service   Little's law. A job is expected to run for twice the mean age of the running ones, or for less
                        if they have more than half of their `max_tokens`

Each can be too low, so the larger one counts: a refusal is then a sure one.
"""

from __future__ import annotations

from router.admission.retry_queue import Rate

HALF_LIFE_S = 10.0
LEAST_JOBS = 8  # that run or have ended, before their rate refuses others


class Turnover:
    """The rate of one gateway process, and so its share of the fleet. `num_output`: tokens that the running jobs
    have."""

    def __init__(self) -> None:
        self._ended = Rate(half_life_s=HALF_LIFE_S)  # since the queue formed
        self._num_running = self.num_output = self._num_asked = 0
        self._began_s = 0.0  # the sum of the running jobs' begins

    def form_queue(self, now: float) -> None:
        """Measures ends anew: before, workers had too little to do."""
        self._ended.begin(now)

    def begin(self, max_tokens: int, *, now: float) -> None:
        self._num_running += 1
        self._num_asked += max_tokens
        self._began_s += now

    def end(self, max_tokens: int, num_output: int, *, began_s: float, now: float) -> None:
        self._num_running -= 1
        self._num_asked -= max_tokens
        self.num_output -= num_output
        self._began_s -= began_s
        self._ended.observe(1, now)

    def at(self, now: float) -> float:
        """Jobs per second; 0 while it is not known."""
        ended = self._ended.at(now) or 0.0
        if self._num_running < LEAST_JOBS:
            return ended
        age_s = max(1e-6, now - self._began_s / self._num_running)
        service_s = age_s / max(0.5, self.num_output / max(1, self._num_asked))
        return max(ended, self._num_running / service_s)

    @property
    def is_sure(self) -> bool:
        return max(self._num_running, self._ended.num_observed) >= LEAST_JOBS
