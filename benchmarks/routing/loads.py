"""Compares the routing policies from half of a pace to seven times it: cached tokens and waiting times.

    python -m benchmarks.routing.loads                                        three generated workloads, 4 + 4 workers
    python -m benchmarks.routing.loads --trace conversation.jsonl --requests 1500 --prefill 8 --decode 8
    python -m benchmarks.routing.loads --workers 8 --json f.json --plot f.png

The cluster is simulated (docs/simulation.md): admission, dispatch, policies and workers are the production code in
virtual time, steps are a roofline's. At speed 1 a workload comes at the rate of its case below, a trace at its own.
Beside `slo`, the default, stands the best of the others by each figure: no single one of them is best by all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures
from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import Objective
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.results.summary import summarise
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, read_settings, room_of
from cluster.simulate.world.simulated_load import (
    ASSISTANT_RATE,
    GeneratedLoad,
    UserSession,
    fitting,
    generated,
    recorded,
)
from router.routing.registry import NAMES

SPEEDS = (0.5, 1.0, 2.0, 4.0, 7.0)
OURS = "slo"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """The load: a trace, or a generated workload of `rate` requests a second at speed 1."""

    name: str
    trace: Path | None = None
    rate: float = 1.0

    def sessions(self, num_requests: int, speed: float, seed: int) -> list[UserSession]:
        if self.trace is not None:
            return recorded(self.trace, limit=num_requests, speed=speed)
        prompts, outputs = Lengths(low=200, high=4000), Lengths(low=20, high=400)
        load = GeneratedLoad(
            num_requests=num_requests, rate=self.rate * speed, prompts=prompts, outputs=outputs, seed=seed
        )
        return generated(self.name, load)


CASES = (
    LoadCase(name="assistant", rate=ASSISTANT_RATE / 2),
    LoadCase(name="agents", rate=8.0),
    LoadCase(name="conversations", rate=8.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """Of one policy under one load. `goodput`: answers a second whose first token and pace kept the objective of the
    router's settings. `hit_rate`: the share of prompt tokens that needed no computing. `imbalance`: tokens of the
    busiest worker that reads, over the mean of its pool."""

    case: str
    cluster: str
    speed: float
    policy: str
    num_seeds: int
    num_failed: float
    hit_rate: float
    goodput: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    imbalance: float
    busy: float


BETTER_HIGH = ("hit_rate", "goodput")
BETTER_LOW = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s")


def measure(
    case: LoadCase, policy: str, *, pools: PoolsConfig, speed: float, num_requests: int, seeds: Sequence[int]
) -> LoadFigures:
    """The mean of its seeds."""
    runs = [_once(case, policy, pools=pools, speed=speed, num_requests=num_requests, seed=seed) for seed in seeds]
    averaged = {name: mean(run[name] for run in runs) for name in runs[0]}
    return LoadFigures(
        case=case.name, cluster=cluster_name(pools), speed=speed, policy=policy, num_seeds=len(seeds), **averaged
    )


def _once(
    case: LoadCase, policy: str, *, pools: PoolsConfig, speed: float, num_requests: int, seed: int
) -> dict[str, float]:
    settings = read_settings(f"router.policy={policy}")
    spec = hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=settings)
    config = SimulationConfig(pools=pools, spec=spec, router=settings.router, seed=seed)
    sessions, _ = fitting(case.sessions(num_requests, speed, seed), room_of(spec, settings.worker))
    objective = Objective(ttft_s=settings.router.ttft_ms / 1000, tpot_s=settings.router.tpot_ms / 1000)
    summary = summarise(simulate(config, sessions), objective)
    report = summary.report
    readers = next(pool for pool in reversed(summary.pools) if pool.role != "decode")
    assert report.ttft_s is not None
    assert report.tpot_s is not None
    return {
        "num_failed": report.num_requests - report.num_completed,
        "hit_rate": report.cached_share or 0.0,
        "goodput": report.goodput or 0.0,
        "ttft_mean_s": report.ttft_s.mean,
        "ttft_p50_s": report.ttft_s.p50,
        "ttft_p99_s": report.ttft_s.p99,
        "tpot_mean_s": report.tpot_s.mean,
        "tpot_p99_s": report.tpot_s.p99,
        "imbalance": readers.imbalance,
        "busy": readers.busy,
    }


def cluster_name(pools: PoolsConfig) -> str:
    return f"{pools.prefill} + {pools.decode}" if pools.prefill else f"{pools.colocated} colocated"


HEAD = (
    "| load | policy | hits | goodput, /s | TTFT mean / p50 / p99, s | TPOT mean / p99, ms | imbalance | busy |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(one: LoadFigures) -> str:
    """A line of the table."""
    cells = (
        f"{one.case} x{one.speed:g}",
        f"**`{one.policy}`**" if one.policy == OURS else f"`{one.policy}`",
        f"{one.hit_rate:.1%}",
        f"{one.goodput:.2f}",
        f"{one.ttft_mean_s:.2f} / {one.ttft_p50_s:.2f} / {one.ttft_p99_s:.2f}",
        f"{one.tpot_mean_s * 1000:.1f} / {one.tpot_p99_s * 1000:.1f}",
        f"{one.imbalance:.2f}",
        f"{one.busy:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def best_of_others(rows: Sequence[LoadFigures]) -> Mapping[str, tuple[str, float]]:
    """Of one load's: by figure, the policy other than ours that is best by it, and its value."""
    others = [one for one in rows if one.policy != OURS]
    best: dict[str, tuple[str, float]] = {}
    for names, choose in ((BETTER_HIGH, max), (BETTER_LOW, min)):
        for name in names:
            found = choose(others, key=lambda one, name=name: getattr(one, name))  # type: ignore[misc]
            best[name] = (found.policy, getattr(found, name))
    return best


