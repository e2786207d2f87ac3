"""Supervised workers and a gateway as separate processes that meet in Redis, as on Kubernetes."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed
from tests.cluster.redis_server import RedisServer

pytestmark = pytest.mark.cluster

MODEL = ("--model", str(DEMO), "--served-name", "demo")


def test_a_gateway_finds_announced_workers_and_loses_drained_ones(
    deploy: Callable[..., Deployed], redis: RedisServer, up: Deployed
) -> None:
    gateway = deploy("gateway", *MODEL, "--port", "0", "--grpc-port", "0", "--discovery", redis.url)
    assert httpx.get(f"{gateway.url}/ready").status_code == 503
    pools = deploy("pools", *MODEL, *PRECISE, "--discovery", redis.url)
    gateway.wait_for(r"^worker \S+ at \S+ is ready", times=2)
    assert httpx.get(f"{gateway.url}/ready").status_code == 200
    assert gateway.text(LONG) == up.text(LONG)

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(gateway.complete, LONG, max_tokens=150, ignore_eos=True)
        gateway.wait_until(lambda: any(worker["load"]["num_running"] for worker in gateway.status()["workers"]))
        assert pools.stop(signal.SIGINT) == 0, pools.log
        assert asked.result().json()["usage"]["completion_tokens"] == 150
    assert pools.processes() == {}
    gateway.wait_until(lambda: gateway.status()["workers"] == [])

    redis.stop()
    gateway.wait_for("^Redis cannot be reached")
    assert re.search(r"^baton_discovery_current 0", httpx.get(f"{gateway.url}/metrics").text, re.MULTILINE)
    assert gateway.stop() == 0, gateway.log
