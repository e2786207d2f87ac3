"""`baton bench`: sends the workload of a scenario, and prints a table or writes a file."""

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

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from cluster.bench.bench_load import WorkloadItem, fitting, items_of, without_arrivals
from cluster.bench.bench_report import Objective, Report, RequestRecord, make_report
from cluster.bench.client import CompletionClient, Dialect
from cluster.bench.http import HttpEndpoint
from cluster.bench.load import run_load
from cluster.bench.measured_on import find_hardware, find_versions
from cluster.bench.prompts import Prompts
from cluster.bench.report_table import report_table
from cluster.bench.result_files import check_files, write_json
from cluster.bench.step_trace import Mark, profiling
from cluster.cli.admin_client import DEFAULT_URL, GatewayUrl, ServedModel, find_model, open_client, request_json
from cluster.cli.options import SetKeys
from cluster.cli.terminal_tables import bars
from cluster.config.scenario import read_tables, scenario_of
from cluster.config.settings import Table, merge
from protos.errors import BatonError
from protos.hints import counted

DEFAULTS: Table = {"workload": {"requests": 64, "input_len": 256, "output_len": 64}}
"""These are taken where no trace is given."""
DEFAULT_CONCURRENCY = 8
REQUEST_TIMEOUT_S = 600.0
PROBE_TOKENS = 16
FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """`vocab_size` and `workers` are known for Baton's gateways only."""

    url: str
    model: ServedModel
    vocab_size: int | None
    workers: Sequence[Mapping[str, Any]]


def bench(
    file: Annotated[
        Path | None, typer.Argument(metavar="[SCENARIO]", help="Its [workload], objectives and seed are used.")
    ] = None,
    changes: SetKeys = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once (closed loop). Default: 8 without a rate or a trace.")
    ] = None,
    url: GatewayUrl = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="A served model. Default: the first one.")] = "",
    prompt_seed: Annotated[int | None, typer.Option(min=0, help="Seed of prompts. Default: a new one.")] = None,
    allow_failed: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Requests that may fail with exit code 0.")
    ] = 0.0,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", help="Sent as a bearer token.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures and hardware to this file.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the workers' steps.")] = None,
    admin_key: Annotated[str, typer.Option(envvar="BATON_ADMIN_KEY", help="Administrator's key, for --profile.")] = "",
) -> None:
    """Measure a running cluster, or any OpenAI-compatible server: TTFT, TPOT, ITL, E2E, throughput and goodput.

    Exits with 1 if a request failed or was refused: figures count complete answers only, and flatter a server that
    refuses. For a run that overloads the server on purpose, pass --allow-failed.
    """
    tables = read_tables(file, changes or ())
    scenario = scenario_of(tables)
    workload = tables.get("workload", {})
    if not scenario.workload.trace:
        scenario = scenario_of(merge(DEFAULTS, tables))
    is_closed = concurrency is None and not ("rate" in workload or "trace" in workload)
    at_once = DEFAULT_CONCURRENCY if is_closed else concurrency
    objective = Objective.of(scenario.objectives)
    items = items_of(scenario.workload, scenario.seed)
    check_files({"json": json_file, "profile": profile})
    target = find_target(url, model, api_key)
    fit, num_left_out = fitting(items if at_once is None else without_arrivals(items), target.model.max_model_len)
    prompts_from = secrets.randbits(32) if prompt_seed is None else prompt_seed

    def make_client() -> CompletionClient:
        return CompletionClient(
            HttpEndpoint.parse(url),
            model=target.model.name,
            prompts=Prompts(seed=prompts_from, vocab_size=target.vocab_size),
            timeout_s=REQUEST_TIMEOUT_S,
            api_key=api_key,
        )

    records, dialect = asyncio.run(_measure(fit, make_client, at_once, profiling(profile, url, admin_key)))
    report = make_report(records, objective)
    _print_notes(target, dialect, records, num_left_out, num_asked=len(fit))
    Console().print(report_table(report))
    if json_file is not None:
        command = shlex.join(["baton", *sys.argv[1:]])
        write_json(json_file, {
            "format": FORMAT,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command.replace(api_key, "...") if api_key else command,
            "target": asdict(target),
            "dialect": asdict(dialect),
            "workload": msgspec.to_builtins(scenario.workload)
            | {"seed": scenario.seed, "prompt_seed": prompts_from, "concurrency": at_once, "left_out": num_left_out},
            "objective": asdict(objective),
            "client": {"hardware": asdict(find_hardware()), "versions": find_versions()},
            "figures": asdict(report),
        })  # fmt: skip
    raise typer.Exit(130 if len(records) < len(fit) else int(_has_failed(report, allow_failed)))


def _has_failed(report: Report, allowed: float) -> bool:
    """Prints failures. True if more than `allowed` of the requests failed, or all did."""
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
            workers = request_json(client, "/admin/status")["workers"]
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
def _bar(total: int) -> Iterator[Callable[[int, RequestRecord | None], None]]:
    num_ended = num_failed = 0
    with bars(Console(stderr=True)) as bar:
        row = bar.add_task("", total=total)

        def tell(num_running: int, record: RequestRecord | None) -> None:
            nonlocal num_ended, num_failed
            num_ended += record is not None
            num_failed += bool(record and record.error)
            text = f"{num_running} running" + f", {num_failed} failed" * (num_failed > 0)
            bar.update(row, completed=num_ended, description=text)

        yield tell


def _print_notes(
    target: BenchTarget, dialect: Dialect, records: Sequence[RequestRecord], num_left_out: int, *, num_asked: int
) -> None:
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
