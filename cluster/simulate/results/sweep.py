"""Finds the cheapest cluster that meets its targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from cluster.simulate.results.summary import Summary
from cluster.simulate.results.targets import PercentileTarget, Reached
from cluster.simulate.run.choices import ClusterChoice
from protos.hints import usd_figure


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTrial:
    choice: ClusterChoice
    summary: Summary
    usd_per_hour: float
    reached: Sequence[Reached] = ()

    @property
    def is_good(self) -> bool:
        return not self.summary.falls_behind and all(reached.is_met for reached in self.reached)

    @property
    def binding(self) -> Reached:
        """The target that it misses by most, or meets with least to spare."""
        return min(self.reached, key=lambda reached: reached.ratio)


def front(trials: Sequence[SweepTrial]) -> list[SweepTrial]:
    """The Pareto front, the cheapest first."""
    best: list[SweepTrial] = []
    for trial in sorted(trials, key=lambda trial: (trial.usd_per_hour, -trial.binding.ratio)):
        if not best or trial.binding.ratio > best[-1].binding.ratio:
            best.append(trial)
    return best


def cheapest(trials: Sequence[SweepTrial]) -> SweepTrial | None:
    good = [trial for trial in trials if trial.is_good]
    return min(good, key=lambda trial: (trial.usd_per_hour, -trial.binding.ratio), default=None)


def closest(trials: Sequence[SweepTrial]) -> SweepTrial | None:
    """Returns None if no trial reaches any target for any request."""
    best = max(trials, key=lambda trial: (trial.binding.ratio, -trial.usd_per_hour))
    return best if best.binding.ratio else None


def verdict(trials: Sequence[SweepTrial], targets: Sequence[PercentileTarget]) -> str:
    best = cheapest(trials)
    if best is None:
        nearest = closest(trials)
        wanted = " and ".join(map(str, targets))
        if nearest is None:
            return f"no cluster reaches {wanted}; none for a single request"
        return f"no cluster reaches {wanted}; the closest is {nearest.choice}: {_misses(nearest)}"
    text = f"the cheapest that reaches {' and '.join(map(str, targets))}: {best.choice}, "
    text += f"USD {usd_figure(best.usd_per_hour)} an hour"
    if (busiest := best.summary.busiest) is not None:
        text += f", whose {busiest.role} pool is offered {busiest.offered:.0%} of what it can do"
    if best.summary.unsteady:
        text += f" (not steady: {best.summary.unsteady})"
    cheaper = [trial for trial in trials if trial.usd_per_hour < best.usd_per_hour]
    if not cheaper:
        return f"{text}. No cheaper one was tried"
    missed = max(cheaper, key=lambda trial: trial.binding.ratio)
    return f"{text}. Of the cheaper ones the best is {missed.choice}: {_misses(missed)}"


def _misses(trial: SweepTrial) -> str:
    if trial.summary.falls_behind:
        return trial.summary.falls_behind
    binding, target = trial.binding, trial.binding.target
    if target.objective is not None:
        return f"{binding.share:.1%} of its requests meet the objective"
    return f"its {target.name} is {binding.figure} ms, {binding.share:.1%} are within {target.bound_s * 1000:g} ms"


def _busiest(summary: Summary) -> Text:
    pool = summary.busiest
    share = "" if pool is None else f"{pool.role} {pool.offered:.0%}"
    return Text(f"{share} growing".lstrip(), "red") if summary.falls_behind else Text(share)


def sweep_table(trials: Sequence[SweepTrial]) -> Table:
    on_front, best = front(trials), cheapest(trials)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("cluster", no_wrap=True)
    targets = [reached.target.name for reached in trials[0].reached] if trials else []
    goodput = ["goodput"] if any(trial.summary.report.goodput is not None for trial in trials) else []
    for name in ("GPUs", "USD/h", *targets, *goodput, "TTFT p99", "TPOT p99", "busiest pool", "front"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in sorted(trials, key=lambda trial: (trial.usd_per_hour, str(trial.choice))):
        report = trial.summary.report
        table.add_row(
            Text(str(trial.choice), "bold green" if trial is best else ""),
            f"{trial.choice.num_gpus}",
            usd_figure(trial.usd_per_hour),
            *(Text(reached.figure, "" if reached.is_met else "red") for reached in trial.reached),
            *([f"{report.goodput or 0:,.2f}"] if goodput else []),
            f"{report.ttft_s.p99 * 1000:,.0f}" if report.ttft_s else "",
            f"{report.tpot_s.p99 * 1000:,.1f}" if report.tpot_s else "",
            _busiest(trial.summary),
            "*" if trial in on_front else "",
        )
    return table
