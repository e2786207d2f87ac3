"""Runs of a scene: one cluster until its figures are steady, and a sweep of clusters."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from cluster.bench.verb import write_json
from cluster.cli.tables import result_console
from cluster.simulate.cli.scenario import Scene
from cluster.simulate.cli.soak import report_interrupted
from cluster.simulate.results.files import keep, report_lost, write
from cluster.simulate.results.report import Summary, figures
from cluster.simulate.results.sweep import (
    ClusterChoice,
    SweepTrial,
    cheapest,
    front,
    sweep_table,
    verdict,
)
from cluster.simulate.results.sweep_html import sweep_page
from cluster.simulate.results.targets import PercentileTarget
from cluster.simulate.run.config import SimulationConfig
from cluster.simulate.run.fault_injector import check
from cluster.simulate.run.progress import ProgressWatch, bars, duration_text, warn
from cluster.simulate.run.simulation import SimulationOutcome, Steer
from cluster.simulate.run.simulation import simulate as run_simulation
from cluster.simulate.world.clock import noting_ctrl_c
from cluster.simulate.world.workload import SessionLimit, UserSession, fitting
from protos.errors import Misconfigured
from protos.hints import counted

FORMAT = "baton-simulation/1"
MAX_STEADY = 32_000  # requests of a load that runs until its figures are steady


def sweep_clusters(
    scene: Scene,
    every: Sequence[ClusterChoice],
    targets: Sequence[PercentileTarget],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Raises Exit(1) if no cluster meets the objective, Exit(130) after Ctrl-C."""
    errors = Console(stderr=True)
    possible, impossible, overloaded = _possible(scene, every)
    if not possible:
        raise Misconfigured(f"no cluster can do this load: {_nearest(overloaded)}", param="sweep")
    room = max((scene.room(config) for config in possible.values()), key=lambda one: one.num_tokens)
    _, left_out = fitting(scene.sessions, room)
    warn_left_out(left_out, room)
    trials = _try_all(scene, possible, targets, errors)
    if not trials:
        report_interrupted(0, len(possible))
    best, command = cheapest(trials), shlex.join(["baton", *sys.argv[1:]])
    document = document_of(scene, command, trials)
    marks = {
        "num_done": len(trials),
        "num_possible": len(possible),
        "left_out": [{"cluster": scene.cluster(one), "reason": reason} for one, reason in impossible.items()],
        "front": [scene.cluster(one.choice) for one in front(trials)],
        "cheapest": best and scene.cluster(best.choice),
        "targets": [asdict(target) for target in targets],
        "attainment": targets[0].share if targets[0].objective is not None else None,
        "verdict": verdict(trials, targets),
        "overloaded": [{"cluster": scene.cluster(one), "offered": share} for one, share in overloaded.items()],
    }

    def write_page() -> None:
        if html_file is not None:
            write(html_file, sweep_page(trials, verdict(trials, targets), command=command), "html")

    lost = keep(partial(keep_json, json_file, {**document, **marks}), write_page)
    console = result_console()
    console.print(sweep_table(trials))
    console.print(Text(scene.hardware))
    if impossible:
        those = f"{len(impossible):,} of {counted(len(every), 'cluster')} left out"
        console.print(f"{those}: the reasons are on stderr and in --json", style="yellow", highlight=False)
    if overloaded:
        those = f"{len(overloaded):,} of {counted(len(every), 'cluster')} not tried"
        console.print(f"{those}, as they cannot do this load: {_nearest(overloaded)}", highlight=False, soft_wrap=True)
    if left_out:
        console.print(f"{room.left_out(left_out)}: all clusters miss them", style="yellow", highlight=False)
    is_whole = len(trials) == len(possible)
    of_those = "" if is_whole else f"of the {len(trials):,} of {counted(len(possible), 'cluster')} done, "
    style = "yellow" if best is None else ""
    console.print(
        f"{of_those}{verdict(trials, targets, is_whole=is_whole)}", style=style, highlight=False, soft_wrap=True
    )
    report_lost(lost)
    if not is_whole:
        report_interrupted(len(trials), len(possible))
    if best is None:
        raise typer.Exit(1)


def _possible(
    scene: Scene, every: Sequence[ClusterChoice]
) -> tuple[dict[ClusterChoice, SimulationConfig], dict[ClusterChoice, str], dict[ClusterChoice, Mapping[str, float]]]:
    """Clusters to try; those that cannot be, hold none of the sessions or lack the target of a fault, with the reason,
    which is printed, too; and those that are offered more than they can do, by pool. Raises Misconfigured if no cluster
    can be."""
    possible: dict[ClusterChoice, SimulationConfig] = {}
    overloaded: dict[ClusterChoice, Mapping[str, float]] = {}
    reasons: dict[str, Misconfigured] = {}
    left_out: dict[str, list[ClusterChoice]] = {}
    for choice in every:
        try:
            config = scene.config(choice)
            scene.fitting(config)
            check(scene.faults, config)
            shares = scene.offered(config)
            if max(shares.values(), default=0.0) > 1.0:
                overloaded[choice] = {role.value: share for role, share in shares.items()}
            else:
                possible[choice] = config
        except Misconfigured as error:
            reasons.setdefault(error.message, error)
            left_out.setdefault(error.message, []).append(choice)
    if not possible and not overloaded:
        raise next(iter(reasons.values()))
    for reason, like in left_out.items():
        others = f" and {counted(len(like) - 1, 'other')}" if len(like) > 1 else ""
        warn(f"left out: {reason} ({like[0]}{others})")
    return possible, {choice: reason for reason, like in left_out.items() for choice in like}, overloaded


