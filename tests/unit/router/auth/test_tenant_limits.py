"""Limits of a tenant: requests and tokens a minute, and requests at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protos.errors import RateLimited
from router.auth.tenant_limits import LocalLimits
from router.auth.tenants import Tenant


async def test_a_minutes_requests_may_come_at_once() -> None:
    limits, tenant = LocalLimits(), Tenant(name="acme", requests_per_min=6)
    for number in range(6):
        await limits.enter(tenant, f"r{number}", 10, now=100.0)
    with pytest.raises(RateLimited) as refused:
        await limits.enter(tenant, "r6", 10, now=100.0)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    with pytest.raises(RateLimited):
        await limits.enter(tenant, "r6", 10, now=109.9)
    await limits.enter(tenant, "r6", 10, now=110.0)


async def test_answers_are_paid_for_by_waiting() -> None:
    limits, tenant = LocalLimits(), Tenant(name="acme", tokens_per_min=600)
    await limits.enter(tenant, "r0", 100, now=0.0)
    limits.spend(tenant, 800, now=0.0)  # 900 in all: 300 more than a minute's
    with pytest.raises(RateLimited) as refused:
        await limits.enter(tenant, "r1", 100, now=0.0)
    assert refused.value.retry_after_s == pytest.approx(40.0)
    await limits.enter(tenant, "r1", 100, now=40.0)


async def test_an_oversized_prompt_is_taken_when_nothing_is_owed() -> None:
    limits, tenant = LocalLimits(), Tenant(name="acme", tokens_per_min=600)
    await limits.enter(tenant, "r0", 5000, now=0.0)
    with pytest.raises(RateLimited) as refused:
        await limits.enter(tenant, "r1", 5000, now=0.0)
    assert refused.value.retry_after_s == pytest.approx(500.0)
    await limits.enter(tenant, "r1", 5000, now=500.0)


async def test_concurrency_is_limited_and_freed() -> None:
    limits, tenant = LocalLimits(), Tenant(name="acme", max_concurrent=2)
    await limits.enter(tenant, "r0", 1, now=0.0)
    await limits.enter(tenant, "r1", 1, now=0.0)
    with pytest.raises(RateLimited, match="2 requests running"):
        await limits.enter(tenant, "r2", 1, now=0.0)
    limits.leave(tenant, "r0")
    limits.leave(tenant, "r0")
    await limits.enter(tenant, "r2", 1, now=0.0)
    with pytest.raises(RateLimited):
        await limits.enter(tenant, "r3", 1, now=0.0)


async def test_requests_without_limits_leave_those_of_their_tenant_alone() -> None:
    """Lines of a batch run without its tenant's limits."""
    limits, tenant = LocalLimits(), Tenant(name="acme", max_concurrent=1)
    for number in range(3):
        await limits.enter(replace(tenant, max_concurrent=None), f"line-{number}", 1, now=0.0)
    await limits.enter(tenant, "r0", 1, now=0.0)
    with pytest.raises(RateLimited):
        await limits.enter(tenant, "r1", 1, now=0.0)


async def test_a_refused_request_costs_nothing() -> None:
    limits, tenant = LocalLimits(), Tenant(name="acme", requests_per_min=60, tokens_per_min=60, max_concurrent=1)
    await limits.enter(tenant, "r0", 60, now=0.0)
    limits.leave(tenant, "r0")
    for _ in range(100):
        with pytest.raises(RateLimited):
            await limits.enter(tenant, "r1", 60, now=1.0)
    await limits.enter(tenant, "r1", 60, now=60.0)
    limits.leave(tenant, "r1")


async def test_tenants_do_not_use_up_each_others_limits() -> None:
    limits = LocalLimits()
    first, other = (Tenant(name=name, requests_per_min=1) for name in ("one", "other"))
    await limits.enter(first, "r0", 1, now=0.0)
    await limits.enter(other, "r1", 1, now=0.0)
    with pytest.raises(RateLimited, match="one"):
        await limits.enter(first, "r2", 1, now=0.0)
