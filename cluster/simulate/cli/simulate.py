"""`baton simulate`: simulates the cluster of a scenario, a sweep of clusters or a soak."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.bench.result_files import check_files, line_file, write_json
from cluster.cli import options
from cluster.cli.terminal_tables import bars
from cluster.config.scenario import Scenario, read_scenario
from cluster.simulate.cli.scene import Scene, make_scene
from cluster.simulate.cli.soak_verb import ending_reported, replay_one, soak_clusters
from cluster.simulate.cli.trials import MAX_STEADY, document_of, sweep_clusters, until_steady, warn_left_out
from cluster.simulate.results.result_page import write_page
from cluster.simulate.results.summary import Summary, summary_table
from cluster.simulate.results.sweep import SweepTrial
from cluster.simulate.results.targets import targets_of
from cluster.simulate.run.autoscale import MAX_RECORDS, PlannedRun, autoscaling, planner_settings
from cluster.simulate.run.choices import ClusterChoice, choices
from protos.errors import Misconfigured
from router.fleet_owner import FleetChange

KEYS = Path(__file__).with_name("keys.toml")


def simulate(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[SCENARIO]", help="A TOML file; see --keys.")] = None,
    changes: options.SetKeys = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of load, faults and the order of simultaneous events; or of --soak.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots to this file.")] = None,
    events: Annotated[Path | None, typer.Option(help="Write the event log to this file.")] = None,
    soak: Annotated[int | None, typer.Option(min=1, help="Number of random clusters with faults.")] = None,
    replay: Annotated[int | None, typer.Option(min=0, help="Repeat one of --soak's clusters, by its seed.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print every key of a scenario with its default.")] = False,
) -> None:
    """Run the production code in virtual time: size a cluster, tune a policy, look for faults.

    A scenario with several clusters or with targets is a sweep: it names the cheapest cluster that reaches them.
    """
    logging.getLogger("baton").setLevel(logging.ERROR)  # the end of a simulated worker is expected
    if keys:
        typer.echo(KEYS.read_text(encoding="utf-8"), nl=False)
        return
    if replay is not None:
        options.refuse_others(context, "--replay SEED repeats one of --soak's clusters", {"replay", "events"})
    elif soak is not None:
        options.refuse_others(context, "--soak N makes its clusters, loads and faults", {"soak", "seed"})
    scenario = read_scenario(file, [*(changes or ()), *([] if seed is None else [f"seed={seed}"])])
    read = [path for path in (file, scenario.workload.trace, scenario.config) if path]
    files = {"json": json_file, "html": html_file, "events": events}
    check_files(files, [Path(path) for path in read])
    if replay is not None:
        replay_one(replay, events)
    elif soak is not None:
        soak_clusters(range(scenario.seed, scenario.seed + soak))
    else:
        _run(scenario, files)


def _run(scenario: Scenario, files: Mapping[str, Path | None]) -> None:
    scene = make_scene(scenario)
    every = choices(scenario.cluster, scene.settings)
    if len(every) == 1 and not scenario.objectives.targets and scenario.cluster.max_gpus is None:
        return _once(scene, every[0], files)
    for_one = {"--events": files["events"], "--html": files["html"], "cluster.autoscale": scenario.cluster.autoscale}
    for name, value in for_one.items():
        if value:
            raise Misconfigured(f"{name} is for a single cluster without targets, and a sweep tries many", param=name)
    targets = targets_of(scene.objective, scenario.objectives.attainment, scenario.objectives.targets)
    sweep_clusters(scene, every, targets, files["json"])


def _once(scene: Scene, choice: ClusterChoice, files: Mapping[str, Path | None]) -> None:
    config, planned, steer, scenario = scene.config(choice), PlannedRun(), None, scene.scenario
    if scenario.cluster.autoscale:
        devices = {role: config.gpus_of(role) for role in config.pools.counts()}
        attainment = scenario.objectives.attainment
        steer = autoscaling(planner_settings(scenario.cluster.autoscale, scene.objective, attainment, devices), planned)
        # The planner reads the records of a whole window.
        config = replace(config, router=replace(config.router, decision_history_size=MAX_RECORDS))
    errors, start_s = Console(stderr=True), time.perf_counter()
    warn_left_out(scene.fitting(config)[1], scene.room(config))
    most = MAX_STEADY if steer is None and files["events"] is None else 0
    with line_file("events", files["events"]) as put, ending_reported(), bars(errors) as bar:
        outcome, summary = until_steady(scene, choice, config, bar, most=most, write=put, steer=steer)
    took_s, command = time.perf_counter() - start_s, shlex.join(["baton", *sys.argv[1:]])
    with ExitStack() as at_end:  # files first: the reader of the table may stop early, as in `| head`
        at_end.callback(
            errors.print, f"{outcome.duration_s:,.0f} s of {choice} in {took_s:,.1f} s", style="dim", soft_wrap=True
        )
        at_end.callback(_print_run, summary, planned.changes)
        if (html_file := files["html"]) is not None:
            at_end.callback(write_page, html_file, outcome, summary, command)
        if (json_file := files["json"]) is not None:
            usd_per_hour = choice.num_gpus * scene.usd_per_gpu_hour
            trial = SweepTrial(choice=choice, summary=summary, usd_per_hour=usd_per_hour)
            changes = {"changes": [asdict(change) for change in planned.changes]} if steer is not None else {}
            at_end.callback(write_json, json_file, document_of(scene, command, [trial]) | changes)


def _print_run(summary: Summary, changes: Sequence[FleetChange]) -> None:
    console = Console()
    console.print(summary_table(summary))
    for change in changes:
        console.print(f"{change.at_s:,.0f} s: {change.after}, for {change.why}", highlight=False, soft_wrap=True)
