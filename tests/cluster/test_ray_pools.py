"""Supervised workers and a gateway as separate processes that meet in Redis, as on Kubernetes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed, completion_tokens
from tests.cluster.redis_server import RedisServer
from tests.cluster.seeded import answer, check

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


SEEDED = (5, 8, 11, 3)


def serving(gateway: Deployed) -> dict[str, tuple[int, str]]:
    """The process and the revision of each ready worker."""
    workers = [worker["info"] | worker for worker in gateway.status()["workers"] if worker["state"] == "ready"]
    return {worker["worker_id"]: (worker["process_id"], worker["revision"]) for worker in workers}


@pytest.mark.slow
def test_workers_outlive_their_controller_and_the_next_rolls(
    deploy: Callable[..., Deployed], redis: RedisServer
) -> None:
    """`kill -9` of `baton pools` ended every worker."""
    gateway = deploy("gateway", *MODEL, "--port", "0", "--grpc-port", "0", "--discovery", redis.url)
    supervised = (*MODEL, *PRECISE, "--discovery", redis.url)
    pools = deploy("pools", *supervised)
    gateway.wait_for(r"^worker \S+ at \S+ is ready", times=2)
    undisturbed = [answer(gateway.url, number) for number in SEEDED]
    before = serving(gateway)
    over: list[bool] = []

    def again_and_again(place: int) -> int:
        num_answers = 0
        while not over or not num_answers:
            check(answer(gateway.url, SEEDED[place]), undisturbed[place])
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(len(SEEDED)) as clients:
        asking = [clients.submit(again_and_again, place) for place in range(len(SEEDED))]
        try:
            os.kill(pools.process.pid, signal.SIGKILL)
            gateway.wait_until(lambda: "baton pools" in gateway.status()["degraded"])
            adopting = deploy("pools", *supervised)
            adopting.wait_for("^serving with 2 workers")
            gateway.wait_until(lambda: gateway.status()["degraded"] == "")
            assert serving(gateway) == before, "the same processes serve"
            os.kill(adopting.process.pid, signal.SIGKILL)
            rolling = deploy("pools", *supervised, "--set", "worker.prefill_chunk=256")
            gateway.wait_until(lambda: all(revision for _, revision in serving(gateway).values()), timeout_s=120.0)
            gateway.wait_until(lambda: len(serving(gateway)) == 2)
            assert not {pid for pid, _ in before.values()} & {pid for pid, _ in serving(gateway).values()}
        finally:
            over.append(True)
        assert all(client.result() for client in asking)
    assert rolling.stop() == 0, rolling.log
    assert {*pools.processes(), *adopting.processes(), *rolling.processes()} == set()
