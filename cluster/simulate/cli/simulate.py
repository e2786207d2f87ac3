"""`baton simulate`: simulates a cluster, a sweep of clusters or a soak, with faults if requested."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.cli import options
from cluster.config.config import ClusterConfig
from cluster.planner.planner import PlannerSettings
from cluster.simulate.cli.scenario import Scene, make_scene
from cluster.simulate.cli.soak import ending_reported, replay_one, soak_clusters
from cluster.simulate.cli.trials import document_of, keep_json, run_scene, sweep_clusters, until_steady, warn_left_out
from cluster.simulate.latency.shapes import DTYPES, GPUS, MODELS
from cluster.simulate.results.files import Log, keep, report_lost, write
from cluster.simulate.results.files import check as check_files
from cluster.simulate.results.html import page
from cluster.simulate.results.report import Summary, summary_table
from cluster.simulate.results.sweep import (
    ClusterChoice,
    SweepTrial,
    asked,
    within,
)
from cluster.simulate.results.targets import targets_of
from cluster.simulate.run.autoscale import MAX_RECORDS, PlannedRun, autoscaling, planner_settings
from cluster.simulate.world.workload import GENERATED, OF_OWN_LENGTHS
from router.policies.registry import NAMES

MAX_REQUESTS, MAX_GATEWAYS, MAX_FAULTS, MAX_GPUS = 10_000_000, 1_000, 100_000, 1_024
Requests = Annotated[
    int | None,
    typer.Option("--requests", min=1, max=MAX_REQUESTS, help="Default: until figures are steady, or all of a trace."),
]
WeightType = Annotated[
    str | None, typer.Option("--dtype", "--weights", help=f"Weights: {', '.join(DTYPES)}. Default: the model's.")
]
Tp = Annotated[str | None, typer.Option(help="GPUs of a worker; several, such as 1,2,4, with --sweep. Default: 1.")]
Prefill = Annotated[
    str | None, typer.Option(help="Prefill workers; 0: colocated ones alone. 0:8 to sweep. Default: 1.")
]
Gateways = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_GATEWAYS,
        help="Gateways, which share the requests. Default: one, of as many processes as are set.",
    ),
]
PrefillTp = Annotated[str | None, typer.Option(help="GPUs of a prefill worker. Default: --tp.")]
DecodeTp = Annotated[str | None, typer.Option(help="GPUs of a decode worker. Default: --tp.")]
LaneGbps = Annotated[
    float | None,
    typer.Option(help="Gigabits a second of a GPU's network card, for KV. Default: of the GPU's usual host."),
]
NvLink = Annotated[
    bool, typer.Option("--nvlink", help="KV between workers of one host of 8 GPUs goes over its NVLink.")
]
Workers = Annotated[str | None, typer.Option(help="Colocated workers; implies --colocated. 1:8 to sweep. Default: 1.")]
Targets = Annotated[list[str] | None, typer.Option(help="Percentile to sweep for, 'ttft p90 < 2 s'. Repeatable.")]
Autoscale = Annotated[
    str | None,
    typer.Option(help="The planner keeps each pool within so many workers, such as 1:8, to meet the objective."),
]
Acceptance = Annotated[
    str | None,
    typer.Option(help="Chance that a draft's position is right if those before it are, for each: 0.7,0.6,0.5."),
]
Gpus = Annotated[int | None, typer.Option(min=1, max=MAX_GPUS, help="Sweep every cluster of at most this many GPUs.")]


def simulate(
    context: typer.Context,
    trace: Annotated[Path | None, typer.Option(help="Requests to replay, in Mooncake's format.")] = None,
    workload: Annotated[str, typer.Option(help=f"Without a trace: {', '.join(GENERATED)}.")] = "poisson",
    num_requests: Requests = None,
    rate: Annotated[float, typer.Option(help="Generated requests a second, on average.")] = 4.0,
    trace_scale: Annotated[float, typer.Option(help="Multiplies the trace's lengths.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Run the trace's time this many times as fast.")] = 1.0,
    input_len: Annotated[str, typer.Option(help="Tokens of a generated prompt: 256 or 100:200.")] = "200:4000",
    output_len: Annotated[str, typer.Option(help="Tokens of a generated answer: 64 or 20:400.")] = "20:400",
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}, or a TOML file of your own.")] = "h100",
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}, or a config.json.")] = "llama-3-8b",
    dtype: WeightType = None,
    lane_gbps: LaneGbps = None,
    nvlink: NvLink = False,
    expert_parallel: Annotated[bool | None, options.option("worker.expert_parallel")] = None,
    tp: Tp = None,
    prefill_tp: PrefillTp = None,
    decode_tp: DecodeTp = None,
    prefill: Prefill = None,
    decode: Annotated[str | None, typer.Option(help="Decode workers; 1:8 to sweep. Default: 1.")] = None,
    colocated: options.Colocated = False,
    workers: Workers = None,
    policy: Annotated[str | None, typer.Option(help=f"{', '.join(NAMES)}; several, with commas, to sweep.")] = None,
    kv_dtype: Annotated[str | None, options.option("worker.kv_dtype")] = None,
    host_kv_gib: Annotated[float | None, options.option("worker.host_kv_gib")] = None,
    speculate: Annotated[str | None, options.option("worker.speculate")] = None,
    acceptance: Acceptance = None,
    gateways: Gateways = None,
    file: options.ConfigFile = None,
    further: options.Set = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective: milliseconds to the first token, above 0.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Objective: milliseconds per further token, above 0.")] = None,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="Share of requests to meet it, to sweep.")] = 0.95,
    target: Targets = None,
    autoscale: Autoscale = None,
    gpus: Gpus = None,
    usd_per_gpu_hour: Annotated[float | None, typer.Option(min=0, help="Default: an example price of the GPU.")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="'AT KIND TARGET [for S] [by N]'. Repeatable.")] = None,
    faults: Annotated[int, typer.Option(min=0, max=MAX_FAULTS, help="Number of random faults.")] = 0,
    audit_every: Annotated[int, typer.Option(min=0, help="Events between two audits; 0: at the end.")] = 0,
    single_step: Annotated[bool, typer.Option("--single-step", help="No leaps: same result, slower.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of load, faults and the order of simultaneous events.")] = 0,
    sweep_all: Annotated[bool, typer.Option("--sweep", help="Every combination; name the cheapest.")] = False,
    soak: Annotated[int | None, typer.Option(min=1, help="Number of random clusters with faults.")] = None,
    replay: Annotated[int | None, typer.Option(min=0, help="Repeat one of --soak's clusters, by its seed.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots to this file.")] = None,
    events: Annotated[Path | None, typer.Option(help="Write the event log to this file.")] = None,
) -> None:
    """Run the production code in virtual time: size a cluster, tune a policy, look for faults."""
    _check(context, {"json": json_file, "html": html_file, "events": events})
    if soak is not None or replay is not None:
        return replay_one(replay, events) if replay is not None else soak_clusters(range(seed, seed + (soak or 0)))
    scene, every = _scene(context.params)
    if sweep_all:
        return sweep_clusters(scene, every, targets_of(scene.objective, attainment, target or ()), json_file, html_file)
    _once(scene, every[0], json_file, html_file, events, _planning(autoscale, scene, every[0], attainment))


def _planning(within: str | None, scene: Scene, choice: ClusterChoice, attainment: float) -> PlannerSettings | None:
    """Raises Misconfigured."""
    if within is None:
        return None
    config = scene.config(choice)
    devices = {role: config.gpus_of(role) for role in config.pools.counts()}
    return planner_settings(within, scene.objective, attainment, devices)


def _scene(given: Mapping[str, Any]) -> tuple[Scene, list[ClusterChoice]]:
    """The scenario with its clusters. Warns of mixtures on several hosts. Raises Misconfigured."""
    scene = make_scene(given)
    every = _clusters(scene.settings, given)
    scene.check_hosts(every)
    return scene, every


def _clusters(settings: ClusterConfig, given: Mapping[str, Any]) -> list[ClusterChoice]:
    if given["gpus"] is not None:
        chosen = {name: given[name] for name in ("gpus", "tp", "policy", "colocated")}
        return within(settings, **chosen)
    workers = "1" if given["colocated"] and given["workers"] is None else given["workers"]
    names = ("prefill", "decode", "tp", "prefill_tp", "decode_tp", "policy")
    return asked(settings, workers=workers, to_sweep=given["sweep_all"], **{name: given[name] for name in names})


def _check(context: typer.Context, written: Mapping[str, Path | None]) -> None:
    """Raises Misconfigured for flags without effect, and for output files that could not be written at the end."""
    logging.getLogger("baton").setLevel(logging.ERROR)  # the end of a simulated worker is expected
    every = [one.name for one in context.command.params if one.name is not None]
    if context.params["replay"] is not None:
        why = "--replay SEED runs one of --soak's clusters, as its seed made it"
        options.refuse_others(context, "--replay SEED writes an event log alone", {*every} - {"json_file", "html_file"})
        options.refuse_others(context, why, {"replay", "events"})
    elif context.params["soak"] is not None:
        files = {"json_file", "html_file", "events"}
        options.refuse_others(context, "--soak N writes no files; --replay SEED has --events", {*every} - files)
        options.refuse_others(context, "--soak N looks at all invariants every few events", {*every} - {"audit_every"})
        options.refuse_others(context, "--soak N makes its clusters, loads and faults itself", {"soak", "seed"})
    elif context.params["sweep_all"]:
        options.refuse_others(context, "--sweep runs many clusters", {*every} - {"events", "autoscale"})
    elif context.params["autoscale"] is None:
        options.refuse_others(context, "without --sweep", {*every} - {"attainment", "target", "gpus"})
    else:
        options.refuse_others(context, "without --sweep", {*every} - {"target", "gpus"})
    if context.params["gpus"] is not None:
        counts = {"prefill", "decode", "workers", "prefill_tp", "decode_tp"}
        options.refuse_others(context, "--gpus N tries every number of workers", {*every} - counts)
    if context.params["trace"] is not None:
        made = {"workload", "rate", "input_len", "output_len"}
        options.refuse_others(context, "--trace FILE has the requests and their times", {*every} - made)
    else:
        options.refuse_others(context, "without --trace FILE", {*every} - {"trace_scale", "trace_speed"})
    if (name := context.params["workload"]) in OF_OWN_LENGTHS:
        options.refuse_others(context, f"--workload {name} has its own lengths", {*every} - {"input_len", "output_len"})
    if context.params["colocated"] or context.params["workers"] is not None:
        asked_by = "--workers N asks" if context.params["workers"] is not None else "--colocated asks"
        why = f"{asked_by} for colocated workers, instead of two pools"
        options.refuse_others(context, why, {*every} - {"prefill", "decode", "prefill_tp", "decode_tp"})
    read = {"trace": [context.params["trace"]], "config": [context.params["file"]]}
    check_files(written, read)


def _once(
    scene: Scene,
    choice: ClusterChoice,
    json_file: Path | None,
    html_file: Path | None,
    events: Path | None,
    planning: PlannerSettings | None = None,
) -> None:
    config, planned = scene.config(choice), PlannedRun()
    if planning is not None:  # the planner reads the records of a whole window
        config = replace(config, router=replace(config.router, decision_history_size=MAX_RECORDS))
    sessions, left_out = scene.fitting(config)
    errors = Console(stderr=True)
    warn_left_out(left_out, scene.room(config))
    start_s = time.perf_counter()
    with Log(events) as log, ending_reported(events, json_file, html_file):
        steer = autoscaling(planning, planned) if planning is not None else None
        if scene.is_open_ended and planning is None and events is None:
            outcome, summary = until_steady(scene, choice, config, errors)
        else:
            outcome = run_scene(scene, config, sessions, errors, write=log.write, steer=steer)
            summary = scene.summary(choice, outcome, left_out)
    took_s = time.perf_counter() - start_s
    command, trials = shlex.join(["baton", *sys.argv[1:]]), [_only(scene, choice, summary)]

    def write_page() -> None:
        if html_file is not None:
            made = page(outcome, summary, command=command, objective=scene.objective)
            write(html_file, made, "html")

    # Files first: the reader of the table may stop early, as in `| head`.
    document = document_of(scene, command, trials)
    if planning is not None:
        document["changes"] = [asdict(change) for change in planned.changes]
    lost = keep(log.check, partial(keep_json, json_file, document), write_page)
    Console().print(summary_table(summary))
    for change in planned.changes:
        Console().print(f"{change.at_s:,.0f} s: {change.after}, for {change.why}", highlight=False, soft_wrap=True)
    errors.print(f"{outcome.duration_s:,.0f} s of {choice} in {took_s:,.1f} s", style="dim", soft_wrap=True)
    report_lost(lost)


def _only(scene: Scene, choice: ClusterChoice, summary: Summary) -> SweepTrial:
    """The trial of a workload without requests."""
    return SweepTrial(choice=choice, summary=summary, usd_per_hour=choice.num_gpus * scene.usd_per_gpu_hour)
