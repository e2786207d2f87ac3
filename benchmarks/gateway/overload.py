"""Measures the goodput of a simulated cluster under up to three times the load that it can serve.

    python -m benchmarks.gateway.overload                               a table
    python -m benchmarks.gateway.overload --json f.json --plot f.svg    and figures
    python -m benchmarks.gateway.overload --case colocated --seed 7 --seed 8

The cluster is simulated (docs/simulation.md): admission, dispatch and workers are the production code in virtual time,
steps are a roofline's. Every request has a bound on its TTFT, and goodput counts answers whose first token came in
time. The load is open: clients do not wait for answers and do not retry. Capacity is measured first, as first tokens
a second without bounds while requests always wait. The first seconds of a rate do not count: no batch is full yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures
from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import Objective, Percentiles, RequestRecord, spread
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.latency.rough import Rough
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, simulated_router
from cluster.simulate.world.simulated_load import GeneratedLoad, generated
from router.router_config import AdmissionConfig

FORMAT = "baton-overload/2"
MULTIPLES = (0.5, 1.0, 2.0, 3.0)
WARM_UP = 0.3  # share of the time load is offered that does not count
SEEDS = (101, 102)  # not those that constants were chosen by
REFUSED = "overloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadCase:
    """A cluster and its load, `workload` of `cluster.simulate.world.simulated_load.GENERATED`."""

    name: str
    pools: PoolsConfig
    prompts: Lengths
    outputs: Lengths
    ttft_s: float = 1.0
    policy: str = "slo"
    workload: str = "poisson"
    num_blocks: int | None = None  # of each worker; None: what fits into an H100
    num_for_capacity: int = 600


CASES = (
    OverloadCase(
        name="1 prefill + 1 decode, reading is scarce",
        pools=PoolsConfig(prefill=1, decode=1),
        prompts=Lengths(low=1000, high=3000),
        outputs=Lengths(low=10, high=40),
    ),
    OverloadCase(
        name="2 prefill + 1 decode, writing is scarce",
        pools=PoolsConfig(prefill=2, decode=1),
        prompts=Lengths(low=200, high=1000),
        outputs=Lengths(low=100, high=300),
        num_blocks=600,
    ),
    OverloadCase(
        name="2 colocated",
        pools=PoolsConfig(colocated=2),
        prompts=Lengths(low=500, high=2000),
        outputs=Lengths(low=20, high=100),
        num_for_capacity=1800,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """One rate. Rates are a second; `late` were admitted and answered after their bound, `errors` by code failed
    otherwise. `refusal_s` is what refusals took to come, None where that is not known."""

    multiple: float
    seed: int
    offered: float
    admitted: float
    refused: float
    late: float
    goodput: float
    ttft_s: Percentiles | None
    retry_after_s: Percentiles | None
    errors: tuple[str, ...] = ()
    refusal_s: Percentiles | None = None

    @property
    def attainment(self) -> float:
        """The share of those admitted whose first token came in time."""
        return self.goodput / self.admitted if self.admitted else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    case: str
    ttft_s: float
    capacity: float
    points: tuple[RatePoint, ...]

    def goodput(self, multiple: float) -> float:
        """The mean of its seeds."""
        points = [point.goodput for point in self.points if point.multiple == multiple]
        return sum(points) / len(points)

    @property
    def peak(self) -> float:
        return max(self.goodput(point.multiple) for point in self.points)


def measure(
    case: OverloadCase, *, seconds: float, capacity: float, seeds: Sequence[int], multiples: Sequence[float] = MULTIPLES
) -> Curve:
    """A point for each multiple and seed, of `seconds` of load."""
    points = [_point(case, multiple, capacity, seconds, seed) for multiple in multiples for seed in seeds]
    return Curve(case=case.name, ttft_s=case.ttft_s, capacity=capacity, points=tuple(points))


def capacity(case: OverloadCase, *, num_requests: int, seed: int = 0) -> float:
    """Requests begun a second when all arrive at once and wait, from the first third of them to the last. By then
    answers end as fast as others begin, and requests still wait."""
    patient = simulated_router(case.policy, admission=AdmissionConfig(max_queued=10**6, max_queue_s=3600.0))
    records = _run(replace(_config(case, seed), router=patient), case, num_requests, rate=1e6, seed=seed)
    begun = sorted(record.arrivals_s[0] for record in records if not record.error)
    low = len(begun) // 3
    return (len(begun) - 1 - low) / (begun[-1] - begun[low])


def _point(case: OverloadCase, multiple: float, capacity: float, seconds: float, seed: int) -> RatePoint:
    config = replace(_config(case, seed), max_ttft_s=case.ttft_s)
    num = int(multiple * capacity * seconds)
    records = _run(config, case, num, rate=multiple * capacity, seed=seed)
    return point_of(records, multiple=multiple, seed=seed, ttft_s=case.ttft_s)


def point_of(records: Sequence[RequestRecord], *, multiple: float, seed: int, ttft_s: float) -> RatePoint:
    """What became of an open load. Its first WARM_UP does not count."""
    until_s = max(record.sent_s or 0.0 for record in records)
    counted = [record for record in records if (record.sent_s or 0.0) >= WARM_UP * until_s]
    whole = [record for record in counted if not record.error]
    refused = [record for record in counted if record.error == REFUSED]
    num_good = sum(Objective(ttft_s=ttft_s).met(record) for record in whole)
    seconds = until_s * (1 - WARM_UP)
    return RatePoint(
        multiple=multiple,
        seed=seed,
        offered=len(counted) / seconds,
        admitted=(len(counted) - len(refused)) / seconds,
        refused=len(refused) / seconds,
        late=(len(whole) - num_good) / seconds,
        goodput=num_good / seconds,
        ttft_s=spread(record.ttft_s for record in whole),
        retry_after_s=spread(record.retry_after_s for record in refused),
        errors=tuple(sorted({record.error for record in counted} - {"", REFUSED})),
        refusal_s=spread(_ended_after_s(record) for record in refused),
    )


def _ended_after_s(record: RequestRecord) -> float | None:
    return None if record.ended_s is None or record.sent_s is None else record.ended_s - record.sent_s


def _config(case: OverloadCase, seed: int) -> SimulationConfig:
    spec = replace(hardware_spec(gpu="h100", model="llama-3-8b", tp=1), latency=Rough())
    if case.num_blocks is not None:
        spec = replace(spec, num_blocks=case.num_blocks)
    return SimulationConfig(pools=case.pools, spec=spec, router=simulated_router(case.policy), load_s=1.0, seed=seed)


def _run(config: SimulationConfig, case: OverloadCase, num: int, *, rate: float, seed: int) -> Sequence[RequestRecord]:
    load = GeneratedLoad(num_requests=num, rate=rate, prompts=case.prompts, outputs=case.outputs, seed=seed)
    return simulate(config, generated(case.workload, load)).records


def table(curve: Curve) -> Table:
    shown = Table(
        title=f"{curve.case}: {curve.capacity:.1f} requests/s, first token within {curve.ttft_s:g} s",
        title_justify="left", box=None, pad_edge=False, header_style="dim",
    )  # fmt: skip
    for name in (
        "x",
        "seed",
        "offered/s",
        "admitted/s",
        "refused/s",
        "late/s",
        "goodput/s",
        "of peak",
        "in time",
        "TTFT p50",
        "p99",
        "refused in p50",
        "p99",
        "retry after",
    ):
        shown.add_column(name, justify="right")
    for row in _rows(curve):
        shown.add_row(*row)
    return shown


def _rows(curve: Curve) -> Iterator[tuple[str, ...]]:
    for point in curve.points:
        ttft_s, retry_s, refusal_s = point.ttft_s, point.retry_after_s, point.refusal_s
        yield (
            f"{point.multiple:g}",
            f"{point.seed}",
            *(f"{rate:.1f}" for rate in (point.offered, point.admitted, point.refused, point.late, point.goodput)),
            f"{curve.goodput(point.multiple) / curve.peak:.0%}" if curve.peak else "",
            f"{point.attainment:.1%}",
            f"{ttft_s.p50 * 1000:,.0f} ms" if ttft_s else "",
            f"{ttft_s.p99 * 1000:,.0f} ms" if ttft_s else "",
            f"{refusal_s.p50 * 1000:,.1f} ms" if refusal_s else "",
            f"{refusal_s.p99 * 1000:,.1f} ms" if refusal_s else "",
            f"{retry_s.p50:.2f} s" if retry_s else "",
        )


def plot(curves: Sequence[Curve], file: Path) -> None:
    """Goodput of every seed against what is offered, both as shares of capacity."""
    with drawing(file, size=(7, 4.5)) as [[axes]]:
        for curve in curves:
            multiples = sorted({point.multiple for point in curve.points})
            [line] = axes.plot(multiples, [curve.goodput(one) / curve.capacity for one in multiples], label=curve.case)
            axes.plot(
                [point.multiple for point in curve.points],
                [point.goodput / curve.capacity for point in curve.points],
                ".",
                color=line.get_color(),
            )
        axes.set(xlabel="offered / capacity", ylabel="answers with a first token in time / capacity", ylim=(0, None))
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)


def main(
    seconds: Annotated[float, typer.Option(help="For which load is offered, at every rate.")] = 30.0,
    seed: Annotated[list[int] | None, typer.Option(help="Of the load; as often as wanted. Default: 101, 102.")] = None,
    case: Annotated[str, typer.Option(help="A part of the name of the only cluster to measure.")] = "",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Offer 0.5 to 3 times the capacity of simulated clusters; `benchmarks.gateway.overload_live` loads a real one."""
    curves = []
    for one in (one for one in CASES if case in one.name):
        rate = capacity(one, num_requests=one.num_for_capacity)
        curves.append(measure(one, seconds=seconds, capacity=rate, seeds=seed or SEEDS))
        Console(width=None if sys.stdout.isatty() else 160).print(table(curves[-1]))
    write_figures(json_file, format=FORMAT, curves=[asdict(curve) for curve in curves])
    if plot_file is not None:
        plot(curves, plot_file)


if __name__ == "__main__":
    typer.run(main)