def _nearest(overloaded: Mapping[ClusterChoice, Mapping[str, float]]) -> str:
    choice, shares = min(overloaded.items(), key=lambda item: max(item[1].values()))
    pool = max(shares, key=lambda role: shares[role])
    return f"the nearest is {choice}, whose {pool} pool is offered {shares[pool]:.0%} of what it can do"


def _try_all(
    scene: Scene,
    possible: Mapping[ClusterChoice, SimulationConfig],
    targets: Sequence[PercentileTarget],
    errors: Console,
) -> list[SweepTrial]:
    """Simulates clusters one after the other, until Ctrl-C; then there are fewer trials than clusters."""
    trials: list[SweepTrial] = []
    begin_s = time.monotonic()
    with bars(errors) as bar, noting_ctrl_c() as ctrl_c, suppress(KeyboardInterrupt):
        row = bar.add_task("", total=len(possible))
        left = ""
        for choice, config in possible.items():
            if ctrl_c.came:
                break
            bar.update(row, description=f"{choice}{left}")
            trials.append(_try_out(scene, choice, config, targets, bar))
            mean_s = (time.monotonic() - begin_s) / len(trials)
            left = f", about {duration_text(mean_s * (len(possible) - len(trials)))} left"
            bar.update(row, advance=1)
            if not bar.console.is_interactive:
                bar.console.print(f"{len(trials)} of {len(possible)}: {choice}{left}", highlight=False, soft_wrap=True)
    return trials


def _try_out(
    scene: Scene, choice: ClusterChoice, config: SimulationConfig, targets: Sequence[PercentileTarget], bar: Progress
) -> SweepTrial:
    """Counts requests that do not fit the cluster as missed."""
    outcome, summary = until_steady(scene, choice, config, bar.console, above=bar)
    num_missed = summary.num_left_out_requests + summary.num_not_asked
    return SweepTrial(
        choice=choice,
        summary=summary,
        usd_per_hour=choice.num_gpus * scene.usd_per_gpu_hour,
        reached=[target.reached(outcome.records, num_missed) for target in targets],
    )


def until_steady(
    scene: Scene, choice: ClusterChoice, config: SimulationConfig, errors: Console, *, above: Progress | None = None
) -> tuple[SimulationOutcome, Summary]:
    """Runs a load that is open-ended for longer until its figures are steady, for at most `MAX_STEADY` requests, those
    of one cluster of a sweep for a fourth. A load whose requests waited longer and longer twice will not settle."""
    most = MAX_STEADY if above is None else MAX_STEADY // 4
    has_grown = False
    while True:
        sessions, left_out = scene.fitting(config)
        outcome = run_scene(scene, config, sessions, errors, above=above)
        summary = scene.summary(choice, outcome, left_out)
        num_requests, num_wanted = summary.report.num_requests, min(summary.num_wanted, most)
        if not scene.is_open_ended or num_wanted <= num_requests or (has_grown and summary.grew):
            return outcome, summary
        has_grown = summary.grew
        again = f"{choice}: not steady after {num_requests:,} requests: again with {num_wanted:,}"
        errors.print(again, style="dim", highlight=False, soft_wrap=True)
        scene = scene.longer(num_wanted)


def run_scene(
    scene: Scene,
    config: SimulationConfig,
    sessions: Sequence[UserSession],
    errors: Console,
    *,
    write: Callable[[str], object] | None = None,
    above: Progress | None = None,
    steer: Steer | None = None,
) -> SimulationOutcome:
    num_requests = sum(len(session.turns) for session in sessions)
    until_s = max(session.due_s for session in sessions)
    with ProgressWatch(errors, num_requests=num_requests, until_s=until_s, above=above) as watch:
        schedule = scene.schedule(config, sessions)
        return run_simulation(config, sessions, schedule, write=write, watch=watch.begin, steer=steer)


def warn_left_out(left_out: Sequence[UserSession], room: SessionLimit) -> None:
    if left_out:
        warn(room.left_out(left_out))


def keep_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        write_json(path, content)


def document_of(scene: Scene, command: str, trials: Sequence[SweepTrial]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "command": command,
        "settings": scene.in_force(),
        "runs": [
            {
                "cluster": scene.cluster(trial.choice),
                "usd_per_hour": trial.usd_per_hour,
                "targets": [
                    {"target": str(one.target), "share": one.share, "is_met": one.is_met} for one in trial.reached
                ],
                "figures": figures(trial.summary),
            }
            for trial in trials
        ],
    }
