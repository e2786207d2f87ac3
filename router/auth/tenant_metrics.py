"""Use and refusals of tenants, for /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class TenantMetrics:
    """Counters of a gateway's access control."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Counter("baton_tenant_tokens", "Tokens by tenant and kind", ("tenant", "kind"), registry=registry)
        self.refused = Counter("baton_tenant_refused", "Requests over a limit", ("tenant",), registry=registry)
        self.unauthenticated = Counter(
            "baton_unauthenticated", "Requests without a key that is known", registry=registry
        )
        self.file_errors = Counter("baton_tenants_file_errors", "Readings of a bad file of tenants", registry=registry)
