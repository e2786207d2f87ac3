"""Supervised workers and a gateway as separate processes that meet in Redis, as on Kubernetes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import httpx
import pytest

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed, completion_tokens
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

    with gateway.streaming(LONG, max_tokens=1000) as events:
        os.killpg(pools.process.pid, signal.SIGINT)
        assert completion_tokens(events) == 1000
        assert pools.ended() == 0, pools.log
    assert pools.processes() == {}
    gateway.wait_until(lambda: gateway.status()["workers"] == [])

    redis.stop()
    gateway.wait_for("^Redis cannot be reached")
    assert re.search(r"^baton_discovery_current 0", httpx.get(f"{gateway.url}/metrics").text, re.MULTILINE)
    assert gateway.stop() == 0, gateway.log
