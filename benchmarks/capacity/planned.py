"""The planner against static clusters, simulated: `python -m benchmarks.capacity.planned`.

    day     the rate of a day in forty minutes: is the planned fleet as often in time as the cheapest static cluster
            that keeps the objective, and for how many of its GPU hours?
    turn    long prompts, then long answers, on as many GPUs all the time: requests in time a second, against the best
            static split. Either half is within what some split can do, and no split can do both.

The fleet is of Llama-3 8B on H100s by their roofline. An hour of the day lasts 100 s. The planner's patience is shorter
than by default, though longer in hours of that day: 9 and 24 minutes instead of 5 and 15. A decision follows every 5 s,
and a worker starts in 2 s (72 s of that day).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.output import drawing, write_figures
from cluster.bench.bench_load import PrefixSpan
from cluster.bench.bench_report import Objective
from cluster.config.cluster_config import PoolsConfig, SupervisionConfig
from cluster.planner.planner import PlannerSettings
from cluster.planner.planner_values import PlannerPace
from cluster.simulate.run.autoscale import MAX_RECORDS, PlannedRun, autoscaling, planner_settings
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, read_settings, simulated_router
from cluster.simulate.world.simulated_load import SessionTurn, UserSession
from protos.values import WorkerRole

TTFT_S, TPOT_S, ATTAINMENT = 2.0, 0.02, 0.98
OBJECTIVE = Objective(ttft_s=TTFT_S, tpot_s=TPOT_S)
START_S = 2.0  # of a worker
PACE = PlannerPace(settle_s=15.0, rest_s=40.0, horizon_s=75.0, stale_s=20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedScore:
    """`in_time`: the share of all requests; `good_per_s`: those in time a second; `gpu_hours`: of workers' lives;
    `changes`: (second, prefill workers, decode workers, reason) of the planned ones."""

    fleet: str
    in_time: float
    good_per_s: float
    gpu_hours: float
    changes: tuple[tuple[float, int, int, str], ...] = ()


_BIN_S = 20.0
PlannedRuns = tuple[Sequence[float], Sequence[PlannedScore]]
"""When each request is due, and the scores, the planned fleet's last."""


def day(seed: int, day_s: float, peak: float) -> list[UserSession]:
    """Quiet nights, a peak in the afternoon: arrivals by thinning."""
    rng = random.Random(f"{seed} day")
    dues = _thinned(rng, day_s, peak)
    return [_one(number, due_s, rng.randint(3000, 15000), rng.randint(50, 350)) for number, due_s in enumerate(dues)]


def _thinned(rng: random.Random, day_s: float, peak: float) -> Iterator[float]:
    due_s = 0.0
    while (due_s := due_s + rng.expovariate(peak)) < day_s:
        hour = 24.0 * due_s / day_s
        share = 0.08 + 0.92 * (math.sin(math.pi * (hour - 6.0) / 16.0) ** 2 if 6.0 < hour < 22.0 else 0.0)
        if rng.random() < share:
            yield due_s


def turn(seed: int, half_s: float, rates: Sequence[float]) -> list[UserSession]:
    """For `half_s` long prompts with short answers, then short prompts with long answers."""
    rng, due_s = random.Random(f"{seed} turn"), 0.0
    sessions: list[UserSession] = []
    while (due_s := due_s + rng.expovariate(rates[due_s >= half_s])) < 2 * half_s:
        lengths = (rng.randint(200, 800), rng.randint(400, 900)) if due_s >= half_s else (
            rng.randint(6000, 12000), rng.randint(10, 40)
        )  # fmt: skip
        sessions.append(_one(len(sessions), due_s, *lengths))
    return sessions


def _one(number: int, due_s: float, num_prompt: int, num_output: int) -> UserSession:
    prompt = PrefixSpan(key=(number, 0), num_tokens=num_prompt)
    return UserSession(number=number, due_s=due_s, turns=(SessionTurn(spans=(prompt,), num_output=num_output),))


def config_of(prefill: int, decode: int, seed: int) -> SimulationConfig:
    spec = hardware_spec(
        gpu="h100", model="llama-3-8b", tp=1, settings=read_settings("worker.block_size=16"), leaping=True
    )
    return SimulationConfig(
        pools=PoolsConfig(prefill=prefill, decode=decode), spec=spec,
        router=replace(simulated_router(), decision_history_size=MAX_RECORDS),
        supervision=SupervisionConfig(grace_s=5.0), load_s=START_S, seed=seed,
    )  # fmt: skip


