"""A sweep as one HTML file: its table, and a plot of each cluster's result by cost, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.simulate.results.html import Dot, document, scatter
from cluster.simulate.results.sweep import SweepTrial, front, sweep_table
from protos.hints import usd_figure


def sweep_page(trials: Sequence[SweepTrial], verdict: str, *, command: str) -> str:
    """A plot for each target by USD an hour: the percentile, or the share of requests that meet the objective."""
    best, plots = front(trials), []
    for place, reached in enumerate(trials[0].reached):
        unit = "%" if reached.target.objective is not None else "ms"
        title = f"{reached.target}: {unit} by USD an hour (line: Pareto's front; green: all targets reached)"
        seen = sorted((trial for trial in trials if _height(trial, place) is not None), key=lambda one: one.is_good)
        dots = [_dot(trial, place) for trial in seen]
        line = [(trial.usd_per_hour, _height(trial, place) or 0.0) for trial in best if trial in seen]
        plots.append(scatter(title, "USD/h", dots, line))
    return document("a sweep", sweep_table(trials), command=command, note=verdict, parts=plots)


def _height(trial: SweepTrial, place: int) -> float | None:
    """None if too few requests ended for the percentile to exist."""
    reached = trial.reached[place]
    if reached.target.objective is not None:
        return 100 * reached.share
    return 1000 * reached.value_s if math.isfinite(reached.value_s) else None


def _dot(trial: SweepTrial, place: int) -> Dot:
    reached = trial.reached[place]
    figure = "" if reached.target.objective is not None else f", {reached.target.name} {reached.figure} ms"
    description = f"{trial.choice}: USD {usd_figure(trial.usd_per_hour)} an hour, {reached.share:.1%} within{figure}"
    return Dot(trial.usd_per_hour, _height(trial, place) or 0.0, description, "good" if trial.is_good else "bad")
