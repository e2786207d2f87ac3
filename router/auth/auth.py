"""Access control: API keys identify tenants, tenants' limits are enforced, and their tokens are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

from protos.errors import Forbidden, Misconfigured, RateLimited, Unauthenticated
from protos.event_loop import loop_time
from protos.hints import counted
from router.auth.budgets import TenantBudgets
from router.auth.tenant_limits import LocalLimits, TenantLimits
from router.auth.tenants import NOBODY, Roster, Tenant, hash_of, read_roster

if TYPE_CHECKING:
    from router.observe.request_observer import EndedRequest, ObservedRequest


class TenantMetrics:
    """Counters of a gateway's access control. It observes requests, to count the tokens of each tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Counter("baton_tenant_tokens", "Tokens by tenant and kind", ("tenant", "kind"), registry=registry)
        self.refused = Counter("baton_tenant_refused", "Requests over a limit", ("tenant",), registry=registry)
        self.unauthenticated = Counter(
            "baton_unauthenticated", "Requests without a key that is known", registry=registry
        )
        self.file_errors = Counter("baton_tenants_file_errors", "Readings of a bad file of tenants", registry=registry)

    def began(self, request: ObservedRequest) -> None: ...

    def ended(self, ended: EndedRequest) -> None:
        usage, tenant = ended.usage, ended.request.ask.tenant.name
        if not usage.prompt_tokens:
            return  # no worker had the request
        uncached = usage.prompt_tokens - usage.cached_tokens
        kinds = (("input", uncached), ("cached", usage.cached_tokens), ("output", usage.completion_tokens))
        for kind, count in kinds:
            self.tokens.labels(tenant, kind).inc(count)


log = logging.getLogger("baton.router")

KEY_ID_CHARACTERS = len("sha256:") + 12
_key_id: ContextVar[str] = ContextVar("key_id", default="")
LOOK_S = 2.0
"""How often the file of tenants is checked for changes. A revoked key works for at most this long."""


class AccessControl:
    """Without `path`, the file of tenants, every request is allowed. The constructor raises Misconfigured for an
    unreadable file; if it becomes bad later, the last good version stays in force, and metric and log report it."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        limits: TenantLimits | None = None,
        registry: CollectorRegistry | None = None,
        changed: Callable[[Roster], None] = lambda roster: None,
    ) -> None:
        self._path = path
        self._limits = limits or LocalLimits()
        self._changed = changed
        self._seen = self._stamp()
        self._looked_s = float("-inf")
        self._file_trouble = ""
        self.roster = read_roster(path) if path is not None else Roster()
        changed(self.roster)
        registry = registry or CollectorRegistry()
        self.metrics = TenantMetrics(registry)
        self.budgets = TenantBudgets(lambda: self.roster.tenants.values())
        registry.register(self.budgets)

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization: Bearer KEY`. Raises Unauthenticated."""
        self._look()
        if self.roster.is_open:
            return NOBODY
        key = self._key(authorization)
        hashed = hash_of(key)
        tenant = self.roster.by_key.get(hashed)
        if tenant is None:
            self.metrics.unauthenticated.inc()
            if self.roster.admin_keys and self.roster.is_admin(key):
                raise Unauthenticated("This is an admin key, which opens /admin only: send a tenant's key")
            raise Unauthenticated("The API key is unknown: check it, or get another one from the operator")
        _key_id.set(hashed[:KEY_ID_CHARACTERS])
        return tenant

    @property
    def key_id(self) -> str:
        """The beginning of the hash of the key of this task's request, or ""."""
        return _key_id.get()

    def tenant(self, name: str) -> Tenant | None:
        """The tenant in the present file; None if it is not there any more."""
        self._look()
        return replace(NOBODY, name=name) if self.roster.is_open else self.roster.tenants.get(name)

    def check_admin(self, authorization: str | None) -> None:
        """Raises Unauthenticated without a key, Forbidden with one that is no administrator's."""
        self._look()
        if self.roster.admin_keys and not self.roster.is_admin(self._key(authorization)):
            raise Forbidden("This key does not open /admin: use one of admin_keys")

    async def enter(self, tenant: Tenant, request_id: str, num_prompt_tokens: int, *, most_usd: float = 0.0) -> None:
        """Counts a request against the tenant's limits until `leave`. Raises RateLimited or BudgetExhausted."""
        try:
            self.budgets.set_aside(tenant, request_id, most_usd)
            await self._limits.enter(tenant, request_id, num_prompt_tokens, loop_time())
        except BaseException as error:
            self.budgets.give_back(tenant, request_id)
            if isinstance(error, RateLimited):
                self.metrics.refused.labels(tenant.name).inc()
            raise

    def leave(self, tenant: Tenant, request_id: str) -> None:
        self.budgets.give_back(tenant, request_id)
        self._limits.leave(tenant, request_id)

    def wrote(self, tenant: Tenant, num_tokens: int) -> None:
        if tenant.tokens_per_min is not None:
            self._limits.spend(tenant, num_tokens, loop_time())

    @property
    def trouble(self) -> str:
        self._look()
        return "; ".join(filter(None, (self._file_trouble, self._limits.trouble)))

    async def close(self) -> None:
        await self._limits.close()

    def _key(self, authorization: str | None) -> str:
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            self.metrics.unauthenticated.inc()
            raise Unauthenticated(
                "You didn't provide an API key: send it as 'Authorization: Bearer KEY', or as x-api-key"
            )
        return key.strip()

    def _look(self) -> None:
        now = loop_time()
        if self._path is None or now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self.roster = read_roster(self._path)
        except Misconfigured as error:
            self.metrics.file_errors.inc()
            self._file_trouble = (
                f"the file of tenants was not loaded again, the old one stays in force: {error.message}"
            )
            log.error("%s", self._file_trouble)
            return
        self._file_trouble = ""
        log.info("loaded %s again: %s", self._path.name, counted(len(self.roster.tenants), "tenant"))
        self._changed(self.roster)

    def _stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


@contextmanager
def acting_for(key_id: str) -> Iterator[None]:
    token = _key_id.set(key_id)
    try:
        yield
    finally:
        _key_id.reset(token)