def run(
    fleet: str, config: SimulationConfig, sessions: Sequence[UserSession], planner: PlannerSettings | None
) -> PlannedScore:
    planned, since_s = PlannedRun(), time.monotonic()
    outcome = simulate(config, sessions, steer=None if planner is None else autoscaling(planner, planned))
    kept = sum(OBJECTIVE.met(one) for one in outcome.records)
    score = PlannedScore(
        fleet=fleet,
        in_time=kept / len(sessions),
        good_per_s=kept / max(one.due_s for one in sessions),
        gpu_hours=sum(life.lived_s for life in outcome.served) / 3600,
        changes=tuple(
            (one.at_s, one.after.counts[WorkerRole.PREFILL], one.after.counts[WorkerRole.DECODE], one.why)
            for one in planned.changes
        ),
    )
    sys.stdout.write(
        f"{fleet:24} in time {score.in_time:7.2%}  good/s {score.good_per_s:6.2f}  GPU hours {score.gpu_hours:6.3f}"
        f"  changes {len(score.changes):3d}  ({time.monotonic() - since_s:.0f} s)\n"
    )
    sys.stdout.flush()
    return score


def planner_of(within: str, max_devices: int | None = None) -> PlannerSettings:
    devices = dict.fromkeys((WorkerRole.PREFILL, WorkerRole.DECODE), 1)
    settings = planner_settings(within, OBJECTIVE, ATTAINMENT, devices)
    limits = settings.limits if max_devices is None else replace(settings.limits, max_devices=max_devices)
    return replace(settings, limits=limits, pace=PACE, period_s=5.0, window_s=20.0)


def days(seed: int, day_s: float, peak: float, clusters: Sequence[tuple[int, int]]) -> PlannedRuns:
    sessions = day(seed, day_s, peak)
    sys.stdout.write(f"day: {len(sessions)} requests, objective {ATTAINMENT:.0%}\n")
    static = [run(f"{one} prefill + {two} decode", config_of(one, two, seed), sessions, None) for one, two in clusters]
    kept = [one for one in static if one.in_time >= ATTAINMENT]
    planned = run("planned", config_of(1, 1, seed), sessions, planner_of("1:6"))
    if kept:
        cheapest = min(kept, key=lambda one: one.gpu_hours)
        share, points = planned.gpu_hours / cheapest.gpu_hours, 100 * (planned.in_time - cheapest.in_time)
        sys.stdout.write(f"planned / cheapest static: {share:.0%} of its GPU hours, {points:+.1f} points in time\n")
    return [one.due_s for one in sessions], [*static, planned]


def turns(seed: int, num_gpus: int, half_s: float, rates: Sequence[float]) -> PlannedRuns:
    sessions = turn(seed, half_s, rates)
    sys.stdout.write(f"turn: {len(sessions)} requests\n")
    static = [
        run(f"{one} prefill + {num_gpus - one} decode", config_of(one, num_gpus - one, seed), sessions, None)
        for one in range(1, num_gpus)
    ]
    planned = run("planned", config_of(num_gpus - 1, 1, seed), sessions, planner_of(f"1:{num_gpus - 1}", num_gpus))
    times = planned.good_per_s / max(one.good_per_s for one in static)
    sys.stdout.write(f"planned / best static split: {times:.2f} times its requests in time\n")
    return [one.due_s for one in sessions], [*static, planned]


def draw(dues: Sequence[float], planned: PlannedScore, path: Path) -> None:
    """The requests of every 20 s, and the workers of both pools below."""
    counts = Counter(int(due_s // _BIN_S) for due_s in dues)
    with drawing(path, size=(8, 5), rows=2, sharex=True) as [[rates], [workers]]:
        rates.plot([_BIN_S * one for one in sorted(counts)], [counts[one] / _BIN_S for one in sorted(counts)])
        rates.set_ylabel("requests/s")
        times = [0.0, *(one[0] for one in planned.changes), max(dues)]
        for place, pool in ((1, "prefill"), (2, "decode")):
            steps = [one[place] for one in planned.changes]
            workers.step(times, [steps[0], *steps, steps[-1]] if steps else [1] * len(times), where="post", label=pool)
        workers.set_ylabel("workers")
        workers.set_xlabel("seconds")
        workers.legend()


def _pair(given: str) -> tuple[int, int]:
    prefill, _, decode = given.partition("+")
    return int(prefill), int(decode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("which", choices=("day", "turn"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=8.0, help="requests a second at the day's peak")
    parser.add_argument("--day", type=float, default=2400.0, help="seconds of a day")
    parser.add_argument(
        "--clusters",
        type=_pair,
        nargs="+",
        default=((2, 1), (2, 2)),
        help="static ones, as 2+1: prefill, decode",
    )
    parser.add_argument("--gpus", type=int, default=3, help="of the load that turns")
    parser.add_argument("--half", type=float, default=90.0, help="seconds until the load turns")
    parser.add_argument("--rates", type=float, nargs=2, default=(5.5, 26.0), help="before and after it turns")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="file for a plot (needs matplotlib)")
    chosen = parser.parse_args()
    if chosen.which == "day":
        dues, scores = days(chosen.seed, chosen.day, chosen.peak, chosen.clusters)
    else:
        dues, scores = turns(chosen.seed, chosen.gpus, chosen.half, chosen.rates)
    write_figures(chosen.json, num_requests=len(dues), runs=[asdict(one) for one in scores])
    if chosen.plot is not None:
        draw(dues, scores[-1], chosen.plot)


if __name__ == "__main__":
    main()
