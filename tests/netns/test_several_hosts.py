"""Prefill, decode, gateway and Redis on four hosts, as far as the network can tell: KV goes over TCP, a link is cut, a
host is lost. Without Ray, whose nodes `test_ray_hosts.py` has.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed
from tests.netns.hosts import SwitchedHosts, why_not

REASON = why_not()
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON or "possible")]

GATEWAY, PREFILL, DECODE, REDIS = 1, 2, 3, 4
PORT = 7000  # of each worker
MODEL = ("--model", str(DEMO), "--served-name", "demo", "--token", "token-that-the-hosts-share")
NUM_TOKENS = 120


class FourHosts:
    def __init__(self, folder: Path) -> None:
        self.hosts = SwitchedHosts(4)
        self._redis = subprocess.Popen(
            [*self.hosts.command(REDIS), "redis-server", "--save", "", "--protected-mode", "no", "--dir", str(folder)],
            stdout=subprocess.DEVNULL,
        )
        self._deployed: list[Deployed] = []

    def start(self) -> None:
        prefill, self.decode = self._worker(PREFILL, "prefill"), self._worker(DECODE, "decode")
        self.gateway = self._deploy(
            GATEWAY, "gateway", *MODEL, "--host", self.hosts.address(GATEWAY), "--port", "0", "--grpc-port", "0",
            "--index", f"redis://{self.hosts.address(REDIS)}:6379",
            *(option for number in (PREFILL, DECODE) for option in ("--worker", self.worker_address(number))),
            "--set", "router.local_prefill_tokens=0",
            "--set", "router.dispatch.canary_every=1",
        )  # fmt: skip
        for worker in (prefill, self.decode):
            worker.wait_for(r" serves demo at ")
        self.gateway.wait_for(r"^worker \S+ at \S+ is ready", times=2)

    def worker_address(self, number: int) -> str:
        return f"{self.hosts.address(number)}:{PORT}"

    def close(self) -> None:
        for deployed in reversed(self._deployed):
            deployed.kill()
        self.hosts.close()
        self._redis.wait()

    def _worker(self, number: int, role: str) -> Deployed:
        where = ("--host", self.hosts.address(number), "--port", str(PORT))
        return self._deploy(
            number, "worker", *MODEL, *PRECISE, "--role", role, "--id", f"{role}-0", *where, "--set", "lanes.stall_s=2"
        )

    def _deploy(self, number: int, *arguments: str) -> Deployed:
        self._deployed.append(Deployed(*arguments, before=self.hosts.command(number)))
        return self._deployed[-1]


@pytest.fixture(scope="module")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourHosts]:
    started = FourHosts(tmp_path_factory.mktemp("redis"))
    try:
        started.start()
        yield started
    finally:
        started.close()


def streamed(gateway: Deployed) -> str:
    body = {"model": "demo", "prompt": LONG, "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body | {"stream": True}, timeout=100.0) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    assert not [chunk for chunk in chunks if "error" in chunk], chunks
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def canaries(gateway: Deployed) -> dict[str, int]:
    metrics = httpx.get(f"{gateway.url}/metrics", timeout=10.0).text
    counts = re.findall(r'^baton_canary_total{outcome="(\w+)"} (\S+)$', metrics, re.MULTILINE)
    return {name: int(float(value)) for name, value in counts}


def is_decoding(gateway: Deployed) -> bool:
    return any(
        worker["load"]["num_running"] for worker in gateway.status()["workers"] if worker["worker_id"] == "decode-0"
    )


def test_kv_over_the_network_gives_the_answer_of_one_host(four_hosts: FourHosts) -> None:
    gateway, hosts = four_hosts.gateway, four_hosts.hosts
    assert len(streamed(gateway)) > NUM_TOKENS / 2
    gateway.wait_until(lambda: sum(canaries(gateway).values()) > 0)
    assert canaries(gateway).get("different", 0) == 0
    assert canaries(gateway)["same"] > 0
    status = gateway.status()
    places = {worker["worker_id"]: worker["address"] for worker in status["workers"]}
    assert places == {"prefill-0": f"{hosts.address(PREFILL)}:{PORT}", "decode-0": f"{hosts.address(DECODE)}:{PORT}"}
    assert gateway.metric("baton_pool_transfer_bytes_total", "decode") > 0
    lanes = [lane for held in status["kv"].values() for lane in held["lanes"]]
    assert {lane["transport"] for lane in lanes} == {"gloo"}, lanes
    assert all("no memory in common" in lane["reason"] for lane in lanes), lanes
    assert hosts.listening(REDIS) == {6379}


def test_an_answer_outlives_a_cut_link_and_later_ones_wait(four_hosts: FourHosts) -> None:
    gateway, hosts = four_hosts.gateway, four_hosts.hosts
    undisturbed = streamed(gateway)
    num_ready = gateway.count(r"^worker decode-0 at \S+ is ready")
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(streamed, gateway)
        gateway.wait_until(lambda: is_decoding(gateway))
        hosts.cut(DECODE)
        gateway.wait_for(r"^worker decode-0 at \S+ is lost")
        four_hosts.decode.wait_for(r"^the lane to prefill-0\S* is in quarantine")
        hosts.mend(DECODE)
        assert asked.result() == undisturbed
    gateway.wait_for(r"^worker decode-0 at \S+ is ready", times=num_ready + 1)
    assert [streamed(gateway) for _ in range(3)] == [undisturbed] * 3


def test_an_answer_outlives_a_lost_host(four_hosts: FourHosts) -> None:
    """The last test: the host does not come back."""
    gateway, hosts = four_hosts.gateway, four_hosts.hosts
    undisturbed = streamed(gateway)
    hosts.lose(PREFILL)
    assert streamed(gateway) == undisturbed
    gateway.wait_for(r"^worker prefill-0 at \S+ is lost")
    hosts.lose(REDIS)
    assert streamed(gateway) == undisturbed
