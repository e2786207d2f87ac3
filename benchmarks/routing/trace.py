"""Measures what each routing policy finds in caches on a trace, and its cost in balance and waiting.

    python -m benchmarks.routing.trace synthetic.jsonl                         a table, 1, 4 and 16 workers
    python -m benchmarks.routing.trace synthetic.jsonl --json f.json --plot f.png
    python -m benchmarks.routing.trace --workload assistant                    one that `baton simulate` generates

A trace is Mooncake's; virtual workers read it (`routing_replay`), the router's own policies and index route it. Ideal
is one worker with the cache and the speed of all of them: nothing can be in the wrong cache there. Workers are as fast
as it takes for that ideal worker to be busy for `--utilisation` of the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures
from benchmarks.routing.baselines import BASELINES
from benchmarks.routing.replay import Replay, ReplayedRequest, TraceRequest, WorkerSpeed, asked_of, read_trace
from cluster.bench.bench_load import Lengths
from cluster.simulate.world.simulated_load import GENERATED, GeneratedLoad, generated
from router.prefix.registry import local_index
from router.router_config import RouterConfig
from router.routing.registry import NAMES, policy_of

BLOCK_SIZE = 512  # tokens of a block in Mooncake's traces
IDEAL = "ideal: one worker, all the cache"
NO_LIMIT = 10**6
TTFT_OBJECTIVE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """One replay. Imbalance is the busiest worker's share over the mean: of prompt tokens computed, and of requests."""

    policy: str
    num_workers: int
    num_blocks: int
    hit_rate: float
    of_ideal: float
    token_imbalance: float
    request_imbalance: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    in_time: float
    ttft_error_s: float


def measure(
    trace: Sequence[TraceRequest], policy: str, *, num_workers: int, num_blocks: int, read_tokens_per_s: float
) -> TraceFigures:
    """Replays the trace over workers of `num_blocks` each. `of_ideal` is 0: nothing to compare with is known here."""
    config = RouterConfig(model_path=Path("trace"), model_name="trace", ttft_ms=TTFT_OBJECTIVE_S * 1000)
    replay = Replay(
        policy=BASELINES[policy](config) if policy in BASELINES else policy_of(config, policy),
        index=local_index(),
        num_workers=num_workers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        pace=WorkerSpeed(read_tokens_per_s=read_tokens_per_s),
    )
    outcomes = replay.run(trace)
    return _figures(policy, outcomes, num_workers, num_blocks)


