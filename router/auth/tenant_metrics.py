"""Use and refusals of tenants, for /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

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
            return  # no worker had it
        uncached = usage.prompt_tokens - usage.cached_tokens
        kinds = (("input", uncached), ("cached", usage.cached_tokens), ("output", usage.completion_tokens))
        for kind, count in kinds:
            self.tokens.labels(tenant, kind).inc(count)