def beside(rows: Sequence[LoadFigures]) -> Iterator[str]:
    """By load, how much better ours is than the best of the others by each figure, in percent; below 0 it is worse."""
    yield "| load | " + " | ".join((*BETTER_HIGH, *BETTER_LOW)) + " |"
    yield "|---" * (1 + len(BETTER_HIGH) + len(BETTER_LOW)) + "|"
    for load, those in _by_load(rows).items():
        ours = next((one for one in those if one.policy == OURS), None)
        if ours is None or len(those) < 2:
            continue
        cells = []
        for name, (policy, value) in best_of_others(those).items():
            gain = getattr(ours, name) / value - 1 if value else 0.0
            cells.append(f"{gain if name in BETTER_HIGH else -gain:+.0%} ({policy})")
        yield f"| {load} | {' | '.join(cells)} |"


def _by_load(rows: Sequence[LoadFigures]) -> Mapping[str, list[LoadFigures]]:
    loads: dict[str, list[LoadFigures]] = {}
    for one in rows:
        loads.setdefault(f"{one.case} x{one.speed:g}", []).append(one)
    return loads


def draw(rows: Sequence[LoadFigures], path: Path) -> None:
    """Hits and times to the first token by speed, a column for each case."""
    cases = list(dict.fromkeys(one.case for one in rows))
    shown = (
        ("hit_rate", "share of prompt tokens cached"),
        ("ttft_mean_s", "mean TTFT, s"),
        ("ttft_p99_s", "TTFT p99, s"),
    )
    size = (4.6 * len(cases), 3.2 * len(shown))
    with drawing(path, size=size, rows=len(shown), columns=len(cases), sharex=True) as panels:
        for column, case in zip(panels.T, cases, strict=True):
            column[0].set(title=case)
            for panel, (name, label) in zip(column, shown, strict=True):
                for policy in dict.fromkeys(one.policy for one in rows):
                    line = [(one.speed, getattr(one, name)) for one in rows if (one.case, one.policy) == (case, policy)]
                    panel.plot(
                        *zip(*line, strict=True), marker="o", linewidth=2.2 if policy == OURS else 1.0, label=policy
                    )
                panel.set(ylabel=label, yscale="linear" if name == "hit_rate" else "log", xscale="log")
            column[-1].set(xlabel="times the pace")
        panels[0][0].legend(fontsize=7)


def loads_bench(
    case: Annotated[list[str] | None, typer.Option(help=f"Default: all of {', '.join(c.name for c in CASES)}.")] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="Traces in Mooncake's format, instead.")] = None,
    speed: Annotated[list[float] | None, typer.Option(help="Times the pace. Default: 0.5 to 7.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Default: all there are.")] = None,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 4,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 4,
    workers: Annotated[int, typer.Option(help="Colocated ones, instead of two pools.")] = 0,
    num_requests: Annotated[int, typer.Option("--requests", help="Of each load.")] = 500,
    seed: Annotated[list[int] | None, typer.Option(help="Of load and ties. Default: 0.")] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Markdown tables on stdout."""
    logging.getLogger("baton").setLevel(logging.ERROR)
    pools = PoolsConfig(colocated=workers) if workers else PoolsConfig(prefill=prefill, decode=decode)
    cases = [LoadCase(name=path.stem, trace=path) for path in trace or ()]
    if not cases or case:
        cases += [one for one in CASES if case is None or one.name in case]
    rows: list[LoadFigures] = []
    typer.echo(HEAD)
    for each in cases:
        for times in speed or SPEEDS:
            for name in policy or NAMES:
                rows.append(
                    measure(each, name, pools=pools, speed=times, num_requests=num_requests, seeds=seed or (0,))
                )
                typer.echo(row(rows[-1]))
    typer.echo("\n" + "\n".join(beside(rows)))
    write_figures(json_file, figures=[asdict(one) for one in rows])
    if plot is not None:
        draw(rows, plot)


if __name__ == "__main__":
    typer.run(loads_bench)
