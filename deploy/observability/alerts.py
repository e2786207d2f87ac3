"""Prometheus alerts and the recording rules below them. Those without an error budget are in `alerts.toml`.

Three indicators have an error budget: failed requests, first tokens later than `ttft_s`, and answers whose mean gap
between tokens is longer than `tpot_s` (`AlertObjectives`). Each has two alerts on the rate at which its budget burns,
over a long window and a short one that ends the alert soon after its cause (Google's SRE workbook, chapter 5, "Multiple
burn rate alerts"): 14.4 times the rate that would spend the budget in 30 days spends 2 % of it in an hour, 6 times
spends 5 % in 6 hours.

Without traffic the ratios have no value, and no alert fires. Every gateway reports the whole fleet: `max by` counts a
worker once, `sum` adds up requests.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.errors import ERRORS_BY_CODE, Misconfigured
from router.request_metrics import SECONDS, TOKEN_SECONDS

BURNS = (
    ("Fast", 14.4, "1h", "5m", "2m", "page", "2 % of a month's error budget an hour"),
    ("Slow", 6.0, "6h", "30m", "15m", "ticket", "5 % of a month's error budget in six hours"),
)
_WINDOWS = ("5m", "30m", "1h", "6h")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertObjectives:
    """`good` is the share of requests within a bound, `served` the share that does not fail."""

    ttft_s: float = 2.5
    tpot_s: float = 0.1
    good: float = 0.99
    served: float = 0.999

    def __post_init__(self) -> None:
        for name, bounds in (("ttft_s", SECONDS), ("tpot_s", TOKEN_SECONDS)):
            if getattr(self, name) not in bounds:
                raise Misconfigured(
                    f"{name} is {getattr(self, name)}: it must be the bound of a bucket of the histogram, one of "
                    f"{', '.join(map(str, bounds))}",
                    param=name,
                )
        for name in ("good", "served"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise Misconfigured(f"{name} is {getattr(self, name)}: give a share between 0 and 1", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """`means` and `remedy` are its section of docs/alerts.md. `wait` is how long `expr` must hold."""

    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    means: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Indicator:
    """`bad` and `all` are rates over a window `[w]`, by model."""

    key: str
    name: str
    budget: float
    bad: str
    all: str
    means: str
    remedy: str

    def record(self, window: str) -> str:
        return f"baton:{self.key}:ratio_rate{window}"

    def ratio(self, window: str) -> str:
        return f"{self.bad} / {self.all}".replace("[w]", f"[{window}]")


def indicators(objectives: AlertObjectives) -> tuple[Indicator, ...]:
    slow = 1.0 - objectives.good
    return (
        Indicator(
            key="errors",
            name="Errors",
            budget=1.0 - objectives.served,
            bad=f'sum by (model) (rate(baton_requests_total{{outcome=~"{"|".join(server_faults())}"}}[w]))',
            all="sum by (model) (rate(baton_requests_total[w]))",
            means="Requests end with an error of the cluster's (HTTP 5xx).",
            remedy="`baton_requests_total` by `outcome` names the error. [Runbook](troubleshooting.md#runbook).",
        ),
        Indicator(
            key="ttft_late",
            name="FirstToken",
            budget=slow,
            bad=_late("ttft", objectives.ttft_s),
            all="sum by (model) (rate(baton_ttft_seconds_count[w]))",
            means=f"First tokens take longer than {objectives.ttft_s} s.",
            remedy="`baton why REQUEST` shows whether it waited, computed or missed the cache. More prefill workers.",
        ),
        Indicator(
            key="tpot_late",
            name="TokenGap",
            budget=slow,
            bad=_late("tpot", objectives.tpot_s),
            all="sum by (model) (rate(baton_tpot_seconds_count[w]))",
            means=f"Answers have a mean gap between tokens of more than {objectives.tpot_s} s.",
            remedy="`step` in `baton status` is the time of a step by worker. More decode workers.",
        ),
    )


def server_faults() -> list[str]:
    """Codes of the errors that are the cluster's fault: HTTP status 500 and above."""
    return sorted(code for code, kind in ERRORS_BY_CODE.items() if kind.http_status >= 500)


def _late(metric: str, bound_s: float) -> str:
    within = f'sum by (model) (rate(baton_{metric}_seconds_bucket{{le="{bound_s}"}}[w]))'
    return f"(sum by (model) (rate(baton_{metric}_seconds_count[w])) - {within})"


def alerts(objectives: AlertObjectives) -> tuple[Alert, ...]:
    others = tomllib.loads((Path(__file__).parent / "alerts.toml").read_text())
    return (*_burning(objectives), *(Alert(name=name, **row) for name, row in others.items()))


def _burning(objectives: AlertObjectives) -> Iterator[Alert]:
    for one in indicators(objectives):
        for speed, factor, long, short, wait, severity, spent in BURNS:
            limit = f"{factor * one.budget:.6g}"
            yield Alert(
                name=f"Baton{one.name}Burn{speed}",
                expr=f"{one.record(long)} > {limit} and {one.record(short)} > {limit}",
                wait=wait,
                severity=severity,
                summary=f"{{{{ $labels.model }}}}: {{{{ $value | humanizePercentage }}}}. {one.means}",
                means=f"{one.means} That spends {spent}.",
                remedy=one.remedy,
            )


RUNBOOKS = "docs/alerts.md"
"""What links to runbooks begin with: this repository's page of alerts."""


def rule_groups(objectives: AlertObjectives, runbooks: str = RUNBOOKS) -> list[dict[str, Any]]:
    """`groups` of a file of Prometheus rules and of a PrometheusRule."""
    recorded = [
        {"record": one.record(window), "expr": one.ratio(window)}
        for one in indicators(objectives)
        for window in _WINDOWS
    ]
    return [
        {"name": "baton-indicators", "rules": recorded},
        {"name": "baton-alerts", "rules": [_rule(one, runbooks) for one in alerts(objectives)]},
    ]


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, _annotation(runbooks): f"{runbooks}#{alert.name.lower()}"},
    }


def _annotation(runbooks: str) -> str:
    """Alertmanager and Grafana make a link of a `runbook_url`, so that it must be one."""
    return "runbook_url" if "://" in runbooks else "runbook"


def page(objectives: AlertObjectives) -> str:
    """docs/alerts.md."""
    lines = [_HEAD]
    for one in alerts(objectives):
        lines += [f"## {one.name}", "", f"{one.severity.capitalize()}, after {one.wait}. {one.means}", ""]
        lines += ["```", one.expr, "```", "", one.remedy, ""]
    rows = [f"| `baton:{one.key}:ratio_rate*` | {one.means} |" for one in indicators(objectives)]
    return "\n".join([*lines, _RECORDED, *rows, ""])


_HEAD = """# Alerts

The component `observability` of `deploy/k8s` has these alerts ([Kubernetes](kubernetes.md#components)); `python -m
deploy.observability` makes this page, the rules and the dashboards. Objectives are flags of that command: `--ttft`,
`--tpot`, `--good`, `--served`. The annotation `runbook` of an alert is its section of this page; with `--runbooks URL`,
where you publish it, a link (`runbook_url`). Severity `page`: act now. `ticket`: within days.

Without the Prometheus operator: `deploy/observability/rules.yaml` is a file of rules, and Prometheus scrapes each
gateway's port ([metrics](operating.md#metrics)).
"""
_RECORDED = """## Recording rules

Shares of requests, by model, over 5 minutes, 30 minutes, an hour and six hours; `deploy/observability/rules.yaml` has
their expressions.

| series | of which |
|---|---|"""
