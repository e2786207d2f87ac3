"""The pods of both pools are replaced one after another, each in the order in which Kubernetes ends it, under streams:
none is dropped, and no text differs. Takes minutes: only with BATON_TEST_RAY_HOSTS=1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.cluster.test_rollout import NUM_STREAMS, RolloutStreams, Service
from tests.netns.test_ray_hosts import POOLS, REASON, RayHosts, pids, serving_hosts

pytestmark = [
    pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON or "possible"), pytest.mark.timeout(900),
]  # fmt: skip

NUM_TOKENS = 48


@pytest.fixture
def pods() -> Iterator[RayHosts]:
    with serving_hosts(doubled=True) as started:
        yield started


def replace(pods: RayHosts, number: int) -> None:
    """Returns when the successor's worker serves."""
    gateway, before = pods.gateway, pids(pods.gateway)
    pods.end_pod(number)
    pods.nodes(number)
    gateway.wait_until(lambda: len(pids(gateway)) == len(before) and pids(gateway) != before, timeout_s=300.0)


async def test_a_rollout_of_workers_pods_drops_no_stream(pods: RayHosts) -> None:
    service, over = Service(), asyncio.Event()
    service.add(pods.gateway.url)
    streams = RolloutStreams(service, NUM_TOKENS)
    before = pids(pods.gateway)
    clients = [asyncio.create_task(streams.run(number, over)) for number in range(NUM_STREAMS)]
    for number in POOLS:
        await asyncio.to_thread(replace, pods, number)
    over.set()
    await asyncio.gather(*clients)
    assert streams.dropped == []
    assert streams.num_whole >= NUM_STREAMS
    assert {number: len(texts) for number, texts in streams.texts.items()} == dict.fromkeys(range(NUM_STREAMS), 1)
    assert not pods.gateway.count(r"^worker \S+ at \S+ is lost"), "its sequences were handed on before it ended"
    assert not set(before.values()) & set(pids(pods.gateway).values()), "a worker was not replaced"
