"""Finds the cheapest cluster that meets an objective: simulates every combination and compares the best."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from rich.table import Table
from rich.text import Text

from cluster.config.config import MAX_WORKERS, ClusterConfig, PoolsConfig
from cluster.simulate.results.report import Summary
from cluster.simulate.results.targets import PercentileTarget, Reached
from protos.errors import Misconfigured
from protos.hints import usd_figure
from router.policies.registry import NAMES

MAX_CLUSTERS = 10_000
"""The most clusters of one sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """One cluster. With `prefill` 0, `decode` colocated workers prefill their prompts themselves. Workers have `tp`
    GPUs, unless their pool has its own number."""

    prefill: int
    decode: int
    tp: int
    policy: str
    prefill_tp: int | None = None
    decode_tp: int | None = None

    @property
    def num_gpus(self) -> int:
        return self.prefill * (self.prefill_tp or self.tp) + self.decode * (self.decode_tp or self.tp)

    def __str__(self) -> str:
        if self.prefill_tp is not None or self.decode_tp is not None:
            prefill = f"{self.prefill}P tp{self.prefill_tp or self.tp}"
            return f"{prefill} + {self.decode}D tp{self.decode_tp or self.tp} {self.policy}"
        pools = f"{self.prefill}P+{self.decode}D" if self.prefill else f"{self.decode} colocated"
        return f"{pools} tp{self.tp} {self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTrial:
    """The results of one cluster for each target, and its price."""

    choice: ClusterChoice
    summary: Summary
    usd_per_hour: float
    reached: Sequence[Reached] = ()

    @property
    def is_good(self) -> bool:
        """Whether it reaches all targets, and would with a longer load."""
        return not self.summary.falls_behind and all(one.is_met for one in self.reached)

    @property
    def binding(self) -> Reached:
        """The target that it misses by most, or meets with least to spare."""
        return min(self.reached, key=lambda one: one.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A trait of a cluster as given by `source`, a flag or a setting. Numbers are `least` or more."""

    name: str
    source: str
    text: str
    least: int = 0

    def __str__(self) -> str:
        return f"{self.source} {shlex.quote(self.text)}"

    def numbers(self) -> list[int]:
        """Parses "2", "1,2,4" or "1:4". Raises Misconfigured."""
        low, colon, high = self.text.partition(":")
        try:
            found = [int(one) for one in ((low, high) if colon else self.text.split(","))]
        except ValueError:
            found = []
        if not found or min(found) < self.least or max(found) > MAX_WORKERS:
            raise Misconfigured(
                f"{self}: give numbers from {self.least} to {MAX_WORKERS}, such as 2, 1,2,4 or 1:4", param=self.name
            )
        if colon and found[0] > found[1]:
            raise Misconfigured(f"{self}: it ends before it begins: give {found[1]}:{found[0]}", param=self.name)
        return list(range(found[0], found[1] + 1)) if colon else list(dict.fromkeys(found))

    def policies(self) -> list[str]:
        """Parses names separated by commas. Raises Misconfigured."""
        found = list(dict.fromkeys(self.text.split(",")))
        for name in found:
            if name not in NAMES:
                raise Misconfigured(
                    f"{self}: there is no policy {name!r}: choose of {', '.join(NAMES)}", param=self.name
                )
        return found


def asked(
    settings: ClusterConfig,
    *,
    prefill: str | None,
    decode: str | None,
    tp: str | None,
    prefill_tp: str | None,
    decode_tp: str | None,
    workers: str | None,
    policy: str | None,
    to_sweep: bool,
) -> list[ClusterChoice]:
    """The clusters given by flags, and by settings without a flag: `workers` colocated ones, or two pools. Raises
    Misconfigured for none, for several unless `to_sweep`, and for too many."""
    pools = settings.pools
    is_colocated = workers is not None or (prefill is None and decode is None and bool(pools.colocated))
    if is_colocated:
        num_prefill = _Said(name="prefill", source="--prefill", text="0")
        num_decode = _said("workers", workers, "pools.colocated", pools.colocated, least=1)
    else:
        num_prefill = _said("prefill", prefill, "pools.prefill", pools.prefill)
        num_decode = _said("decode", decode, "pools.decode", pools.decode)
    ranks = _said("tp", tp, "worker.tp", settings.worker.tp, least=1)
    own = [] if is_colocated else _own_ranks(pools, prefill_tp=prefill_tp, decode_tp=decode_tp)
    chosen = _said("policy", policy, "router.policy", settings.router.policy)
    counts = {trait: trait.numbers() for trait in (num_prefill, num_decode, ranks, *own)}
    names = chosen.policies()
    nums = {trait: len(values) for trait, values in counts.items()} | {chosen: len(names)}
    several = ", ".join(str(trait) for trait, each in nums.items() if each > 1)
    num = math.prod(nums.values())
    if num > 1 and not to_sweep:
        raise Misconfigured(f"{several}: {num:,} clusters: give one of each, or --sweep to compare them", param="sweep")
    if num > MAX_CLUSTERS:
        raise Misconfigured(
            f"{several}: --sweep would try {num:,} clusters: give at most {MAX_CLUSTERS:,}", param="sweep"
        )
    by_pool = {trait.name: counts[trait] for trait in own}
    every = choices(prefill=counts[num_prefill], decode=counts[num_decode], tp=counts[ranks], policies=names, **by_pool)
    if not every:
        raise Misconfigured(
            f"{num_decode}: give at least 1, as prefill workers write no answers; --workers N is N colocated workers, "
            "which prefill and decode",
            param="decode",
        )
    return every


def _said(name: str, flag: str | None, path: str, setting: object, *, least: int = 0) -> _Said:
    """The flag, else the setting at that path, else 1."""
    if flag is not None:
        return _Said(name=name, source=f"--{name.replace('_', '-')}", text=flag, least=least)
    return _Said(name=name, source=path, text="1" if setting is None else str(setting), least=least)


def _own_ranks(pools: PoolsConfig, **flags: str | None) -> list[_Said]:
    """The pools whose workers have their own number of GPUs."""
    found = []
    for name, flag in flags.items():
        setting = getattr(pools, name)
        if flag is not None or setting is not None:
            found.append(_said(name, flag, f"pools.{name}", setting, least=1))
    return found


def choices(
    *,
    prefill: Sequence[int],
    decode: Sequence[int],
    tp: Sequence[int],
    policies: Sequence[str],
    prefill_tp: Sequence[int | None] = (None,),
    decode_tp: Sequence[int | None] = (None,),
) -> list[ClusterChoice]:
    """The smallest clusters first. Colocated workers have `tp` GPUs."""
    every = dict.fromkeys(
        ClusterChoice(
            prefill=one[0],
            decode=one[1],
            tp=one[2],
            policy=one[3],
            prefill_tp=one[4] if one[0] else None,
            decode_tp=one[5] if one[0] else None,
        )
        for one in product(prefill, decode, tp, policies, prefill_tp, decode_tp)
        if one[1] > 0
    )
    return sorted(every, key=lambda choice: (choice.num_gpus, str(choice)))


def within(
    settings: ClusterConfig, *, gpus: int, tp: str | None, policy: str | None, colocated: bool
) -> list[ClusterChoice]:
    """Every cluster of at most this number of GPUs: all splits into two pools, and as many colocated workers as fit.
    Raises Misconfigured."""
    ranks, chosen = (
        _said("tp", tp, "worker.tp", settings.worker.tp, least=1),
        _said("policy", policy, "router.policy", settings.router.policy),
    )
    every: list[ClusterChoice] = []
    for num_ranks in ranks.numbers():
        most = gpus // num_ranks
        prefill = range(1) if colocated else range(most)
        some = choices(prefill=prefill, decode=range(1, most + 1), tp=(num_ranks,), policies=chosen.policies())
        every += [choice for choice in some if choice.num_gpus <= gpus]
        if len(every) > MAX_CLUSTERS:
            raise Misconfigured(
                f"--gpus {gpus}: --sweep would try more than {MAX_CLUSTERS:,} clusters: give fewer GPUs", param="gpus"
            )
    if not every:
        raise Misconfigured(f"--gpus {gpus}: {ranks} needs more for one worker", param="gpus")
    return sorted(every, key=lambda choice: (choice.num_gpus, str(choice)))


def front(trials: Sequence[SweepTrial]) -> list[SweepTrial]:
    """Trials for which no other is both cheaper and better (Pareto front), the cheapest first."""
    best: list[SweepTrial] = []
    for trial in sorted(trials, key=lambda one: (one.usd_per_hour, -one.binding.ratio)):
        if not best or trial.binding.ratio > best[-1].binding.ratio:
            best.append(trial)
    return best


def cheapest(trials: Sequence[SweepTrial]) -> SweepTrial | None:
    """The cheapest trial by USD per hour, then the one with most to spare."""
    good = [trial for trial in trials if trial.is_good]
    return min(good, key=lambda trial: (trial.usd_per_hour, -trial.binding.ratio), default=None)


def closest(trials: Sequence[SweepTrial]) -> SweepTrial | None:
    """The best trial, then the cheapest; None if none reaches any target for any request."""
    best = max(trials, key=lambda trial: (trial.binding.ratio, -trial.usd_per_hour))
    return best if best.binding.ratio else None


def verdict(trials: Sequence[SweepTrial], targets: Sequence[PercentileTarget], *, is_whole: bool = True) -> str:
    """The cheapest cluster, the target that limits it, and what to try next; that only if all clusters were tried."""
    best = cheapest(trials)
    if best is None:
        nearest = closest(trials)
        wanted = " and ".join(map(str, targets))
        if nearest is None:
            return f"no cluster reaches {wanted}; none for a single request"
        near = f"the closest is {nearest.choice}: {_misses(nearest)}"
        return f"no cluster reaches {wanted}; {near}" + (f"; {_wider(nearest, trials)}" if is_whole else "")
    found = f"the cheapest that reaches {' and '.join(map(str, targets))}: {best.choice}, "
    found += f"USD {usd_figure(best.usd_per_hour)} an hour"
    if (busiest := best.summary.busiest) is not None:
        found += f", whose {busiest.role} pool is offered {busiest.offered:.0%} of what it can do"
    if best.summary.unsteady:
        found += f" (not steady: {best.summary.unsteady})"
    cheaper = [trial for trial in trials if trial.usd_per_hour < best.usd_per_hour]
    if not cheaper:
        return f"{found}. No cheaper one was tried"
    missed = max(cheaper, key=lambda trial: trial.binding.ratio)
    return f"{found}. Of the cheaper ones the best is {missed.choice}: {_misses(missed)}"


def _misses(trial: SweepTrial) -> str:
    if trial.summary.falls_behind:
        return trial.summary.falls_behind
    binding, target = trial.binding, trial.binding.target
    if target.objective is not None:
        return f"{binding.share:.1%} of its requests meet the objective"
    return f"its {target.name} is {binding.figure} ms, {binding.share:.1%} are within {target.bound_s * 1000:g} ms"


def _wider(trial: SweepTrial, trials: Sequence[SweepTrial]) -> str:
    """The name of the number, of workers or of their GPUs, that would have to grow beyond the tried values."""
    choice, binding = trial.choice, trial.binding.target
    if not choice.prefill:
        return _beyond("workers", choice.decode, [one.choice.decode for one in trials if not one.choice.prefill])
    slow = _slow(binding, trial)
    name, num = ("prefill", choice.prefill) if slow == "ttft" else ("decode", choice.decode)
    return _beyond(name, num, [getattr(one.choice, name) for one in trials if one.choice.prefill])


def _slow(target: PercentileTarget, trial: SweepTrial) -> str:
    """The metric of a trial that misses an objective by more."""
    if target.objective is None:
        return target.metric
    report, objective = trial.summary.report, target.objective
    ttft = report.ttft_s.p90 / objective.ttft_s if report.ttft_s and objective.ttft_s else 0.0
    tpot = report.tpot_s.p90 / objective.tpot_s if report.tpot_s and objective.tpot_s else 0.0
    return "ttft" if ttft >= tpot else "tpot"


def _beyond(name: str, num: int, tried: Sequence[int]) -> str:
    if num < max(tried):
        return f"more --{name} than {num} did not help as tried: give a larger --tp or a faster --gpu"
    return f"give more --{name} than {num}, or a larger --tp"


def _busiest(summary: Summary) -> Text:
    pool = summary.busiest
    share = "" if pool is None else f"{pool.role} {pool.offered:.0%}"
    return Text(f"{share} growing".lstrip(), "red") if summary.falls_behind else Text(share)


def sweep_table(trials: Sequence[SweepTrial]) -> Table:
    """All trials by cost, times in ms; those on the front are marked, the cheapest that meets the objective is
    highlighted."""
    on_front, best = front(trials), cheapest(trials)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("cluster", no_wrap=True)
    targets = [one.target.name for one in trials[0].reached] if trials else []
    goodput = ["goodput"] if any(trial.summary.report.goodput is not None for trial in trials) else []
    for name in ("GPUs", "USD/h", *targets, *goodput, "TTFT p99", "TPOT p99", "busiest pool", "front"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in sorted(trials, key=lambda one: (one.usd_per_hour, str(one.choice))):
        report = trial.summary.report
        table.add_row(
            Text(str(trial.choice), "bold green" if trial is best else ""),
            f"{trial.choice.num_gpus}",
            usd_figure(trial.usd_per_hour),
            *(Text(one.figure, "" if one.is_met else "red") for one in trial.reached),
            *([f"{report.goodput or 0:,.2f}"] if goodput else []),
            f"{report.ttft_s.p99 * 1000:,.0f}" if report.ttft_s else "",
            f"{report.tpot_s.p99 * 1000:,.1f}" if report.tpot_s else "",
            _busiest(trial.summary),
            "*" if trial in on_front else "",
        )
    return table
