"""`baton bench`: turns flags into a workload, sends it, and prints a table or writes a file."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from cluster.bench.bench_load import (
    Lengths,
    WorkloadItem,
    fitting,
    read_trace,
    synthetic,
    with_poisson_arrivals,
    without_arrivals,
)
from cluster.bench.bench_report import Objective, Report, RequestRecord, make_report
from cluster.bench.client import CompletionClient, Dialect
from cluster.bench.http import HttpEndpoint
from cluster.bench.load import LoadProgress, run_load
from cluster.bench.measured_on import find_hardware, find_versions
from cluster.bench.prompts import Prompts
from cluster.bench.report_table import report_table
from cluster.bench.result_files import check_files, write_json
from cluster.bench.step_trace import Mark, profiling
from cluster.cli import options
from cluster.cli.admin_client import DEFAULT_URL, GatewayUrl, ServedModel, find_model, get_json, open_client
from protos.errors import BatonError, Misconfigured
from protos.hints import counted

DEFAULT_REQUESTS = 64
DEFAULT_CONCURRENCY = 8
PROBE_TOKENS = 16
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """The flags that describe the load. Raises Misconfigured if they contradict each other.

    Runs with the same `seed` have the same lengths and arrivals. Runs with the same `prompt_seed` have the same
    prompts, which the previous run left in the server's prefix cache.
    """

    rate: float | None
    concurrency: int | None
    num_requests: int | None
    input_len: str
    output_len: str
    trace: Path | None
    trace_scale: float
    trace_speed: float
    seed: int
    prompt_seed: int

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise Misconfigured("--rate and --concurrency: give one, requests a second or requests at once")
        for name in ("concurrency", "num_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Misconfigured(f"--{name.replace('_', '-')} {value}: give 1 or more", param=name)

    @property
    def at_once(self) -> int | None:
        """Concurrent requests; None in an open loop."""
        if self.rate is None and self.concurrency is None and self.trace is None:
            return DEFAULT_CONCURRENCY
        return self.concurrency

    def items(self) -> list[WorkloadItem]:
        """Raises Misconfigured."""
        if self.trace is not None:
            items = read_trace(self.trace, limit=self.num_requests, scale=self.trace_scale, speed=self.trace_speed)
        else:
            items = synthetic(
                self.num_requests or DEFAULT_REQUESTS,
                prompts=Lengths.parse(self.input_len, param="--input-len"),
                outputs=Lengths.parse(self.output_len, param="--output-len"),
                seed=self.seed,
            )
        if self.rate is not None:
            return with_poisson_arrivals(items, self.rate, self.seed)
        return items if self.concurrency is None else without_arrivals(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """The server under test. `vocab_size` and `workers` are known for Baton's gateways only."""

    url: str
    model: ServedModel
    vocab_size: int | None
    workers: Sequence[Mapping[str, Any]]


def bench(
    context: typer.Context,
    url: GatewayUrl = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="A served model. Default: the first one.")] = "",
    rate: Annotated[float | None, typer.Option(help="Requests a second, Poisson arrivals (open loop).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at once (closed loop). Default: 8.")] = None,
    num_requests: Annotated[int | None, typer.Option(help="Default: 64, or all of a trace.")] = None,
    input_len: Annotated[str, typer.Option(help="Prompt tokens: 256, or uniform 100:200.")] = "256",
    output_len: Annotated[str, typer.Option(help="Answer tokens: 64, or uniform 32:96.")] = "64",
    trace: Annotated[Path | None, typer.Option(help="Lengths, arrivals and prefixes from a Mooncake trace.")] = None,
    trace_scale: Annotated[float, typer.Option(help="Multiply the trace's lengths.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Run the trace's time this many times as fast.")] = 1.0,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective: milliseconds to the first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Objective: milliseconds per further token.")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths and arrivals.")] = 0,
    prompt_seed: Annotated[int | None, typer.Option(min=0, help="Seed of prompts. Default: a new one.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Vocabulary of a server that is not Baton.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that one request may take.")] = 600.0,
    allow_failed: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Requests that may fail with exit code 0.")
    ] = 0.0,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", help="Sent as a bearer token.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures and hardware to this file.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the workers' steps.")] = None,
    admin_key: Annotated[
        str,
        typer.Option(envvar="BATON_ADMIN_KEY", help="Administrator's key, for --profile."),
    ] = "",
) -> None:
    """Measure a running cluster, or any OpenAI-compatible server: TTFT, TPOT, ITL, E2E, throughput and goodput.

    Exits with 1 if a request failed or was refused: figures count complete answers only, and flatter a server that
    refuses. For a run that overloads the server on purpose, pass --allow-failed.
    """
    if trace is not None:
        every = {one.name for one in context.command.params if one.name is not None}
        options.refuse_others(context, "--trace FILE has the lengths of requests", every - {"input_len", "output_len"})
    shape = BenchLoad(
        rate=rate, concurrency=concurrency, num_requests=num_requests, input_len=input_len, output_len=output_len,
        trace=trace, trace_scale=trace_scale, trace_speed=trace_speed, seed=seed,
        prompt_seed=secrets.randbits(32) if prompt_seed is None else prompt_seed,
    )  # fmt: skip
    objective = Objective(ttft_s=_seconds(ttft_ms), tpot_s=_seconds(tpot_ms))
    items = shape.items()
    check_files({"json": json_file, "profile": profile})
    target = find_target(url, model, api_key)
    items, num_left_out = fitting(items, target.model.max_model_len)
    prompts = Prompts(seed=shape.prompt_seed, vocab_size=vocab_size or target.vocab_size)

    def make_client() -> CompletionClient:
        return CompletionClient(
            HttpEndpoint.parse(url), model=target.model.name, prompts=prompts, timeout_s=timeout, api_key=api_key,
            temperature=temperature,
        )  # fmt: skip

    records, dialect = asyncio.run(_measure(items, make_client, shape.at_once, profiling(profile, url, admin_key)))
    report = make_report(records, objective)
    _print_notes(target, dialect, records, num_left_out, num_asked=len(items))
    Console().print(report_table(report))
    if json_file is not None:
        ran = _Ran(target=target, dialect=dialect, shape=shape, objective=objective, num_left_out=num_left_out)
        write_json(json_file, ran.document(report, sys.argv, secret=api_key))
    raise typer.Exit(130 if len(records) < len(items) else int(_has_failed(report, allow_failed)))


