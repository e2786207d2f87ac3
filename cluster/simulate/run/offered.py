"""The share of its capacity that a load asks of each pool, by arithmetic, and whether a run lasted long enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from cluster.bench.bench_report import RequestRecord
from cluster.simulate.latency.step_work import step_of, windowed_step_of
from cluster.simulate.node.simulated_worker import Spec
from cluster.simulate.run.simulation_config import SimulationConfig
from cluster.simulate.world.simulated_load import UserSession
from protos.values import WorkerRole

MOST_GROWTH = 1.2
"""The last third of a steady run waits at most this many times as long as the third before it."""
SURE = 3.0
"""Standard errors by which the two thirds must differ."""
LEAST_REQUESTS = 30
"""A third of fewer requests proves nothing."""


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """`num_computed`: prompt tokens that no cache has."""

    num_computed: int
    num_prompt: int
    num_output: int


def work_of_sessions(sessions: Sequence[UserSession]) -> list[OfferedRequest]:
    """Every prefix is computed once, and every answer stays cached."""
    seen: set[tuple[str, object]] = set()
    work = []
    for session in sessions:
        num_prompt = 0
        for turn in session.turns:
            new = [span for span in turn.spans if (session.tenant, span.key) not in seen]
            seen.update((session.tenant, span.key) for span in new)
            num_prompt += turn.num_added
            work.append(OfferedRequest(max(1, sum(span.num_tokens for span in new)), num_prompt, turn.num_output))
            num_prompt += turn.num_output
    return work


def work_of_records(records: Sequence[RequestRecord]) -> list[OfferedRequest]:
    return [
        OfferedRequest(max(1, record.num_prompt - (record.num_cached or 0)), record.num_prompt, record.num_output)
        for record in records
        if not record.error
    ]


def offered(config: SimulationConfig, work: Sequence[OfferedRequest], window_s: float) -> Mapping[WorkerRole, float]:
    """The work of `window_s` seconds over what each pool can do in them; for colocated workers the larger of reading
    and writing. With drafts answers count nothing."""
    if not work or not window_s:
        return {}
    shares = {}
    for role, num_workers in config.pools.counts().items():
        spec = config.spec_of(role)
        reads = role is not WorkerRole.DECODE or not config.pools.counts().get(WorkerRole.PREFILL, 0)
        prompt_s = math.fsum(_prompt_s(spec, request) for request in work) if reads else 0.0
        answer_s = _answer_s(spec, work) if role is not WorkerRole.PREFILL and spec.drafter is None else 0.0
        if num_workers:
            shares[role] = max(prompt_s, answer_s) / (window_s * num_workers)
    return shares


def _step_s(spec: Spec, rows: Sequence[tuple[int, int]]) -> float:
    return spec.latency.step_s(windowed_step_of(rows, spec.shares) if spec.shares else step_of(rows))


def _prompt_s(spec: Spec, request: OfferedRequest) -> float:
    budget = min(spec.scheduler.max_num_batched_tokens, spec.scheduler.prefill_chunk)
    whole, rest = divmod(request.num_computed, budget)
    end = request.num_prompt - request.num_computed
    taken_s = 0.0
    for _ in range(whole):
        end += budget
        taken_s += _step_s(spec, [(budget, end)])
    if rest:
        several = min(spec.scheduler.max_num_batched_tokens // rest, spec.scheduler.max_num_seqs)
        taken_s += _step_s(spec, [(rest, request.num_prompt)] * several) / several
    return taken_s


def _answer_s(spec: Spec, work: Sequence[OfferedRequest]) -> float:
    num_tokens = sum(request.num_output - 1 for request in work)
    if not num_tokens:
        return 0.0
    positions = (request.num_output * (request.num_prompt + request.num_output / 2) for request in work)
    context = round(math.fsum(positions) / sum(request.num_output for request in work))
    capacity = spec.num_blocks * spec.layout.block_size
    num_rows = max(1, min(spec.scheduler.max_num_seqs, capacity // max(1, context)))
    return num_tokens * _step_s(spec, [(1, context)] * num_rows) / num_rows


def requests_until_steady(share: float) -> int:
    """Three relaxation times of a queue that is offered this share of its capacity, in arrivals. For M/M/1 the time is
    1 / (sqrt(service rate) - sqrt(arrival rate))^2 (Morse, "Stochastic properties of waiting lines", 1955)."""
    return math.ceil(3 * share / (1 - math.sqrt(share)) ** 2) if share < 1 else 0


def grows(records: Sequence[RequestRecord]) -> bool:
    """Whether requests of the last third waited longer than those of the third before."""
    sent = sorted((record for record in records if record.sent_s is not None), key=lambda record: record.sent_s or 0.0)
    third = len(sent) // 3
    earlier, later = sent[third : 2 * third], sent[2 * third :]
    return any(_is_longer(_times(later, name), _times(earlier, name)) for name in ("ttft_s", "e2e_s"))


def _times(records: Iterable[RequestRecord], name: str) -> list[float]:
    return [value for record in records if not record.error and (value := getattr(record, name)) is not None]


def _is_longer(later: Sequence[float], earlier: Sequence[float]) -> bool:
    if min(len(later), len(earlier)) < LEAST_REQUESTS:
        return False
    growth = fmean(later) - fmean(earlier)
    error = math.hypot(stdev(later) / math.sqrt(len(later)), stdev(earlier) / math.sqrt(len(earlier)))
    return growth > SURE * error and growth > (MOST_GROWTH - 1) * fmean(earlier)
