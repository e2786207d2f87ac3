"""What batches cost people, and what they get: people's requests with and without a batch beside them, simulated.

    python -m benchmarks.batches.interference --rate 8 --requests 600

The batch has prompts of 20 families: a prefix that a family shares, and a part of each line's own. Its lines run
through `router.admission.idle`, as in a gateway, in the order in which a gateway runs them.

Idle tokens are what a batch would compute in the share of the cluster that people leave:

    idle tokens/s = (1 - people's tokens/s / those at saturation) * the batch's tokens/s alone

each with prompts and answers of its own kind, cached tokens left out; saturation is people's load at 50 times its rate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.output import write_figures
from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import RequestRecord
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.run.deployment import SimulatedDeployment
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, simulated_router
from cluster.simulate.world.simulated_load import GeneratedLoad, UserSession, generated
from protos.values import SamplingParams
from router.jobs import Job
from router.router_config import BatchConfig

NUM_FAMILIES = 20
AT_ONCE = 256
PROMPT_IDS = 256
CROWD = 50
"""Times people's rate, at which they take the whole cluster."""


@dataclass(slots=True)
class BatchBeside:
    """What a batch got. `shared`: tokens of prefixes with which an earlier line of the family began, the most that
    caches can have; `cached`: those that they had when the line was first admitted."""

    prompt_tokens: int = 0
    cached: int = 0
    shared: int = 0
    output: int = 0
    lines: int = 0

    @property
    def computed(self) -> int:
        """Tokens of prompts and answers that no cache had."""
        return self.prompt_tokens - self.cached + self.output


