"""How long the HTTP server keeps a connection."""

from __future__ import annotations

from httpx._config import DEFAULT_LIMITS

from cluster.gateway.gateway_server import server_settings

LOAD_BALANCER_S = 60  # AWS's and nginx's default


def test_an_idle_connection_outlives_that_of_clients_and_load_balancers() -> None:
    """Both kept it for five seconds, as OpenAI's client does: a request sent at that moment failed."""
    kept_s = server_settings(None).timeout_keep_alive
    assert kept_s > max(LOAD_BALANCER_S, DEFAULT_LIMITS.keepalive_expiry or 0)
