"""Limits that two gateways keep together in a real Redis, and each by itself while there is none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from protos.errors import RateLimited
from router.auth import redis_limits
from router.auth.redis_limits import RedisLimits
from router.auth.tenants import Tenant
from router.prefix.redis_url import parse
from tests.cluster.redis_server import RedisServer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_limits, "FLUSH_S", 0.005)
    monkeypatch.setattr(redis_limits, "AGAIN_S", 0.02)


@asynccontextmanager
async def gateways(redis: RedisServer, count: int = 2) -> AsyncIterator[list[RedisLimits]]:
    made = [RedisLimits(parse(redis.url, setting="index"), model="m") for _ in range(count)]
    try:
        yield made
    finally:
        for gateway in made:
            await gateway.close()


def now() -> float:
    return asyncio.get_running_loop().time()


async def until_entered(limits: RedisLimits, tenant: Tenant, request_id: str, num_tokens: int = 1) -> None:
    """The test's timeout is the bound."""
    while True:
        try:
            return await limits.enter(tenant, request_id, num_tokens, now())
        except RateLimited:
            await asyncio.sleep(0.005)


async def until_refused(limits: RedisLimits, tenant: Tenant, request_id: str) -> None:
    """The test's timeout is the bound."""
    while True:
        try:
            await limits.enter(tenant, request_id, 1, now())
        except RateLimited:
            return
        limits.leave(tenant, request_id)
        await asyncio.sleep(0.02)


async def told(check: Callable[[], bool]) -> None:
    while True:
        if check():
            return
        await asyncio.sleep(0.005)


async def test_a_rate_is_one_for_all_gateways(redis: RedisServer) -> None:
    tenant = Tenant(name="acme", requests_per_min=4)
    async with gateways(redis) as (first, other):
        for number in range(2):
            await first.enter(tenant, f"a{number}", 1, now())
            await other.enter(tenant, f"b{number}", 1, now())
        for limits in (first, other):
            with pytest.raises(RateLimited, match="4 requests a minute") as refused:
                await limits.enter(tenant, "c", 1, now())
            assert refused.value.retry_after_s is not None
            assert 0 < refused.value.retry_after_s <= 15


async def test_spending_at_one_gateway_limits_the_other(redis: RedisServer) -> None:
    tenant = Tenant(name="acme", tokens_per_min=600)
    async with gateways(redis) as (first, other):
        await first.enter(tenant, "a", 100, now())
        first.spend(tenant, 20_000, now())
        first.leave(tenant, "a")
        await told(lambda: not first._left)
        with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
            await other.enter(tenant, "b", 100, now())
        assert refused.value.retry_after_s is not None
        assert 1800 < refused.value.retry_after_s <= 1960  # (20,100 + 100 - 600) / 10 a second, less what passed


async def test_as_many_at_once_as_may_on_all_gateways(redis: RedisServer) -> None:
    tenant = Tenant(name="acme", max_concurrent=2)
    async with gateways(redis) as (first, other):
        await first.enter(tenant, "a", 1, now())
        await other.enter(tenant, "b", 1, now())
        with pytest.raises(RateLimited, match="2 requests running"):
            await first.enter(tenant, "c", 1, now())
        other.leave(tenant, "b")
        await until_entered(first, tenant, "c")


async def test_running_requests_of_a_dead_gateway_are_forgotten(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "LEASE_S", 0.5)
    tenant = Tenant(name="acme", max_concurrent=1)
    async with gateways(redis) as (first, other):
        await first.enter(tenant, "a", 1, now())
        began_s = now()
        while now() < began_s + 1.2 * redis_limits.LEASE_S:  # it lives, so its request counts beyond the lease
            await asyncio.sleep(0.01)
            with pytest.raises(RateLimited):
                await other.enter(tenant, "b", 1, now())
        assert first._flushing is not None
        first._closing = True  # it says nothing more
        await asyncio.wait([first._flushing])
        await until_entered(other, tenant, "b")


async def test_without_redis_each_gateway_limits_alone(
    redis: RedisServer,
) -> None:
    tenant = Tenant(name="acme", max_concurrent=1)
    async with gateways(redis) as (first, other):
        await first.enter(tenant, "a", 1, now())
        redis.stop()
        with pytest.raises(RateLimited):
            await first.enter(tenant, "b", 1, now())
        await other.enter(tenant, "c", 1, now())
        assert first.num_lost + other.num_lost >= 2
        redis.start()
        other.leave(tenant, "c")
        first.leave(tenant, "a")
        await until_entered(first, tenant, "d")
        await until_refused(other, tenant, "e")


async def test_nothing_piles_up_for_a_redis_that_stays_away(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = Tenant(name="acme", max_concurrent=100)
    async with gateways(redis, 1) as [limits]:
        await limits.enter(tenant, "a", 1, now())
        redis.stop()
        monkeypatch.setattr(redis_limits, "LEASE_S", 0.05)
        for number in range(10):
            await limits.enter(tenant, f"b{number}", 1, now())
            limits.leave(tenant, f"b{number}")
        limits.leave(tenant, "a")
        await told(lambda: not limits._left)  # what Redis had of them has ended by itself


async def test_a_redis_that_is_full_is_logged_once(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="baton.router")
    tenant = Tenant(name="acme", requests_per_min=1000)
    async with gateways(redis, 1) as [limits], Redis.from_url(redis.url) as client:
        await client.config_set("maxmemory", "1")
        await limits.enter(tenant, "a", 1, now())
        await told(lambda: limits.num_lost > 5)
        assert "does not keep them" in limits.trouble
        await client.config_set("maxmemory", "0")
        await told(lambda: not limits.trouble)
    lines = [record.message for record in caplog.records]
    assert ["by itself" in line for line in lines] == [True, False], lines


async def test_redis_is_not_asked_about_a_tenant_without_limits(redis: RedisServer) -> None:
    redis.stop()
    async with gateways(redis, 1) as [limits]:
        await limits.enter(Tenant(name="acme"), "a", 1, now())
        limits.leave(Tenant(name="acme"), "a")
        assert not limits.num_lost
