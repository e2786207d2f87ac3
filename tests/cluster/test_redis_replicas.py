"""Several gateways find as much of the prompts cached as one does, when they share through Redis."""

from __future__ import annotations

import pytest

from benchmarks.gateway.replicas import hit_rate
from tests.cluster.redis_server import RedisServer

pytestmark = pytest.mark.cluster

MARGIN = 0.05  # of the hit rate: gateways do not see each other's load, and break ties differently


async def test_three_gateways_hit_as_many_blocks_as_one(redis: RedisServer) -> None:
    alone = await hit_rate(1, num_bursts=40, settled=True)
    together = await hit_rate(3, num_bursts=40, settled=True, url=redis.url)
    assert together >= alone - MARGIN