def _figures(policy: str, outcomes: Sequence[ReplayedRequest], num_workers: int, num_blocks: int) -> TraceFigures:
    tokens, requests = [0] * num_workers, [0] * num_workers
    for one in outcomes:
        tokens[one.worker] += one.num_prompt - one.num_cached
        requests[one.worker] += 1
    ttft = sorted(one.ttft_s for one in outcomes)
    return TraceFigures(
        policy=policy,
        num_workers=num_workers,
        num_blocks=num_blocks,
        hit_rate=sum(one.num_cached for one in outcomes) / sum(one.num_prompt for one in outcomes),
        of_ideal=0.0,
        token_imbalance=max(tokens) / statistics.mean(tokens),
        request_imbalance=max(requests) / statistics.mean(requests),
        ttft_mean_s=statistics.mean(ttft),
        ttft_p50_s=ttft[len(ttft) // 2],
        ttft_p99_s=ttft[len(ttft) * 99 // 100],
        in_time=sum(one <= TTFT_OBJECTIVE_S for one in ttft) / len(ttft),
        ttft_error_s=statistics.mean(abs(one.ttft_s - one.predicted_ttft_s) for one in outcomes),
    )


def compare(
    trace: Sequence[TraceRequest], policies: Sequence[str], *, num_workers: int, num_blocks: int, utilisation: float
) -> list[TraceFigures]:
    """The ideal first, then every policy over as many workers."""
    whole = num_workers * num_blocks
    share = measure(trace, "round_robin", num_workers=1, num_blocks=whole, read_tokens_per_s=1e9).hit_rate
    num_tokens = sum(one.num_prompt for one in trace) * (1 - share)
    speed = num_tokens / (trace[-1].at_s - trace[0].at_s) / utilisation
    best = measure(trace, "round_robin", num_workers=1, num_blocks=whole, read_tokens_per_s=speed)
    rows = [replace(best, policy=IDEAL, of_ideal=1.0)]
    for policy in policies:
        found = measure(
            trace, policy, num_workers=num_workers, num_blocks=num_blocks, read_tokens_per_s=speed / num_workers
        )
        rows.append(replace(found, of_ideal=found.hit_rate / best.hit_rate))
    return rows


HEAD = (
    "| workers | policy | hit rate | of ideal | imbalance tokens / requests | TTFT mean / p50 / p99 | in time |\n"
    "|---|---|---|---|---|---|---|"
)


def row(one: TraceFigures) -> str:
    """A line of the table."""
    cells = (
        "1" if one.policy == IDEAL else f"{one.num_workers} of {one.num_blocks:,} blocks",
        one.policy,
        f"{one.hit_rate:.1%}",
        f"{one.of_ideal:.1%}",
        f"{one.token_imbalance:.2f} / {one.request_imbalance:.2f}",
        f"{one.ttft_mean_s:.2f} / {one.ttft_p50_s:.2f} / {one.ttft_p99_s:.1f} s",
        f"{one.in_time:.1%}",
    )
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[TraceFigures], path: Path) -> None:
    """Hit rate of the ideal's against imbalance, a panel for each number of workers."""
    sizes = sorted({one.num_workers for one in rows if one.policy != IDEAL and one.num_workers > 1})
    with drawing(path, size=(5.5 * len(sizes), 4.2), columns=len(sizes), sharey=True) as panels:
        for panel, size in zip(panels[0], sizes, strict=True):
            for one in rows:
                if one.num_workers == size and one.policy != IDEAL:
                    panel.scatter(one.token_imbalance, one.of_ideal, s=46)
                    panel.annotate(
                        one.policy,
                        (one.token_imbalance, one.of_ideal),
                        xytext=(5, 4),
                        textcoords="offset points",
                        fontsize=8,
                    )
            panel.axhline(0.95, color="grey", linewidth=0.8, linestyle="--")
            panel.axvline(1.3, color="grey", linewidth=0.8, linestyle="--")
            panel.set(title=f"{size} workers", xlabel="busiest worker's tokens over the mean", xlim=(1.0, 1.4))
        panels[0][0].set(ylabel="hit rate, of the ideal's", ylim=(0.0, 1.05))


def asked_for(
    trace: Path | None, workload: str | None, *, num_requests: int, rate: float, seed: int
) -> list[TraceRequest]:
    """The first requests of a trace, or a generated workload. Raises BadParameter unless one of both is given."""
    if (trace is None) == (workload is None):
        raise typer.BadParameter("give a trace, or --workload NAME")
    if trace is not None:
        return read_trace(trace, BLOCK_SIZE)[:num_requests]
    lengths = {"prompts": Lengths(low=200, high=4000), "outputs": Lengths(low=20, high=400)}
    return asked_of(
        generated(workload or "", GeneratedLoad(num_requests=num_requests, rate=rate, seed=seed, **lengths)), BLOCK_SIZE
    )


def trace_bench(
    trace: Annotated[Path | None, typer.Argument(help="A trace in Mooncake's format.")] = None,
    workload: Annotated[str | None, typer.Option(help=f"Instead: {', '.join(GENERATED)}.")] = None,
    num_requests: Annotated[int, typer.Option("--requests", help="Of a trace the first, of a workload all.")] = 4000,
    rate: Annotated[float, typer.Option(help="A workload's requests a second.")] = 3.4,
    seed: Annotated[int, typer.Option(help="A workload's.")] = 0,
    workers: Annotated[list[int] | None, typer.Option(help="Numbers of workers. Default: 1, 4 and 16.")] = None,
    blocks: Annotated[int, typer.Option(help="Blocks of 512 tokens that a worker caches.")] = 4000,
    utilisation: Annotated[float, typer.Option(help="Share of the time that the ideal worker reads.")] = 0.5,
    policy: Annotated[list[str] | None, typer.Option(help="Default: all there are.")] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """A Markdown table on stdout."""
    requests = asked_for(trace, workload, num_requests=num_requests, rate=rate, seed=seed)
    rows: list[TraceFigures] = []
    typer.echo(HEAD)
    for num_workers in workers or (1, 4, 16):
        found = compare(
            requests,
            policy or (*NAMES, *BASELINES),
            num_workers=num_workers,
            num_blocks=blocks,
            utilisation=utilisation,
        )
        for one in found:
            typer.echo(row(one))
        rows += found
    write_figures(
        json_file,
        trace=trace.name if trace is not None else workload,
        requests=len(requests),
        block_size=BLOCK_SIZE,
        utilisation=utilisation,
        figures=[asdict(one) for one in rows],
    )
    if plot is not None:
        draw(rows, plot)


if __name__ == "__main__":
    typer.run(trace_bench)
