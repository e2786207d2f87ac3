"""Turns an outcome into the figures that an operator needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.bench.bench_report import Objective, Report, RequestRecord, make_report
from cluster.bench.report_table import report_table
from cluster.simulate.latency.step_work import Latency, step_of
from cluster.simulate.run.deployment import WorkerLife
from cluster.simulate.run.fault_injector import Happened
from cluster.simulate.run.offered import grows, offered, requests_until_steady, work_of_records
from cluster.simulate.run.simulation import SimulationOutcome
from cluster.simulate.world.simulated_load import UserSession
from protos.hints import counted, usd_figure
from protos.values import WorkerRole

MAX_FAULTS = 12
"""The most rows of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSummary:
    """`busy`: share of GPU time. `imbalance`: tokens of the busiest worker over the mean. `offered`: the work that
    arrived over what the pool can do; None if unknown."""

    role: str
    num_workers: int
    busy: float
    imbalance: float
    offered: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """USD per million tokens of complete answers, which also pay for failed ones. The GPUs' cost with idle time is
    divided by the device time of computed prompt tokens, cached ones (attention reads them) and answer tokens."""

    gpu_hours: float
    usd: float
    per_million_input: float
    per_million_cached: float
    per_million_output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHitShares:
    """Shares of complete answers' prompt tokens by source: the worker's device, its host, another worker."""

    device: float
    host: float
    pulled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSummary:
    """`accepted_at`: of the drafted tokens at each position of a draft, the share that was accepted."""

    tokens_per_row: float
    num_drafted: int
    num_accepted: int
    accepted_at: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """- `handed_over`: share of complete answers that continued on another worker
    - `num_not_asked`: requests whose conversation had failed; not in the report
    - `num_left_out`, `num_left_out_requests`: sessions and requests too long for any worker; not in the report
    - `grew`: the last third of the requests waited longer than the third before
    - `is_endless`: the load stands for one that never ends
    """

    cluster: str
    report: Report
    num_left_out: int
    num_left_out_requests: int
    num_not_asked: int
    hits: CacheHitShares
    pools: Sequence[PoolSummary]
    costs: TokenCosts
    handed_over: float
    transfer_bytes: int
    fingerprint: str
    num_events: int
    faults: Sequence[Happened] = ()
    drafts: DraftSummary | None = None
    grew: bool = False
    is_endless: bool = False

    @property
    def overloaded(self) -> PoolSummary | None:
        pool = self.busiest
        return pool if pool is not None and (pool.offered or 0.0) > 1.0 else None

    @property
    def busiest(self) -> PoolSummary | None:
        """The pool with the largest share of its capacity in use."""
        pools = [pool for pool in self.pools if pool.offered]
        return max(pools, key=lambda pool: pool.offered or 0.0, default=None)

    @property
    def num_wanted(self) -> int:
        """The requests after which an endless load has steady figures; 0 if it is steady."""
        if not self.is_endless or self.faults or self.overloaded is not None:
            return 0
        num_requests = self.report.num_requests
        wanted = requests_until_steady(self.busiest.offered or 0.0) if self.busiest is not None else 0
        return wanted if wanted > num_requests else 2 * num_requests if self.grew else 0

    @property
    def falls_behind(self) -> str:
        """Why more of an endless load would wait longer, or ""."""
        if not self.is_endless or self.faults:
            return ""
        if (pool := self.overloaded) is not None:
            return f"{pool.role} is offered {pool.offered:.0%} of what it can do: its queue grows while the load lasts"
        return "its requests waited longer and longer" if self.grew else ""

    @property
    def unsteady(self) -> str:
        """Why the figures are not those of a longer load, or ""."""
        if not self.num_wanted:
            return self.falls_behind
        why = self.falls_behind or "a pool that is nearly full settles slowly"
        return f"{why}: give workload.requests = {self.num_wanted} or more"


