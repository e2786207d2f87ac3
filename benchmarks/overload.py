"""What is left of a cluster's goodput when more is asked of it than it can do, every request with a bound on its TTFT.

    python -m benchmarks.overload                       a table
    python -m benchmarks.overload --json f.json         and figures

The cluster is simulated (docs/simulation.md): admission, dispatch and workers are the production code in virtual time,
steps are a roofline's, the load is open: nobody waits for anybody's answer. Capacity is measured first, as the requests
a second that are finished while there always is a line, without bounds. Goodput is of answers whose first token came
in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.report import Objective, Record, Spread, spread
from cluster.bench.verb import write_json
from cluster.bench.workload import Lengths
from cluster.config import PoolsConfig
from cluster.simulate.config import SimulationConfig, hardware_spec, simulated_router
from cluster.simulate.simulation import simulate
from cluster.simulate.workload import Load, generated

FORMAT = "baton-overload/1"
MULTIPLES = (0.5, 1.0, 1.5, 2.0, 3.0)
WARM_UP = 0.2  # share of the time load is offered that does not count
REFUSED = "overloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster and what is asked of it, `workload` by `cluster.simulate.workload.GENERATED`."""

    name: str
    pools: PoolsConfig
    prompts: Lengths
    outputs: Lengths
    ttft_s: float = 1.0
    policy: str = "slo"
    workload: str = "poisson"
    num_blocks: int | None = None  # of each worker; None: what fits into an H100


CASES = (
    Case(
        name="1 prefill + 1 decode, reading is scarce",
        pools=PoolsConfig(prefill=1, decode=1),
        prompts=Lengths(low=1000, high=3000),
        outputs=Lengths(low=10, high=40),
    ),
    Case(
        name="2 prefill + 1 decode, writing is scarce",
        pools=PoolsConfig(prefill=2, decode=1),
        prompts=Lengths(low=200, high=1000),
        outputs=Lengths(low=100, high=300),
        num_blocks=600,
    ),
    Case(
        name="2 colocated",
        pools=PoolsConfig(colocated=2),
        prompts=Lengths(low=500, high=2000),
        outputs=Lengths(low=20, high=100),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One rate. Rates are a second; `late` were admitted and answered after their bound, `errors` by code failed
    otherwise."""

    multiple: float
    offered: float
    admitted: float
    refused: float
    late: float
    goodput: float
    ttft_s: Spread | None
    retry_after_s: Spread | None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    case: str
    ttft_s: float
    capacity: float
    points: tuple[Point, ...]

    @property
    def peak(self) -> float:
        return max(point.goodput for point in self.points)


def measure(case: Case, *, num_requests: int, multiples: Sequence[float] = MULTIPLES, seed: int = 0) -> Curve:
    rate = capacity(case, num_requests=num_requests, seed=seed)
    points = [_point(case, multiple, rate, num_requests, seed) for multiple in multiples]
    return Curve(case=case.name, ttft_s=case.ttft_s, capacity=rate, points=tuple(points))


def capacity(case: Case, *, num_requests: int, seed: int = 0) -> float:
    """Requests finished a second, between a fifth and four fifths of them, when all come at once and wait."""
    patient = simulated_router(case.policy, max_queued=10**6, max_queue_s=3600.0)
    records = _run(replace(_config(case, seed), router=patient), case, num_requests, rate=1e6, seed=seed)
    ends = sorted(record.arrivals_s[-1] for record in records if not record.error)
    low, high = len(ends) // 5, len(ends) * 4 // 5
    return (high - low) / (ends[high] - ends[low])


def _point(case: Case, multiple: float, capacity: float, num_requests: int, seed: int) -> Point:
    # As long a time at every rate: what a backlog does shows with time, not with requests.
    num = int(num_requests * multiple)
    config = replace(_config(case, seed), max_ttft_s=case.ttft_s)
    records = _run(config, case, num, rate=multiple * capacity, seed=seed)
    until_s = max(record.sent_s or 0.0 for record in records)
    counted = [record for record in records if (record.sent_s or 0.0) >= WARM_UP * until_s]
    whole = [record for record in counted if not record.error]
    refused = [record for record in counted if record.error == REFUSED]
    num_good = sum(Objective(ttft_s=case.ttft_s).met(record) for record in whole)
    seconds = until_s * (1 - WARM_UP)
    return Point(
        multiple=multiple,
        offered=len(counted) / seconds,
        admitted=(len(counted) - len(refused)) / seconds,
        refused=len(refused) / seconds,
        late=(len(whole) - num_good) / seconds,
        goodput=num_good / seconds,
        ttft_s=spread(record.ttft_s for record in whole),
        retry_after_s=spread(record.retry_after_s for record in refused),
        errors=tuple(sorted({record.error for record in counted} - {"", REFUSED})),
    )


def _config(case: Case, seed: int) -> SimulationConfig:
    spec = hardware_spec(gpu="h100", model="llama-3-8b", tp=1, leaping=case.policy != "slo")
    if case.num_blocks is not None:
        spec = replace(spec, num_blocks=case.num_blocks)
    return SimulationConfig(pools=case.pools, spec=spec, router=simulated_router(case.policy), load_s=1.0, seed=seed)


def _run(config: SimulationConfig, case: Case, num: int, *, rate: float, seed: int) -> Sequence[Record]:
    load = Load(num_requests=num, rate=rate, prompts=case.prompts, outputs=case.outputs, seed=seed)
    return simulate(config, generated(case.workload, load)).records


def table(curve: Curve) -> Table:
    shown = Table(
        title=f"{curve.case}: {curve.capacity:.1f} requests/s, first token within {curve.ttft_s:g} s",
        title_justify="left", box=None, pad_edge=False, header_style="dim",
    )  # fmt: skip
    for name in (
        "x",
        "offered/s",
        "admitted/s",
        "refused/s",
        "late/s",
        "goodput/s",
        "of peak",
        "TTFT p50",
        "p99",
        "retry after",
    ):
        shown.add_column(name, justify="right")
    for row in _rows(curve):
        shown.add_row(*row)
    return shown


def _rows(curve: Curve) -> Iterator[tuple[str, ...]]:
    for point in curve.points:
        ttft_s, retry_s = point.ttft_s, point.retry_after_s
        yield (
            f"{point.multiple:g}",
            *(f"{rate:.1f}" for rate in (point.offered, point.admitted, point.refused, point.late, point.goodput)),
            f"{point.goodput / curve.peak:.0%}" if curve.peak else "",
            f"{ttft_s.p50 * 1000:,.0f} ms" if ttft_s else "",
            f"{ttft_s.p99 * 1000:,.0f} ms" if ttft_s else "",
            f"{retry_s.p50:.2f} s" if retry_s else "",
        )


def main(
    num_requests: Annotated[int, typer.Option("--requests", help="At 1x; as many times more at others.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the load.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures to this file.")] = None,
) -> None:
    """Offer 0.5 to 3 times the capacity of simulated clusters."""
    curves = []
    for case in CASES:
        curves.append(measure(case, num_requests=num_requests, seed=seed))
        Console().print(table(curves[-1]))
    if json_file is not None:
        write_json(json_file, {"format": FORMAT, "curves": [asdict(curve) for curve in curves]})


if __name__ == "__main__":
    typer.run(main)
