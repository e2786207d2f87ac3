"""When speculation pays: one simulated worker at rising load, without drafts and with drafts of several acceptances.

    python -m benchmarks.simulation.speculation --json speculation.json

Prompts of 500 tokens, answers of 200. Drafts cost nothing (ngram) or a head's step each (eagle). The worker chooses the
number of drafts as in production. Deterministic: the same command prints the same table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, write_figures
from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import Objective
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.results.summary import Summary, summarise
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, read_settings
from cluster.simulate.world.simulated_load import GENERATED, GeneratedLoad

PROMPT, ANSWER = 500, 200
RATES = (1.0, 8.0, 24.0, 40.0, 56.0)
SOURCES: Sequence[tuple[str, tuple[float, ...]]] = (
    ("ngram", (0.3,)),
    ("ngram", (0.6,)),
    ("ngram", (0.9,)),
    ("eagle:head", (0.75, 0.7, 0.65)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPoint:
    """`times_off`: the mean TPOT without drafts by that with them. Times in milliseconds."""

    rate: float
    source: str
    acceptance: tuple[float, ...]
    tpot_ms: float
    ttft_ms: float
    times_off: float
    tokens_per_row: float
    drafts_per_row: float


def run(gpu: str, model: str, rate: float, num_requests: int, source: str, acceptance: Sequence[float]) -> Summary:
    settings = read_settings(f"worker.speculate={source}")
    config = SimulationConfig(
        pools=PoolsConfig(colocated=1),
        spec=hardware_spec(gpu=gpu, model=model, tp=1, settings=settings, acceptance=acceptance),
    )
    load = GeneratedLoad(
        num_requests=num_requests,
        rate=rate,
        seed=0,
        prompts=Lengths(low=PROMPT, high=PROMPT),
        outputs=Lengths(low=ANSWER, high=ANSWER),
    )
    return summarise(simulate(config, GENERATED["poisson"](load)), Objective())


def point(rate: float, source: str, acceptance: tuple[float, ...], on: Summary, off: Summary) -> SpeculationPoint:
    tpot, off_tpot, ttft = on.report.tpot_s, off.report.tpot_s, on.report.ttft_s
    assert tpot is not None
    assert off_tpot is not None
    assert ttft is not None
    drafts = on.drafts
    num_rows = on.report.num_output_tokens / drafts.tokens_per_row if drafts is not None else 1.0
    return SpeculationPoint(
        rate=rate,
        source=source,
        acceptance=acceptance,
        tpot_ms=round(tpot.mean * 1000, 3),
        ttft_ms=round(ttft.mean * 1000, 3),
        times_off=round(off_tpot.mean / tpot.mean, 3),
        tokens_per_row=round(drafts.tokens_per_row, 3) if drafts is not None else 1.0,
        drafts_per_row=round(drafts.num_drafted / num_rows, 3) if drafts is not None else 0.0,
    )


def main(
    gpu: Annotated[str, typer.Option(help="As of baton simulate.")] = "h100",
    model: Annotated[str, typer.Option(help="As of baton simulate.")] = "llama-3-8b",
    num_requests: Annotated[int, typer.Option("--requests", help="Requests of each run.")] = 200,
    json_file: JsonFile = None,
) -> None:
    logging.getLogger("baton").setLevel(logging.ERROR)  # the end of a simulated worker is expected
    found: list[SpeculationPoint] = []
    table = Table(
        "requests/s", "drafts", "acceptance", "TPOT ms", "TTFT ms", "times off", "tokens a row", "drafts a row"
    )
    for rate in RATES:
        off = run(gpu, model, rate, num_requests, "off", ())
        found.append(point(rate, "off", (), off, off))
        for source, acceptance in SOURCES:
            on = run(gpu, model, rate, num_requests, source, acceptance)
            found.append(point(rate, source, acceptance, on, off))
    for one in found:
        chances = ", ".join(map(str, one.acceptance))
        times = (f"{one.tpot_ms:.2f}", f"{one.ttft_ms:.0f}", f"{one.times_off:.2f}")
        table.add_row(
            f"{one.rate:g}", one.source, chances, *times, f"{one.tokens_per_row:.2f}", f"{one.drafts_per_row:.2f}"
        )
    Console().print(table)
    write_figures(json_file, gpu=gpu, model=model, prompt=PROMPT, answer=ANSWER, runs=[asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
