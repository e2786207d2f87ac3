"""`baton simulate --soak` and `--replay`: random clusters with random faults."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from cluster.bench.bench_report import Objective
from cluster.bench.result_files import line_file
from cluster.cli.terminal_tables import bars, warn
from cluster.simulate.results.summary import summarise, summary_table
from cluster.simulate.run import soak_trial as soaking
from cluster.simulate.run.simulation import Interrupted
from protos.hints import counted

SOAKED_A_LINE = 100
"""Clusters between two lines of progress without a terminal."""


def soak_clusters(seeds: range) -> None:
    """Raises Exit(1) if a cluster broke, Exit(130) after Ctrl-C."""
    num_done = num_broken = 0
    interrupted = False
    errors = Console(stderr=True)
    with bars(errors) as bar:
        row = bar.add_task("", total=len(seeds))
        for seed in seeds:
            try:
                soaking.run(soaking.trial(seed))
            except KeyboardInterrupt:
                interrupted = True
                break
            except Exception as error:
                _print_broken(errors, seed, error)
                num_broken += 1
            bar.update(row, advance=1, description=f"{num_broken} broken" if num_broken else "")
            num_done = seed - seeds.start + 1
            if not errors.is_interactive and not num_done % SOAKED_A_LINE:
                errors.print(f"{num_done:,} of {len(seeds):,}, {num_broken} broken", highlight=False)
    Console().print(f"{counted(num_done, 'cluster')} in trouble, {num_broken} broken")
    if interrupted:
        report_interrupted(num_done, len(seeds))
    if num_broken:
        raise typer.Exit(1)


def _print_broken(errors: Console, seed: int, error: Exception) -> None:
    """Prints the seed and the error, with the traceback unless it is a broken invariant."""
    line = f"baton simulate --replay {seed}: {soaking.reason(error)}"
    errors.print(line, style="red", highlight=False, soft_wrap=True)
    if not soaking.is_broken_invariant(error):
        errors.print("".join(traceback.format_exception(error)), markup=False, highlight=False, soft_wrap=True)


def report_interrupted(num_done: int, num_asked: int) -> NoReturn:
    """Raises Exit(130)."""
    warn(f"interrupted: {num_done:,} of {counted(num_asked, 'cluster')} done")
    raise typer.Exit(130)


def replay_one(seed: int, events: Path | None) -> None:
    trial = soaking.trial(seed)
    console = Console()
    console.print(f"cluster: {trial.cluster}", highlight=False, soft_wrap=True)
    for fault in trial.faults:
        console.print(f"fault: {fault}", highlight=False, soft_wrap=True)
    with line_file("events", events) as write, ending_reported():
        outcome = soaking.run(trial, write=write)
    console.print(summary_table(summarise(outcome, Objective(), cluster=trial.cluster)))


@contextmanager
def ending_reported() -> Iterator[None]:
    """Prints a broken invariant and raises Exit(1), or an interruption and raises Exit(130)."""
    try:
        yield
    except Interrupted as cut:
        warn(str(cut))
        raise typer.Exit(130) from None
    except Exception as error:
        if not soaking.is_broken_invariant(error):
            raise
        Console(stderr=True, soft_wrap=True).print(f"broken: {soaking.reason(error)}", style="red", highlight=False)
        raise typer.Exit(1) from error
