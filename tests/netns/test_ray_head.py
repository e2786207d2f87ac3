"""Ray's head is lost and comes again, with its tables in Redis, as the component gcs-fault-tolerance has them: nodes
and supervisor wait for it. Takes minutes: only with BATON_TEST_RAY_HOSTS=1.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from tests.cluster.deployed import Deployed
from tests.netns.test_ray_hosts import HEAD, REASON, START_S, RayHosts, is_decoding, pids, serving_hosts, text

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON or "possible")]


@pytest.fixture
def five_hosts() -> Iterator[RayHosts]:
    with serving_hosts(room=2, keeps_tables=True) as started:
        yield started


def pool_nodes(five_hosts: RayHosts) -> set[str]:
    """Ids of the living nodes that offer a pool's resource."""
    infos = GcsClient(address=f"{five_hosts.hosts.address(HEAD)}:6379").get_all_node_info(timeout=10.0)
    return {
        node_id.hex()
        for node_id, node in infos.items()
        if node.state == 0 and {"prefill", "decode"} & set(node.resources_total)
    }


def scale(gateway: Deployed, count: int) -> httpx.Response:
    body = {"kind": "scale", "counts": {"decode": count}}
    return httpx.post(f"{gateway.url}/admin/capacity", json=body, timeout=60.0)


def test_workers_outlive_rays_head_and_are_supervised_again(five_hosts: RayHosts) -> None:
    gateway, hosts = five_hosts.gateway, five_hosts.hosts
    undisturbed, served, nodes = text(gateway), pids(gateway), pool_nodes(five_hosts)
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(text, gateway)
        gateway.wait_until(lambda: is_decoding(gateway))
        hosts.lose(HEAD)
        gateway.wait_until(lambda: "workers keep serving" in gateway.status()["degraded"], timeout_s=START_S)
        assert asked.result() == undisturbed
    assert text(gateway) == undisturbed
    refused = scale(gateway, 2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable"), refused.text
    assert "try again later" in refused.json()["error"]["message"]

    five_hosts.head()
    gateway.wait_until(lambda: not gateway.status()["degraded"], timeout_s=START_S)
    assert pool_nodes(five_hosts) == nodes, "a node joined anew"
    assert pids(gateway) == served, "a worker was started again"

    num_ready = gateway.count(r"^worker decode-0 at \S+ is ready")
    os.kill(served["decode-0"], signal.SIGKILL)
    gateway.wait_for(r"^worker decode-0 at \S+ is ready", times=num_ready + 1)
    assert text(gateway) == undisturbed
    accepted = scale(gateway, 2)
    assert accepted.status_code == 202, accepted.text
    gateway.wait_for(r"^worker decode-1 at \S+ is ready")
    assert pool_nodes(five_hosts) == nodes
    assert text(gateway) == undisturbed
