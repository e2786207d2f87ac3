"""The store of tenants' limits, by `--index`: this gateway's memory, or the Redis that gateways share."""

from __future__ import annotations

from router.auth.tenant_limits import LocalLimits, TenantLimits
from router.prefix.registry import MEMORY


def open_limits(where: str, *, model: str) -> TenantLimits:
    """Raises Misconfigured."""
    if where == MEMORY:
        return LocalLimits()
    from router.auth.redis_limits import RedisLimits  # redis-py is imported only if used
    from router.prefix.redis_url import parse

    return RedisLimits(parse(where, setting="index"), model=model)