def _has_failed(report: Report, allowed: float) -> bool:
    """Whether more than `allowed` of the requests failed, or all did; prints failures on stderr."""
    num_failed = report.num_requests - report.num_completed
    failed = num_failed > allowed * report.num_requests or not report.num_completed
    if num_failed:
        outcome = (
            "exit code 1; --allow-failed SHARE accepts some" if failed else f"--allow-failed {allowed:g} accepts it"
        )
        summary = (
            f"{num_failed:,} of {counted(report.num_requests, 'request')} failed or were refused; the times above are"
        )
        Console(stderr=True, soft_wrap=True).print(
            f"{summary} of the other {report.num_completed:,}: {outcome}", style="red" if failed else "yellow"
        )
    return failed


def find_target(url: str, model: str, api_key: str) -> BenchTarget:
    """Raises Unavailable if the server does not answer, NotFound for a model that is not served."""
    with open_client(url, api_key) as client:
        served = find_model(client, model)
        try:
            workers = get_json(client, "/admin/status")["workers"]
        except (BatonError, LookupError, TypeError):
            workers = []  # not a Baton gateway
    infos = [worker["info"] for worker in workers if worker.get("info")]
    return BenchTarget(
        url=url,
        model=served,
        vocab_size=infos[0]["vocab_size"] if infos else None,
        workers=[{name: info[name] for name in ("worker_id", "role", "device", "num_blocks")} for info in infos],
    )


async def _measure(
    items: Sequence[WorkloadItem],
    make_client: Callable[[], CompletionClient],
    at_once: int | None,
    profiled: AbstractContextManager[Mark],
) -> tuple[list[RequestRecord], Dialect]:
    client = make_client()
    try:
        await client.learn(PROBE_TOKENS)
        with profiled as mark, _bar(len(items)) as tell:
            start_s = time.time()
            records = await run_load(items, client, concurrency=at_once, tell=tell)
            mark(records, start_s)
        return records, client.dialect
    finally:
        client.close()


@contextmanager
def _bar(total: int) -> Iterator[Callable[[LoadProgress], None]]:
    columns = (BarColumn(40), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    num_failed = 0
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        row = bar.add_task("", total=total)

        def tell(progress: LoadProgress) -> None:
            nonlocal num_failed
            num_failed += bool(progress.last and progress.last.error)
            running = f"{progress.num_sent - progress.num_ended} running"
            bar.update(
                row, completed=progress.num_ended, description=running + f", {num_failed} failed" * (num_failed > 0)
            )

        yield tell


def _print_notes(
    target: BenchTarget, dialect: Dialect, records: Sequence[RequestRecord], num_left_out: int, *, num_asked: int
) -> None:
    """Remarks printed under the figures."""
    errors = Console(stderr=True, soft_wrap=True)
    errors.print(f"{target.model.name} at {target.url}", highlight=False)
    if dialect.given_up:
        errors.print(f"The server refused {', '.join(dialect.given_up)}: see docs/benchmarking.md", style="yellow")
    if num_left_out:
        why = f"longer than the context of {target.model.max_model_len} tokens"
        errors.print(f"{counted(num_left_out, 'request')} left out: {why}", style="yellow")
    if len(records) < num_asked:
        errors.print(f"stopped early: {len(records)} of {num_asked} requests had ended", style="yellow")
    shown: dict[str, str] = {}
    for record in records:
        shown.setdefault(record.error, record.message)
    for code, message in shown.items():
        if code:
            errors.print(Text(f"{code}, the first time: {message}", "red"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """The settings and hardware that the figures depend on."""

    target: BenchTarget
    dialect: Dialect
    shape: BenchLoad
    objective: Objective
    num_left_out: int

    def document(self, report: Report, argv: Sequence[str], *, secret: str) -> dict[str, Any]:
        command = shlex.join(["baton", *argv[1:]])
        return {
            "format": FORMAT,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command.replace(secret, "...") if secret else command,
            "target": asdict(self.target),
            "dialect": asdict(self.dialect),
            "workload": asdict(self.shape)
            | {"concurrency": self.shape.at_once, "trace": str(self.shape.trace or ""), "left_out": self.num_left_out},
            "objective": asdict(self.objective),
            "client": {"hardware": asdict(find_hardware()), "versions": find_versions()},
            "figures": asdict(report),
        }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
