"""A gateway as its operator meets it: HTTP above, fake workers that speak the real protocol below."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from router.dispatch.chooser import Routing
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.scripted import make_gateway, serving

ASKED = {"model": "tiny", "prompt": list(range(100, 130)), "max_tokens": 6, "temperature": 0}


@asynccontextmanager
async def operating(cluster: Cluster, **changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Routing]]:
    """The whole way from HTTP to the fake workers, on one set of records."""
    generate, routing = cluster.router.dispatcher, cluster.router.routing
    gateway = make_gateway(generate, fleet=cluster.fleet, routing=routing, **changes)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        yield client, routing


async def ask(client: httpx.AsyncClient, name: str, **changes: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=ASKED | changes, headers={"x-baton-request-id": name})
