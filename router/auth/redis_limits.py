"""Tenants' limits shared by any number of gateways, in Redis.

enter    one script, one round trip: the buckets and the set of running requests, or what refuses it
spend    ┐ batched and sent every `FLUSH_S`, with a renewal of running requests: a gateway that dies leaves nothing
leave    ┘ behind for longer than `LEASE_S`"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import Any

from router.auth.tenant_limits import BURST_S, LocalLimits, too_fast, too_many
from router.auth.tenants import Tenant
from router.log_throttle import OutageLog
from router.prefix.redis_url import TROUBLES, RedisUrl, close

log = logging.getLogger("baton.router")

TIMEOUT_S = 0.25
AGAIN_S = 2.0
FLUSH_S = 0.2
LEASE_S = 30.0

# The arithmetic of `router.auth.tenant_limits.Bucket`, by Redis's clock. Numbers go as text: Lua's lose their decimals.
_LEAKY = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local function take(key, amount, per_min)
  local empty = math.max(tonumber(redis.call('GET', key) or '0'), now) + 60 * amount / per_min
  redis.call('SET', key, string.format('%.6f', empty), 'PX', math.ceil((empty - now) * 1000) + 1000)
end
"""
_ENTER = (
    _LEAKY
    + """
local request, amounts, rates = ARGV[1], {1, tonumber(ARGV[2])}, {tonumber(ARGV[3]), tonumber(ARGV[4])}
local most, burst, lease = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
if most > 0 and redis.call('ZCARD', KEYS[3]) >= most then return {'running', '0'} end
for i = 1, 2 do
  if rates[i] > 0 then
    local empty = tonumber(redis.call('GET', KEYS[i]) or '0')
    local wait = math.min(math.max(empty, now) + 60 * amounts[i] / rates[i] - burst, empty) - now
    if wait > 0 then return {({'requests', 'tokens'})[i], string.format('%.6f', wait)} end
  end
end
for i = 1, 2 do if rates[i] > 0 then take(KEYS[i], amounts[i], rates[i]) end end
redis.call('ZADD', KEYS[3], now + lease, request)
redis.call('PEXPIRE', KEYS[3], math.ceil(lease * 1000))
return {'', '0'}
"""
)
_SETTLE = (
    _LEAKY
    + """
local spent, rate, lease, gone = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if spent > 0 and rate > 0 then take(KEYS[2], spent, rate) end
for i = 5, 4 + gone do redis.call('ZREM', KEYS[3], ARGV[i]) end
for i = 5 + gone, #ARGV do redis.call('ZADD', KEYS[3], now + lease, ARGV[i]) end
redis.call('PEXPIRE', KEYS[3], math.ceil(lease * 1000))
return 0
"""
)


class RedisLimits:
    """`TenantLimits` shared by the gateways of a model. `num_lost` counts the times Redis did not answer."""

    def __init__(self, url: RedisUrl, *, model: str) -> None:
        self._url = url
        self._client = url.client(timeout_s=TIMEOUT_S)
        self._enter: Any = self._client.register_script(_ENTER)
        self._settle: Any = self._client.register_script(_SETTLE)
        self._model = model
        self._local = LocalLimits()
        self._lost_until_s = 0.0
        self._spent: Counter[Tenant] = Counter()
        self._left: dict[Tenant, set[str]] = {}
        self._running: dict[Tenant, set[str]] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._closing = False
        self._outage = OutageLog(log)
        self.num_lost = 0

    @property
    def trouble(self) -> str:
        return self._outage.reason

    async def enter(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> None:
        if not tenant.is_limited:
            return
        answer = await self._asked(tenant, request_id, num_tokens, now)
        if answer is None:
            await self._local.enter(tenant, request_id, num_tokens, now)
        else:
            which, wait_s = answer
            if which == "running":
                raise too_many(tenant)
            if which:
                per_min = tenant.requests_per_min if which == "requests" else tenant.tokens_per_min
                raise too_fast(tenant, which, per_min or 0.0, wait_s)
            self._local.count(tenant, request_id, num_tokens, now)
        self._running.setdefault(tenant, set()).add(request_id)
        self._flush_soon()

    def spend(self, tenant: Tenant, num_tokens: int, now: float) -> None:
        self._local.spend(tenant, num_tokens, now)
        self._spent[tenant] += num_tokens

    def leave(self, tenant: Tenant, request_id: str) -> None:
        self._local.leave(tenant, request_id)
        running = self._running.get(tenant, set())
        if request_id not in running:
            return
        running.discard(request_id)
        if not running:
            del self._running[tenant]
        self._left.setdefault(tenant, set()).add(request_id)
        self._flush_soon()

    async def close(self) -> None:
        self._closing = True
        if (
            self._flushing is not None
        ):  # not cancelled: redis-py may swallow the cancellation, and the task would never end
            await asyncio.wait([self._flushing])
        with suppress(*TROUBLES):
            await self._flush()
        await close(self._client)

    # ------------------------------------------------------------------------------------------------------------------

    async def _asked(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> tuple[str, float] | None:
        """Returns the limit that refuses the request ("" if none) and for how long; None while Redis does not
        answer."""
        if now < self._lost_until_s:
            return None
        numbers = (num_tokens, tenant.requests_per_min or 0, tenant.tokens_per_min or 0, tenant.max_concurrent or 0)
        try:
            which, wait_s = await self._enter(keys=self._keys(tenant), args=(request_id, *numbers, BURST_S, LEASE_S))
        except TROUBLES as error:
            self._lose(error, now)
            return None
        self._found()
        return which.decode(), float(wait_s)

    def _lose(self, error: Exception, now: float) -> None:
        self.num_lost += 1
        self._lost_until_s = now + AGAIN_S
        reason = f"limits: {self._url.shown} does not keep them ({error})"
        self._outage.lost(reason, f"{reason}: this gateway keeps them by itself")

    def _found(self) -> None:
        self._outage.back(f"limits: {self._url.shown} keeps them again")

    def _keys(self, tenant: Tenant) -> tuple[str, ...]:
        root = f"baton:{self._model}:limits:{{{tenant.name}}}"
        return (f"{root}:requests", f"{root}:tokens", f"{root}:running")

    def _flush_soon(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._keep_flushing(), name="tenants' limits")

    async def _keep_flushing(self) -> None:
        """Runs while requests run or messages wait. Redis drops requests that were not renewed for a lease."""
        clock = asyncio.get_running_loop().time
        told_s = clock()
        try:
            while not self._closing and (self._running or self._left or self._spent):
                await asyncio.sleep(FLUSH_S)
                if clock() - told_s > LEASE_S:
                    self._left.clear()
                if clock() < self._lost_until_s:
                    continue
                try:
                    await self._flush()
                    told_s = clock()
                    self._found()
                except TROUBLES as error:
                    self._lose(error, clock())
        finally:
            self._flushing = None

    async def _flush(self) -> None:
        for tenant in {*self._spent, *self._left, *self._running}:
            spent, left = self._spent.get(tenant, 0), tuple(self._left.get(tenant, ()))
            running = tuple(self._running.get(tenant, ()))
            numbers = (spent, tenant.tokens_per_min or 0, LEASE_S, len(left))
            await self._settle(keys=self._keys(tenant), args=(*numbers, *left, *running))
            self._spent[tenant] -= spent
            if not self._spent[tenant]:
                del self._spent[tenant]
            self._left[tenant] = self._left.get(tenant, set()).difference(left)
            if not self._left[tenant]:
                del self._left[tenant]
