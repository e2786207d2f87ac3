"""Limits of each tenant per minute and at the same time: the seam, the arithmetic, and the limits of one gateway.

A rate is a leaky bucket stored as one number, the time at which it will be empty (GCRA, ITU-T I.371, annex A): it may
lie `BURST_S` in the future, so a minute's worth can arrive at once, and later requests no faster than the rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from protos.errors import RateLimited
from router.auth.tenants import Tenant

BURST_S = 60.0
CONCURRENCY_RETRY_S = 1.0
"""The retry time of a client with too many running requests: their ends are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """`empty_s`: the clock's time at which all that was taken will have leaked out."""

    empty_s: float = 0.0

    def take(self, amount: float, per_min: float, now: float) -> Bucket:
        """The amount is taken even if there is no room: waiting pays the debt."""
        return Bucket(empty_s=max(self.empty_s, now) + 60.0 * amount / per_min)

    def wait_s(self, amount: float, per_min: float, now: float) -> float:
        """Seconds until the amount fits. More than ever fits waits for an empty bucket."""
        fits_s = max(self.empty_s, now) + 60.0 * amount / per_min - BURST_S
        return max(0.0, min(fits_s, self.empty_s) - now)


class TenantLimits(Protocol):
    """Called on the event loop, `leave` and `spend` never blocking it."""

    @property
    def trouble(self) -> str:
        """Why limits hold for this gateway alone although they should be shared; "" if they are shared."""
        ...

    async def enter(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> None:
        """Counts nothing if it raises RateLimited."""
        ...

    def spend(self, tenant: Tenant, num_tokens: int, now: float) -> None: ...

    def leave(self, tenant: Tenant, request_id: str) -> None:
        """The request has ended. An unknown one is no error."""
        ...

    async def close(self) -> None: ...


class LocalLimits:
    """`TenantLimits` of one gateway, shared with no other."""

    trouble = ""

    def __init__(self) -> None:
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._running: dict[str, set[str]] = {}

    async def enter(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> None:
        if not tenant.is_limited:
            return
        if tenant.max_concurrent is not None and len(self._running.get(tenant.name, ())) >= tenant.max_concurrent:
            raise too_many(tenant)
        for what, amount, per_min, buckets in self._rates(tenant, num_tokens):
            if wait_s := buckets.get(tenant.name, Bucket()).wait_s(amount, per_min, now):
                raise too_fast(tenant, what, per_min, wait_s)
        self.count(tenant, request_id, num_tokens, now)

    def count(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> None:
        for _, amount, per_min, buckets in self._rates(tenant, num_tokens):
            buckets[tenant.name] = buckets.get(tenant.name, Bucket()).take(amount, per_min, now)
        self._running.setdefault(tenant.name, set()).add(request_id)

    def spend(self, tenant: Tenant, num_tokens: int, now: float) -> None:
        if tenant.tokens_per_min is not None:
            bucket = self._tokens.get(tenant.name, Bucket())
            self._tokens[tenant.name] = bucket.take(num_tokens, tenant.tokens_per_min, now)

    def leave(self, tenant: Tenant, request_id: str) -> None:
        self._running.get(tenant.name, set()).discard(request_id)

    async def close(self) -> None:
        pass

    def _rates(self, tenant: Tenant, num_tokens: int) -> Iterator[tuple[str, float, float, dict[str, Bucket]]]:
        if tenant.requests_per_min is not None:
            yield "requests", 1, tenant.requests_per_min, self._requests
        if tenant.tokens_per_min is not None:
            yield "tokens", num_tokens, tenant.tokens_per_min, self._tokens


def too_many(tenant: Tenant) -> RateLimited:
    return RateLimited(
        f"Tenant {tenant.name or 'anonymous'} has {tenant.max_concurrent} requests running, as many as it may: "
        "wait for one of them to end",
        retry_after_s=CONCURRENCY_RETRY_S,
    )


def too_fast(tenant: Tenant, what: str, per_min: float, wait_s: float) -> RateLimited:
    what = what.removesuffix("s") if per_min == 1 else what
    return RateLimited(
        f"Tenant {tenant.name or 'anonymous'} may use {per_min:,.6g} {what} a minute, and no more: "
        f"try again in {wait_s:.1f} s",
        retry_after_s=wait_s,
    )