def summarise(
    outcome: SimulationOutcome, objective: Objective, *, cluster: str = "", left_out: Sequence[UserSession] = (),
    is_endless: bool = False,
) -> Summary:  # fmt: skip
    # A message between the first and the last token may have several tokens, so gaps are taken from the workers.
    report = replace(make_report(outcome.records, objective), itl_s=outcome.itl_s, late_s=None)
    return Summary(
        cluster=cluster,
        report=report,
        num_left_out=len(left_out),
        num_left_out_requests=sum(len(session.turns) for session in left_out),
        num_not_asked=outcome.num_not_asked,
        hits=_hits(outcome, report),
        pools=_pools(outcome),
        costs=_costs(outcome, report),
        handed_over=outcome.num_handed_over / max(1, report.num_completed),
        transfer_bytes=outcome.transfer_bytes,
        fingerprint=outcome.fingerprint,
        num_events=outcome.num_events,
        faults=outcome.faults,
        drafts=_drafts(outcome.served),
        grew=grows(outcome.records),
        is_endless=is_endless,
    )


def figures(summary: Summary) -> dict[str, Any]:
    """Times are whole microseconds, without floating-point noise."""
    report: dict[str, Any] = _rounded(asdict(summary))
    return report


def _rounded(value: Any, *, is_time: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(part, is_time=is_time or _is_time(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part, is_time=is_time) for part in value]
    return round(value, 6) if is_time and isinstance(value, float) else value


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _hits(outcome: SimulationOutcome, report: Report) -> CacheHitShares:
    host = sum(life.load.host.num_hit_tokens for life in outcome.served if life.load.host is not None)
    pulled = sum(life.load.num_pulled_tokens for life in outcome.served)
    num_cached = max(1, host + pulled, sum(record.num_cached or 0 for record in outcome.records))
    share = report.cached_share or 0.0
    return CacheHitShares(
        device=share * (num_cached - host - pulled) / num_cached,
        host=share * host / num_cached,
        pulled=share * pulled / num_cached,
    )


def _by_role(served: Sequence[WorkerLife]) -> Mapping[str, list[WorkerLife]]:
    roles: dict[str, list[WorkerLife]] = {}
    for life in sorted(served, key=lambda life: life.worker_id):
        roles.setdefault(str(life.role), []).append(life)
    return dict(sorted(roles.items()))


def _pools(outcome: SimulationOutcome) -> list[PoolSummary]:
    sent_s = [record.sent_s for record in outcome.records if record.sent_s is not None]
    window_s = (max(sent_s) - min(sent_s)) * len(sent_s) / (len(sent_s) - 1) if len(sent_s) > 1 else 0.0
    shares = offered(outcome.config, work_of_records(outcome.records), window_s)
    counts = outcome.config.pools.counts()
    return [
        _pool(role, lives, shares.get(WorkerRole(role)) or None if len(lives) == counts[WorkerRole(role)] else None)
        for role, lives in _by_role(outcome.served).items()
    ]


def _pool(role: str, lives: Sequence[WorkerLife], offered: float | None) -> PoolSummary:
    tokens: dict[str, int] = {}
    for life in lives:
        done = life.work.num_prompt_tokens + life.work.num_answer_tokens
        tokens[life.worker_id] = tokens.get(life.worker_id, 0) + done
    mean = sum(tokens.values()) / len(tokens)
    return PoolSummary(
        role=role,
        num_workers=len(tokens),
        busy=sum(life.work.busy_s for life in lives) / sum(life.lived_s for life in lives),
        imbalance=max(tokens.values()) / mean if mean else 1.0,
        offered=offered,
    )


def _costs(outcome: SimulationOutcome, report: Report) -> TokenCosts:
    config = outcome.config
    gpu_hours = sum(life.lived_s * config.gpus_of(life.role) for life in outcome.served) / 3600
    usd = gpu_hours * config.usd_per_gpu_hour
    prompt_s = sum(life.work.prompt_s for life in outcome.served)
    answer_s = sum(life.work.answer_s for life in outcome.served)
    whole = [record for record in outcome.records if not record.error]
    latency = config.spec_of(WorkerRole.PREFILL).latency
    cached_s = min(prompt_s, sum(_looking_s(latency, record) for record in whole))
    num_cached = sum(record.num_cached or 0 for record in whole)

    def per_million(device_s: float, num_tokens: int) -> float:
        if not num_tokens or not prompt_s + answer_s:
            return 0.0
        return usd * device_s / (prompt_s + answer_s) / num_tokens * 1e6

    return TokenCosts(
        gpu_hours=gpu_hours,
        usd=usd,
        per_million_input=per_million(prompt_s - cached_s, report.num_prompt_tokens - num_cached),
        per_million_cached=per_million(cached_s, num_cached),
        per_million_output=per_million(answer_s, report.num_output_tokens),
    )


def _drafts(served: Sequence[WorkerLife]) -> DraftSummary | None:
    """None if no worker speculated."""
    loads = [life.load.speculation for life in served if life.load.speculation is not None]
    if not loads:
        return None
    counts = [source for load in loads for source in load.sources]
    drafted = [sum(pair) for pair in zip_longest(*(source.drafted_at for source in counts), fillvalue=0)]
    accepted = [sum(pair) for pair in zip_longest(*(source.accepted_at for source in counts), fillvalue=0)]
    return DraftSummary(
        tokens_per_row=sum(load.num_tokens for load in loads) / max(1, sum(load.num_rows for load in loads)),
        num_drafted=sum(drafted),
        num_accepted=sum(accepted),
        accepted_at=[round(right / num, 4) for right, num in zip(accepted, drafted, strict=True)],
    )


def _looking_s(latency: Latency, record: RequestRecord) -> float:
    """Extra seconds of a prompt's computed part for attention to the cached part."""
    cached = record.num_cached or 0
    computed = record.num_prompt - cached
    if not cached or computed < 1:
        return 0.0
    return latency.step_s(step_of([(computed, record.num_prompt)])) - latency.step_s(step_of([(computed, computed)]))


def summary_table(summary: Summary) -> RenderableType:
    pools = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("pool", "workers", "GPUs busy", "busiest worker / mean", "offered / capacity"):
        pools.add_column(name, justify="left" if name == "pool" else "right")
    for pool in summary.pools:
        offered_share = Text(
            "" if pool.offered is None else f"{pool.offered:.0%}", "red" if pool is summary.overloaded else ""
        )
        pools.add_row(pool.role, f"{pool.num_workers:,}", f"{pool.busy:.1%}", f"{pool.imbalance:.2f}", offered_share)
    costs = summary.costs
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column()
    if summary.cluster:
        facts.add_row("cluster", Text(summary.cluster))
    if summary.unsteady:
        facts.add_row("not steady", Text(summary.unsteady, "red"))
    if summary.num_left_out:
        left_out = counted(summary.num_left_out, "session"), counted(summary.num_left_out_requests, "request")
        facts.add_row("left out", Text(f"{left_out[0]} ({left_out[1]}): no worker holds them", "red"))
    if summary.num_not_asked:
        facts.add_row("not asked", Text(f"{summary.num_not_asked:,}: their conversation had failed before", "red"))
    facts.add_row("prompt tokens cached by tier", _tiers(summary.hits))
    facts.add_row("answers handed over", f"{summary.handed_over:.1%}")
    facts.add_row("KV moved", f"{summary.transfer_bytes / 1e9:,.2f} GB")
    if (drafts := summary.drafts) is not None:
        share = f"{drafts.num_accepted / drafts.num_drafted:.0%} of" if drafts.num_drafted else "none of"
        facts.add_row("tokens a row", f"{drafts.tokens_per_row:.2f}, {share} {drafts.num_drafted:,} drafts accepted")
    facts.add_row("GPU hours", f"{costs.gpu_hours:,.2f} (USD {usd_figure(costs.usd)})")
    facts.add_row(
        "USD a million tokens",
        f"input {costs.per_million_input:.3f}, cached {costs.per_million_cached:.3f}, "
        f"output {costs.per_million_output:.3f}",
    )
    facts.add_row("event log", f"{summary.num_events:,} events, {summary.fingerprint}")
    parts: list[RenderableType] = [report_table(summary.report), Text(), pools, Text(), facts]
    return Group(*parts, Text(), _fault_table(summary.faults)) if summary.faults else Group(*parts)


def _fault_table(faults: Sequence[Happened]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("s", justify="right")
    num_passed = sum(fault.passed_over for fault in faults)
    passed = f", {num_passed} passed over" if num_passed else ""
    table.add_column(counted(len(faults), "fault") + passed)
    for fault in faults[:MAX_FAULTS]:
        table.add_row(
            f"{fault.at_s:,.2f}", f"{fault.what}{f' (passed over: {fault.why})' if fault.passed_over else ''}"
        )
    if len(faults) > MAX_FAULTS:
        table.add_row("", f"and {len(faults) - MAX_FAULTS:,} more: --json FILE has them all")
    return table


def _tiers(hits: CacheHitShares) -> str:
    pulled = f", pulled {hits.pulled:.1%}" if hits.pulled else ""
    return f"device {hits.device:.1%}, host {hits.host:.1%}{pulled}"
