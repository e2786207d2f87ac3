"""Budgets of tenants: what is shown, what is refused, and until when."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from protos.errors import BudgetExhausted, Misconfigured
from router.auth.budgets import TenantBudgets, span_of
from router.auth.tenants import Tenant, read_roster

NOW = datetime(2026, 12, 31, 23, 30, tzinfo=UTC).timestamp()
ACME = Tenant(name="acme", soft_budget_usd=5.0, hard_budget_usd=10.0)
DAILY = Tenant(name="daily", hard_budget_usd=1.0, budget_period="day")
FREE = Tenant(name="free")


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def test_a_period_is_a_month_or_a_day() -> None:
    def dates(period: str) -> list[str]:
        span = span_of("month" if period == "month" else "day", NOW)
        return [datetime.fromtimestamp(at, UTC).isoformat() for at in (span.start_s, span.end_s)]

    assert dates("month") == ["2026-12-01T00:00:00+00:00", "2027-01-01T00:00:00+00:00"]
    assert dates("day") == ["2026-12-31T00:00:00+00:00", "2027-01-01T00:00:00+00:00"]


def test_soft_is_noticed_and_hard_refused_until_the_period_ends() -> None:
    clock = Clock()
    budgets = TenantBudgets(lambda: (ACME, DAILY, FREE), clock=clock)
    spans = budgets.spans()
    assert set(spans) == {"month", "day"}
    budgets.know("month", spans["month"], {"acme": 4.0, "free": 1000.0})
    assert budgets.notice(ACME) == ""
    budgets.add(ACME, 1.5)
    budgets.check(ACME)
    assert budgets.notice(ACME) == "spent 5.50 of 5.00 USD until 2027-01-01"
    budgets.add(ACME, 5.0)
    with pytest.raises(
        BudgetExhausted, match=r"spent 10\.50 USD of its budget of 10\.00 USD a month.* 2027-01-01"
    ) as no:
        budgets.check(ACME)
    assert (no.value.http_status, no.value.code, no.value.retry_after_s) == (429, "insufficient_quota", 1800.0)
    budgets.know("month", spans["month"], {"acme": 9.0})  # the ledger's sum takes the place of what was added
    budgets.check(ACME)
    budgets.check(DAILY)
    budgets.check(FREE)
    assert budgets.notice(FREE) == ""
    budgets.add(ACME, 1.0)
    clock.now += 1800.0
    budgets.check(ACME)
    assert budgets.notice(ACME) == ""


def test_a_day_is_no_month() -> None:
    budgets = TenantBudgets(lambda: (ACME, DAILY), clock=Clock())
    spans = budgets.spans()
    budgets.know("day", spans["day"], {"daily": 1.0, "acme": 99.0})
    budgets.know("month", spans["month"], {"daily": 0.0, "acme": 1.0})
    budgets.check(ACME)
    with pytest.raises(BudgetExhausted, match="a day"):
        budgets.check(DAILY)
    assert {(state.tenant, state.spent_usd) for state in budgets.states()} == {("acme", 1.0), ("daily", 1.0)}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("hard_budget_usd = -1", "tenants.acme.hard_budget_usd = -1: give a number from 0 to"),
        ("soft_budget_usd = 2\nhard_budget_usd = 1", "soft_budget_usd = 2 is more than hard_budget_usd = 1"),
        ('budget_period = "week"', "tenants.acme.budget_period = 'week': give month or day"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(tmp_path: Path, lines: str, told: str) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(f'admin_keys = ["sha256:{"0" * 64}"]\n[tenants.acme]\n{lines}\n')
    with pytest.raises(Misconfigured) as refused:
        read_roster(file)
    assert told in refused.value.message
