"""Budgets of tenants for a month or a day: more than a soft budget is shown, more than a hard one is refused.

The ledger's sums (`know`) come every few seconds; between them this process adds its own charges (`add`). A hard budget
may be exceeded by the last request that begins and by other processes' latest requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.errors import BudgetExhausted, RateLimited
from protos.hints import usd_figure
from router.auth.tenant_limits import CONCURRENCY_RETRY_S
from router.auth.tenants import Tenant

Period = Literal["month", "day"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpan:
    """Seconds since 1970, the end not included."""

    start_s: float
    end_s: float


def span_of(period: Period, now: float) -> BudgetSpan:
    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return BudgetSpan(start_s=day.timestamp(), end_s=(day + timedelta(days=1)).timestamp())
    first = day.replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return BudgetSpan(start_s=first.timestamp(), end_s=following.timestamp())


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """A tenant's budget in its present period. None: no such budget."""

    tenant: str
    period: Period
    until_s: float
    spent_usd: float
    soft_usd: float | None
    hard_usd: float | None


class TenantBudgets(Collector):
    """On one event loop, but for `know`, which any thread may call. `clock`: seconds since 1970. Series:
    `baton_tenant_spent_usd`, `baton_tenant_budget_usd`."""

    def __init__(self, tenants: Callable[[], Iterable[Tenant]], *, clock: Callable[[], float] = time.time) -> None:
        self._tenants = tenants
        self._clock = clock
        self._spent: dict[tuple[Period, float], dict[str, float]] = {}
        self._aside: dict[str, dict[str, float]] = {}  # USD by tenant and running request

    @property
    def are_set(self) -> bool:
        return any(tenant.has_budget for tenant in self._tenants())

    def spans(self) -> Mapping[Period, BudgetSpan]:
        now = self._clock()
        return {tenant.budget_period: span_of(tenant.budget_period, now) for tenant in self._with()}

    def know(self, period: Period, span: BudgetSpan, spent: Mapping[str, float]) -> None:
        """Takes the ledger's sums of a period, by tenant."""
        others = {key: value for key, value in self._spent.items() if key[0] != period}
        self._spent = others | {(period, span.start_s): dict(spent)}

    def add(self, tenant: Tenant, usd: float) -> None:
        if tenant.has_budget:
            span = span_of(tenant.budget_period, self._clock())
            spent = self._spent.setdefault((tenant.budget_period, span.start_s), {})
            spent[tenant.name] = spent.get(tenant.name, 0.0) + usd

    def check(self, tenant: Tenant) -> None:
        """Raises BudgetExhausted."""
        if tenant.hard_budget_usd is None:
            return
        state = self.state(tenant)
        if state.spent_usd >= tenant.hard_budget_usd:
            raise BudgetExhausted(
                f"Tenant {tenant.name} has spent {usd_figure(state.spent_usd)} USD of its budget of "
                f"{usd_figure(tenant.hard_budget_usd)} USD a {state.period}: requests are served again from "
                f"{_date(state.until_s)} on, or with a higher budget, which the operator gives",
                retry_after_s=state.until_s - self._clock(),
            )

    def set_aside(self, tenant: Tenant, request_id: str, most_usd: float) -> None:
        """Reserves the cost of a request until `give_back`. Raises BudgetExhausted, or RateLimited if running
        requests may spend the rest."""
        self.check(tenant)
        if tenant.hard_budget_usd is None:
            return
        aside = self._aside.setdefault(tenant.name, {})
        if self.state(tenant).spent_usd + sum(aside.values()) >= tenant.hard_budget_usd:
            raise RateLimited(
                f"The requests that tenant {tenant.name} has running may spend what is left of its budget of "
                f"{usd_figure(tenant.hard_budget_usd)} USD: wait for one of them to end, or give requests a max_tokens",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        aside[request_id] = most_usd

    def give_back(self, tenant: Tenant, request_id: str) -> None:
        self._aside.get(tenant.name, {}).pop(request_id, None)

    def notice(self, tenant: Tenant) -> str:
        """Returns "" for a tenant below its soft budget."""
        if tenant.soft_budget_usd is None:
            return ""
        state = self.state(tenant)
        if state.spent_usd < tenant.soft_budget_usd:
            return ""
        spent, budget = usd_figure(state.spent_usd), usd_figure(tenant.soft_budget_usd)
        return f"spent {spent} of {budget} USD until {_date(state.until_s)}"

    def state(self, tenant: Tenant) -> BudgetState:
        span = span_of(tenant.budget_period, self._clock())
        return BudgetState(
            tenant=tenant.name,
            period=tenant.budget_period,
            until_s=span.end_s,
            spent_usd=self._spent.get((tenant.budget_period, span.start_s), {}).get(tenant.name, 0.0),
            soft_usd=tenant.soft_budget_usd,
            hard_usd=tenant.hard_budget_usd,
        )

    def states(self) -> list[BudgetState]:
        return [self.state(tenant) for tenant in self._with()]

    def collect(self) -> Iterable[Metric]:
        spent = GaugeMetricFamily("baton_tenant_spent_usd", "Charged in the budget's period", labels=("tenant",))
        budget = GaugeMetricFamily("baton_tenant_budget_usd", "A tenant's budget", labels=("tenant", "kind"))
        for state in self.states():
            spent.add_metric((state.tenant,), state.spent_usd)
            for kind, usd in (("soft", state.soft_usd), ("hard", state.hard_usd)):
                if usd is not None:
                    budget.add_metric((state.tenant, kind), usd)
        return spent, budget

    def _with(self) -> list[Tenant]:
        return [tenant for tenant in self._tenants() if tenant.has_budget]


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d")
