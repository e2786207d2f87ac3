"""Runs a scene: one cluster until its figures are steady, and a sweep of clusters."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from cluster.bench.result_files import write_json
from cluster.cli.terminal_tables import bars, result_console, warn
from cluster.simulate.cli.scene import Scene
from cluster.simulate.cli.soak_verb import report_interrupted
from cluster.simulate.results.summary import Summary, figures
from cluster.simulate.results.sweep import SweepTrial, cheapest, front, sweep_table, verdict
from cluster.simulate.results.targets import PercentileTarget
from cluster.simulate.run.choices import ClusterChoice
from cluster.simulate.run.fault_injector import check
from cluster.simulate.run.run_progress import ProgressWatch
from cluster.simulate.run.simulation import SimulationOutcome, Steer
from cluster.simulate.run.simulation import simulate as run_simulation
from cluster.simulate.run.simulation_config import SimulationConfig
from cluster.simulate.world.simulated_load import SessionLimit, UserSession, fitting
from protos.errors import Misconfigured
from protos.hints import counted

FORMAT = "baton-simulation/2"
MAX_STEADY = 32_000  # requests of a load that runs until its figures are steady
MAX_STEADY_SWEPT = MAX_STEADY // 4  # the same for each cluster of a sweep


@dataclass(frozen=True, slots=True)
class SweptClusters:
    """`impossible` clusters cannot be, hold no session, or lack a fault's target; `overloaded` ones are offered more
    than they can do, by pool."""

    possible: dict[ClusterChoice, SimulationConfig] = field(default_factory=dict)
    impossible: dict[ClusterChoice, Misconfigured] = field(default_factory=dict)
    overloaded: dict[ClusterChoice, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, scene: Scene, every: Sequence[ClusterChoice]) -> SweptClusters:
        """Prints why clusters are left out. Raises Misconfigured if none can be tried."""
        clusters = cls()
        for choice in every:
            clusters._add(scene, choice)
        if not clusters.possible:
            if not clusters.overloaded:
                raise next(iter(clusters.impossible.values()))
            raise Misconfigured(f"no cluster can do this load: {clusters.nearest}", param="cluster")
        by_reason: dict[str, list[ClusterChoice]] = {}
        for choice, error in clusters.impossible.items():
            by_reason.setdefault(error.message, []).append(choice)
        for reason, like in by_reason.items():
            others = f" and {counted(len(like) - 1, 'other')}" if len(like) > 1 else ""
            warn(f"left out: {reason} ({like[0]}{others})")
        return clusters

    def _add(self, scene: Scene, choice: ClusterChoice) -> None:
        try:
            config = scene.config(choice)
            scene.fitting(config)
            check(scene.faults, config)
        except Misconfigured as error:
            self.impossible[choice] = error
            return
        shares = scene.offered(config)
        if max(shares.values(), default=0.0) > 1.0:
            self.overloaded[choice] = {role.value: share for role, share in shares.items()}
        else:
            self.possible[choice] = config

    @property
    def nearest(self) -> str:
        choice, shares = min(self.overloaded.items(), key=lambda item: max(item[1].values()))
        pool = max(shares, key=lambda role: shares[role])
        return f"the nearest is {choice}, whose {pool} pool is offered {shares[pool]:.0%} of what it can do"


def sweep_clusters(
    scene: Scene,
    every: Sequence[ClusterChoice],
    targets: Sequence[PercentileTarget],
    json_file: Path | None,
) -> None:
    """Raises Exit(1) if no cluster meets the objective, Exit(130) after Ctrl-C."""
    clusters = SweptClusters.of(scene, every)
    room = max((scene.room(config) for config in clusters.possible.values()), key=lambda limit: limit.num_tokens)
    _, left_out = fitting(scene.sessions, room)
    warn_left_out(left_out, room)
    trials = _try_all(scene, clusters.possible, targets)
    if not trials:
        report_interrupted(0, len(clusters.possible))
    command = shlex.join(["baton", *sys.argv[1:]])
    notes = _notes(clusters, trials, targets, room.left_out(left_out) if left_out else "")
    with ExitStack() as at_end:  # files first: the reader of the table may stop early, as in `| head`
        at_end.callback(_print_sweep, trials, [scene.hardware, *notes])
        if json_file is not None:
            document = document_of(scene, command, trials)
            at_end.callback(write_json, json_file, document | _marks(scene, clusters, trials, targets))
    if len(trials) < len(clusters.possible):
        report_interrupted(len(trials), len(clusters.possible))
    if cheapest(trials) is None:
        raise typer.Exit(1)


def _marks(
    scene: Scene, clusters: SweptClusters, trials: Sequence[SweepTrial], targets: Sequence[PercentileTarget]
) -> dict[str, Any]:
    best = cheapest(trials)
    return {
        "num_done": len(trials),
        "num_possible": len(clusters.possible),
        "left_out": [
            {"cluster": scene.cluster(choice), "reason": error.message} for choice, error in clusters.impossible.items()
        ],
        "front": [scene.cluster(trial.choice) for trial in front(trials)],
        "cheapest": best and scene.cluster(best.choice),
        "targets": [asdict(target) for target in targets],
        "verdict": verdict(trials, targets),
        "overloaded": [
            {"cluster": scene.cluster(choice), "offered": share} for choice, share in clusters.overloaded.items()
        ],
    }


def _notes(
    clusters: SweptClusters, trials: Sequence[SweepTrial], targets: Sequence[PercentileTarget], left_out: str
) -> list[str]:
    num_every = len(clusters.possible) + len(clusters.impossible) + len(clusters.overloaded)
    of_every = f"of {counted(num_every, 'cluster')}"
    notes = []
    if clusters.impossible:
        notes.append(f"{len(clusters.impossible):,} {of_every} left out: the reasons are on stderr and in --json")
    if clusters.overloaded:
        num = f"{len(clusters.overloaded):,} {of_every}"
        notes.append(f"{num} not tried, as they cannot do this load: {clusters.nearest}")
    if left_out:
        notes.append(f"{left_out}: all clusters miss them")
    num_possible = len(clusters.possible)
    of_those = f"of the {len(trials):,} of {counted(num_possible, 'cluster')} done, "
    return [*notes, f"{of_those if len(trials) < num_possible else ''}{verdict(trials, targets)}"]


def _print_sweep(trials: Sequence[SweepTrial], notes: Sequence[str]) -> None:
    console = result_console()
    console.print(sweep_table(trials))
    for note in notes:
        console.print(Text(note), soft_wrap=True)


def _try_all(
    scene: Scene, possible: Mapping[ClusterChoice, SimulationConfig], targets: Sequence[PercentileTarget]
) -> list[SweepTrial]:
    """Tries clusters until Ctrl-C."""
    trials: list[SweepTrial] = []
    with bars(Console(stderr=True)) as bar, suppress(KeyboardInterrupt):
        row = bar.add_task("", total=len(possible))
        for choice, config in possible.items():
            bar.update(row, description=str(choice))
            trials.append(_try_out(scene, choice, config, targets, bar))
            bar.update(row, advance=1)
            if not bar.console.is_interactive:
                bar.console.print(f"{len(trials)} of {len(possible)}: {choice}", highlight=False, soft_wrap=True)
    return trials


def _try_out(
    scene: Scene, choice: ClusterChoice, config: SimulationConfig, targets: Sequence[PercentileTarget], bar: Progress
) -> SweepTrial:
    """Counts requests that do not fit the cluster as missed."""
    outcome, summary = until_steady(scene, choice, config, bar, most=MAX_STEADY_SWEPT)
    num_missed = summary.num_left_out_requests + summary.num_not_asked
    return SweepTrial(
        choice=choice,
        summary=summary,
        usd_per_hour=choice.num_gpus * scene.usd_per_gpu_hour,
        reached=[target.reached(outcome.records, num_missed) for target in targets],
    )


def until_steady(
    scene: Scene,
    choice: ClusterChoice,
    config: SimulationConfig,
    bar: Progress,
    *,
    most: int,
    write: Callable[[str], object] | None = None,
    steer: Steer | None = None,
) -> tuple[SimulationOutcome, Summary]:
    """Runs an open-ended load for longer until its figures are steady, for at most `most` requests. A load that grew
    twice will not settle."""
    has_grown = False
    while True:
        sessions, left_out = scene.fitting(config)
        with ProgressWatch(bar, sum(len(session.turns) for session in sessions)) as watch:
            schedule = scene.schedule(config, sessions)
            outcome = run_simulation(config, sessions, schedule, write=write, watch=watch.begin, steer=steer)
        summary = scene.summary(choice, outcome, left_out)
        num_requests, num_wanted = summary.report.num_requests, min(summary.num_wanted, most)
        if not scene.is_open_ended or num_wanted <= num_requests or (has_grown and summary.grew):
            return outcome, summary
        has_grown = summary.grew
        again = f"{choice}: not steady after {num_requests:,} requests: again with {num_wanted:,}"
        bar.console.print(again, style="dim", highlight=False, soft_wrap=True)
        scene = scene.longer(num_wanted)


def warn_left_out(left_out: Sequence[UserSession], room: SessionLimit) -> None:
    if left_out:
        warn(room.left_out(left_out))


def document_of(scene: Scene, command: str, trials: Sequence[SweepTrial]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "command": command,
        "scenario": msgspec.to_builtins(scene.scenario),
        "runs": [
            {
                "cluster": scene.cluster(trial.choice),
                "usd_per_hour": trial.usd_per_hour,
                "targets": [
                    {"target": str(reached.target), "share": reached.share, "is_met": reached.is_met}
                    for reached in trial.reached
                ],
                "figures": figures(trial.summary),
            }
            for trial in trials
        ],
    }