def lines(prefix: int, own: int, output: int, a_family: int, seed: int) -> Sequence[Job]:
    """Neighbours share a prefix, `a_family` at a time, as a gateway sorts them."""
    rng = random.Random(seed)
    families = [[rng.randrange(PROMPT_IDS) for _ in range(prefix)] for _ in range(NUM_FAMILIES)]
    return [
        Job(
            request_id=f"batch{number}",
            group_id="batch",
            prompt_ids=(*families[number // a_family % NUM_FAMILIES], *(rng.randrange(PROMPT_IDS) for _ in range(own))),
            sampling=SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
        )
        for number in range(10_000)
    ]


class BatchFeeder:
    """Runs lines beside the load, until it is cancelled."""

    def __init__(self, jobs: Sequence[Job], prefix: int) -> None:
        self._jobs = iter(jobs)
        self._prefix = prefix
        self.begun: set[tuple[int, ...]] = set()
        self.got = BatchBeside()

    async def steer(self, deployment: SimulatedDeployment) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._run(deployment))

    async def _run(self, deployment: SimulatedDeployment) -> None:
        for job in self._jobs:
            deployment.gaps.begun(job.request_id)
            try:
                await self._line(deployment, job)
            finally:
                deployment.gaps.ended(job.request_id)

    async def _line(self, deployment: SimulatedDeployment, job: Job) -> None:
        got, family, cached = self.got, job.prompt_ids[: self._prefix], None
        is_shared = family in self.begun
        self.begun.add(family)
        async with aclosing(deployment.gateways[0].idle(job)) as deltas:
            async for delta in deltas:
                got.output += len(delta.token_ids)
                cached = delta.num_cached_tokens if cached is None else cached
                if delta.finish_reason is not None:
                    got.lines += 1
                    got.prompt_tokens += len(job.prompt_ids)
                    if is_shared:
                        got.shared += len(family)
                        got.cached += min(cached, len(family))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def shown(name: str, records: Sequence[RequestRecord]) -> tuple[float, float]:
    ttft = [one.ttft_s for one in records if one.ttft_s is not None]
    tpot = [one.tpot_s for one in records if one.tpot_s is not None]
    figures = [1000 * percentile(values, share) for values in (ttft, tpot) for share in (0.5, 0.99)]
    print(
        f"{name:>14}: TTFT p50 {figures[0]:7.1f} p99 {figures[1]:7.1f} ms   TPOT p50 {figures[2]:6.2f} p99 "
        f"{figures[3]:6.2f} ms   {len(ttft)} answered, {sum(bool(one.error) for one in records)} failed"
    )
    return figures[1], figures[3]


def fed(
    config: SimulationConfig, sessions: Sequence[UserSession], args: argparse.Namespace
) -> tuple[BatchFeeder, SimulationOutcome]:
    """A simulation with a batch beside the sessions."""
    feeder = BatchFeeder(lines(args.prefix, args.own, args.output, args.lines_a_family, args.seed), args.prefix)
    return feeder, simulate(config, sessions, steer=feeder.steer)


def served(outcome: SimulationOutcome) -> float:
    """People's tokens/s, of prompts and answers."""
    ended = [one for one in outcome.records if not one.error]
    return sum(one.num_prompt + one.num_output for one in ended) / outcome.duration_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--rate", type=float, default=8.0, help="people's requests a second")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--prefix", type=int, default=1536, help="tokens that a family shares")
    parser.add_argument("--own", type=int, default=256, help="tokens of a line's own")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--lines-a-family", type=int, default=50)
    parser.add_argument("--slowdown", type=float, default=BatchConfig().slowdown)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    router = simulated_router("slo")
    config = SimulationConfig(
        pools=PoolsConfig(prefill=args.prefill, decode=args.decode)
        if args.prefill
        else PoolsConfig(colocated=args.decode),
        spec=hardware_spec(gpu="h100", model=args.model, tp=1, leaping=True),
        router=replace(router, batch=replace(router.batch, slowdown=args.slowdown)),
        seed=args.seed,
    )
    load = GeneratedLoad(
        num_requests=args.requests, rate=args.rate, prompts=Lengths(low=500, high=4000),
        outputs=Lengths(low=50, high=400), seed=args.seed,
    )  # fmt: skip
    sessions: list[UserSession] = generated("poisson", load)
    alone = simulate(config, sessions)
    feeder, beside = fed(config, sessions, args)
    before, after = shown("people alone", alone.records), shown("beside a batch", beside.records)
    got, seconds = feeder.got, beside.duration_s
    people = sum(one.num_prompt + one.num_output for one in beside.records) / seconds
    print(f"p99 beside / alone: TTFT {after[0] / before[0]:.3f}, TPOT {after[1] / before[1]:.3f}")
    print(
        f"batch: {got.lines} lines, {(got.prompt_tokens + got.output) / seconds:,.0f} tokens/s beside people's "
        f"{people:,.0f}; {got.output / seconds:,.0f} of an answer"
    )
    crowd = simulate(config, generated("poisson", replace(load, rate=CROWD * args.rate)))
    quiet: list[UserSession] = generated("poisson", replace(load, num_requests=2, rate=2 / alone.duration_s))
    lone, empty = fed(config, quiet, args)
    used = served(beside) / served(crowd)
    idle = (1 - used) * lone.got.computed / empty.duration_s
    print(
        f"people take {used:.0%} of the cluster; alone the batch computes {lone.got.computed / empty.duration_s:,.0f} "
        f"tokens/s, beside them {got.computed / seconds:,.0f}: {got.computed / seconds / idle:.0%} of the idle tokens"
    )
    write_figures(
        args.json, ttft_ratio=after[0] / before[0], tpot_ratio=after[1] / before[1], lines=got.lines,
        people_tokens_per_s=people, batch_tokens_per_s=(got.prompt_tokens + got.output) / seconds,
        computed_per_s=got.computed / seconds, idle_per_s=idle, cached_share=got.cached / max(1, got.shared),
    )  # fmt: skip
    if got.shared:
        print(f"cached share of what {len(feeder.begun)} families share: {got.cached / got.shared:.3f}")


if __name__ == "__main__":
    main()
