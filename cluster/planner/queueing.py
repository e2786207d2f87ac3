"""How many requests a fleet would serve in time.

requests ─▶ line ─▶ P prefill workers: wait + compute <= ttft ─▶ D decode workers: step(running) <= tpot

- The line is M/G/P: the probability to wait is Erlang's C, a wait is exponential with the mean of Allen and Cunneen
  ("Probability, Statistics, and Queueing Theory", 1990, section 5.3).
- A decode worker runs n = rate * tokens * step(n) sequences (Little's law), with a Poisson number's deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.planner.planner_values import AS_MODELLED, FleetObjective, LoadFactors, Observation, PoolObservation
from protos.values import WorkerRole

_OVERLOADED = 0.01
"""The share that is in time at the limit of what workers can do."""
_STABLE = 1.5 * _OVERLOADED
"""The least share of a fleet that keeps up with the load."""
_PREFILL, _DECODE, _COLOCATED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.COLOCATED


def attainment(
    counts: Mapping[WorkerRole, int],
    rate: float,
    seen: Observation,
    objective: FleetObjective,
    factors: LoadFactors = AS_MODELLED,
) -> float:
    """Share of `rate` requests a second that `counts` workers serve within the objective. Unknown speeds suffice."""
    first, gaps = shares_in_time(counts, rate, seen, objective, factors)
    return first * gaps


def shares_in_time(
    counts: Mapping[WorkerRole, int], rate: float, seen: Observation, objective: FleetObjective, factors: LoadFactors
) -> tuple[float, float]:
    if rate <= 0:
        return 1.0, 1.0
    both, readers, writers = counts.get(_COLOCATED, 0), counts.get(_PREFILL, 0), counts.get(_DECODE, 0)
    read, written = rate * factors.prefill, rate * factors.decode
    if both:
        pool = seen.pools[_COLOCATED]
        share = min(1.0, _busy(read, seen, pool) / both)
        slower = 1.0 / max(1e-9, 1.0 - share)
        gaps = token_gap_share(both, written, seen, pool, objective, slower=slower)
        return first_token_share(both, read, seen, pool, objective), gaps
    if not writers:
        return 0.0, 1.0
    if not readers:  # decode workers compute the prompts (ADR 28)
        return shares_in_time({_COLOCATED: writers}, rate, _as_colocated(seen), objective, factors)
    first = first_token_share(readers, read, seen, seen.pools[_PREFILL], objective)
    return first, token_gap_share(writers, written, seen, seen.pools[_DECODE], objective)


def first_token_share(
    workers: int, rate: float, seen: Observation, pool: PoolObservation, objective: FleetObjective
) -> float:
    speed, quantiles = pool.prefill_tokens_per_s, seen.uncached_tokens
    if speed <= 0 or not quantiles:
        return 1.0
    times = [num_tokens / speed for num_tokens in quantiles]
    mean_s = math.fsum(times) / len(times)
    load = rate * mean_s
    if load >= workers:
        return _OVERLOADED * workers / load
    variance = math.fsum((time_s - mean_s) ** 2 for time_s in times) / len(times)
    spread = 1.0 + (variance / mean_s**2 if mean_s else 0.0)
    wait_s = mean_s * spread / 2.0 / (workers - load)  # of the waiting prompts
    waits = erlang_c(workers, load)
    left = [objective.ttft_s - time_s for time_s in times]
    in_time = [1.0 - waits * math.exp(-slack / wait_s) if slack > 0 and wait_s else float(slack > 0) for slack in left]
    return max(_STABLE, math.fsum(in_time) / len(in_time))


def token_gap_share(
    workers: int,
    rate: float,
    seen: Observation,
    pool: PoolObservation,
    objective: FleetObjective,
    *,
    slower: float = 1.0,
) -> float:
    """`slower`: a step takes this many times as long, because prompts are computed in between."""
    fixed_s, each_s = pool.step_fixed_s * slower, pool.step_each_s * slower
    if fixed_s <= 0:
        return 1.0
    tokens_per_s = rate * seen.answer_tokens / workers
    free = 1.0 - tokens_per_s * each_s
    if free <= 0:
        return _OVERLOADED / (tokens_per_s * each_s)
    running = tokens_per_s * fixed_s / free
    if pool.num_seats and running > pool.num_seats:
        return _OVERLOADED * pool.num_seats / running
    if each_s <= 0:
        return max(_STABLE, float(fixed_s <= objective.tpot_s))
    most = (objective.tpot_s - fixed_s) / each_s
    return max(_STABLE, normal_share((most - running) / math.sqrt(max(running, 1e-9))))


def erlang_c(servers: int, load: float) -> float:
    """The probability that an arrival waits: Erlang's C, by the recursion of his B, which never overflows."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked)) if load < servers else 1.0


def normal_share(deviations: float) -> float:
    """The share of a normal distribution below so many deviations from its mean."""
    return 0.5 * (1.0 + math.erf(deviations / math.sqrt(2.0)))


def _busy(rate: float, seen: Observation, pool: PoolObservation) -> float:
    if pool.prefill_tokens_per_s <= 0 or not seen.uncached_tokens:
        return 0.0
    return rate * mean(seen.uncached_tokens) / pool.prefill_tokens_per_s


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _as_colocated(seen: Observation) -> Observation:
    decode, prefill = seen.pools[_DECODE], seen.pools.get(_PREFILL)
    speed = decode.prefill_tokens_per_s or (prefill.prefill_tokens_per_s if prefill is not None else 0.0)
    return replace(seen, pools={_COLOCATED: replace(decode, prefill_tokens_per_s=speed)})
