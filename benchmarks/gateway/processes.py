"""Measures what gateways lose by not knowing each other's choices (simulated).

    python -m benchmarks.gateway.processes --json f.json

Router and workers are the production code in virtual time (docs/simulation.md). A gateway knows the load that workers
report after each step, and through Redis the prompts of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Annotated

import typer

from benchmarks.output import JsonFile, write_figures
from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import spread
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec
from cluster.simulate.world.simulated_load import GeneratedLoad, generated

CASES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Seconds to the first token."""

    gateways: int
    seed: int
    mean_s: float
    p50_s: float
    p99_s: float
    errors: int


def found(gateways: int, seed: int, *, num_requests: int, rate: float) -> Found:
    spec = hardware_spec(gpu="h100", model="llama-3-8b", tp=1)
    config = SimulationConfig(
        pools=PoolsConfig(prefill=4, decode=4), spec=spec, load_s=1.0, seed=seed, num_gateways=gateways,
        shared_index=gateways > 1,
    )  # fmt: skip
    load = GeneratedLoad(
        num_requests=num_requests, rate=rate, prompts=Lengths(low=200, high=4000), outputs=Lengths(low=20, high=200),
        seed=seed,
    )  # fmt: skip
    records = simulate(config, generated("poisson", load)).records
    ttft_s = spread(record.ttft_s for record in records)
    assert ttft_s is not None
    return Found(
        gateways=gateways, seed=seed, mean_s=ttft_s.mean, p50_s=ttft_s.p50, p99_s=ttft_s.p99,
        errors=sum(Counter(record.error for record in records if record.error).values()),
    )  # fmt: skip


def row(runs: Sequence[Found]) -> str:
    one = runs[0]
    times = (mean(getattr(each, name) for each in runs) * 1000 for name in ("mean_s", "p50_s", "p99_s"))
    return f"{one.gateways:14}" + "".join(f"{time:8.0f}" for time in times) + f"{sum(each.errors for each in runs):8}"


def main(
    requests: Annotated[int, typer.Option(help="Of each run.")] = 800,
    rate: Annotated[float, typer.Option(help="Requests a second, on average.")] = 60.0,
    gateways: Annotated[list[int] | None, typer.Option(help="Only so many. Default: 1, 2, 4, 8.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="As often as wanted. Default: 1, 2.")] = None,
    json_file: JsonFile = None,
) -> None:
    """TTFT of 4 prefill and 4 decode workers behind one to eight gateways."""
    print(f"{'TTFT, ms':14}{'mean':>8}{'p50':>8}{'p99':>8}{'errors':>8}", flush=True)
    every = []
    for number in gateways or CASES:
        runs = [found(number, one, num_requests=requests, rate=rate) for one in seed or (1, 2)]
        print(row(runs), flush=True)
        every += runs
    write_figures(json_file, requests=requests, rate=rate, found=[asdict(one) for one in every])


if __name__ == "__main__":
    typer.run(main)
