"""Workers of two ranks on two Ray nodes each, as far as the network can tell: collectives and lanes go between hosts,
and a lost node takes both workers with it. Takes minutes: only with BATON_TEST_RAY_HOSTS=1.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.deployed import PRECISE, Deployed
from tests.netns.hosts import SwitchedHosts
from tests.netns.test_ray_hosts import (
    DECODE,
    PREFILL,
    REASON,
    START_S,
    RayHosts,
    is_decoding,
    pids,
    serving_hosts,
    text,
)

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON or "possible")]


@pytest.fixture(scope="module")
def spanning() -> Iterator[RayHosts]:
    with serving_hosts(spans=True) as started:
        yield started


def ranks(hosts: SwitchedHosts, number: int) -> set[str]:
    """The workers of which a process is on a host."""
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in hosts.pids(number)]
    return {match[1] for command in commands if (match := re.search(r"/(\w+-0)\.\d+\.\d\0", command))}


def test_ranks_on_two_nodes_answer_as_one_rank_does(spanning: RayHosts) -> None:
    gateway, hosts = spanning.gateway, spanning.hosts
    alone = Deployed("up", "--port", "0", "--grpc-port", "0", *PRECISE)
    try:
        undisturbed = text(alone)
    finally:
        alone.kill()
    before = gateway.metric("baton_pool_transfer_bytes_total", "decode")
    assert text(gateway) == undisturbed
    assert gateway.metric("baton_pool_transfer_bytes_total", "decode") > before
    lanes = [lane for held in gateway.status()["kv"].values() for lane in held["lanes"]]
    assert {lane["transport"] for lane in lanes} == {"gloo"}, lanes
    assert [ranks(hosts, number) for number in (PREFILL, DECODE)] == [{"prefill-0", "decode-0"}] * 2

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(text, gateway)
        gateway.wait_until(lambda: is_decoding(gateway))
        num_ready = gateway.count(r"^worker \S+ at \S+ is ready")
        hosts.lose(DECODE)
        spanning.pools.wait_for(r"^worker decode-0: .*starting it again")
        spanning.nodes(DECODE)
        for worker_id in ("prefill-0", "decode-0"):
            spanning.pools.wait_for(rf"^worker {worker_id}: serves", times=2)
        gateway.wait_for(r"^worker \S+ at \S+ is ready", times=num_ready + 2)
        assert asked.result() == undisturbed
    assert text(gateway) == undisturbed

    served = pids(gateway)
    [driver] = [pid for pid, line in spanning.pools.processes().items() if "cluster.ray.driver " in line]
    os.kill(driver, signal.SIGKILL)
    spanning.pools.wait_for("Ray is started again")
    gateway.wait_until(lambda: bool(gateway.status()["degraded"]))
    gateway.wait_until(lambda: not gateway.status()["degraded"], timeout_s=START_S)
    assert (pids(gateway), text(gateway)) == (served, undisturbed)
