"""Gateway and supervisor, Ray's head, prefill, decode and Redis on five hosts, as far as the network can tell: workers
are on Ray nodes, their lanes are TCP, a link is cut, a node is lost. Takes minutes: only with BATON_TEST_RAY_HOSTS=1.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed
from tests.deploy.rendering import K8S
from tests.netns.hosts import SwitchedHosts, why_not

ASKED = "BATON_TEST_RAY_HOSTS"
REASON = why_not() if os.environ.get(ASKED) else f"takes minutes: set {ASKED}=1"
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON or "possible")]

GATEWAY, PREFILL, DECODE, REDIS, HEAD = 1, 2, 3, 4, 5
SECOND_PREFILL, SECOND_DECODE = 6, 7
POOLS = {PREFILL: "prefill", DECODE: "decode", SECOND_PREFILL: "prefill", SECOND_DECODE: "decode"}
MODEL = ("--model", str(DEMO), "--served-name", "demo")
QUICK = ("--set", "supervision.health_period_s=1")
NUM_TOKENS = 1000  # seconds also on a quiet machine: faults come while it is written
START_S = 120.0
GRACE_S = 120.0  # terminationGracePeriodSeconds


class RayHosts:
    """Ray, Redis, the workers' supervisor and a gateway. Below `folder` each host has Ray's files for itself. A pool's
    node has room for `room` of its ranks, and with `spans` both nodes for as many of either pool, whose workers have
    two ranks. `keeps_tables`: Ray's head has its tables in Redis. `doubled`: a pool has two workers on two nodes."""

    def __init__(
        self, folder: Path, *, room: int = 1, spans: bool = False, keeps_tables: bool = False, doubled: bool = False
    ) -> None:
        self._folder = folder
        self._room = room
        self._spans = spans
        self._keeps_tables = keeps_tables
        self._doubled = doubled
        self.hosts = SwitchedHosts(7 if doubled else 5, shadowed=folder / "ray")
        self._running: list[subprocess.Popen[bytes]] = []
        self._deployed: list[Deployed] = []

    def start(self) -> None:
        self._run(REDIS, "redis-server", "--save", "", "--protected-mode", "no", "--dir", str(self._folder))
        self.head()
        self.nodes(*(POOLS if self._doubled else (PREFILL, DECODE)))
        redis = f"redis://{self.hosts.address(REDIS)}:6379"
        ray = f"ray://{self.hosts.address(HEAD)}:10001"
        self.pools = self._deploy(
            "pools", *MODEL, *PRECISE, *QUICK, "--discovery", redis, "--ray-address", ray,
            "--set", "ray.pool_resources=true", "--set", "lanes.transport=collective",
            *(("--tp", "2", "--set", "ray.span_nodes=true") if self._spans else ()),
            *(("--prefill", "2", "--decode", "2") if self._doubled else ()),
        )  # fmt: skip
        self.gateway = self._deploy(
            "gateway", *MODEL, "--host", self.hosts.address(GATEWAY), "--port", "0", "--grpc-port", "0",
            "--discovery", redis, "--set", "router.local_prefill_tokens=0",
        )  # fmt: skip

    def head(self) -> None:
        """Returns when Ray's head serves, with the files of a new pod: none."""
        shutil.rmtree(files := self._folder / f"ray{HEAD}")
        files.mkdir()
        options = (
            "--head",
            "--port=6379",
            "--num-cpus=0",
            "--include-dashboard=false",
            "--ray-client-server-port=10001",
        )
        assert self._ray(HEAD, f"--temp-dir={self._folder / 'ray'}", *options).wait(START_S) == 0

    def nodes(self, *numbers: int) -> None:
        """Ray nodes with the resource of one pool each, and the ports of the manifests."""
        starting = []
        for number in numbers:
            pool = POOLS[number]
            offers = dict.fromkeys(("prefill", "decode") if self._spans else (pool,), self._room)
            ports = [f"--{name}={port}" for name, port in ray_ports(pool).items()]
            head, offered = f"--address={self.hosts.address(HEAD)}:6379", f"--resources={json.dumps(offers)}"
            starting.append(self._ray(number, head, "--num-cpus=1", offered, *ports))
        assert [process.wait(START_S) for process in starting] == [0] * len(numbers)

    def close(self) -> None:
        for deployed in reversed(self._deployed):
            deployed.kill()
        self.hosts.close()
        for process in self._running:
            process.wait()

    def end_pod(self, number: int) -> None:
        """Ends a host's processes as Kubernetes ends a pod: the manifest's preStop hook, SIGTERM, SIGKILL."""
        command = pool_group(POOLS[number])["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"][
            "command"
        ]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        hook = self._run(number, "env", f"PATH={path}", *command)
        assert hook.wait(GRACE_S) == 0, f"the preStop hook of {POOLS[number]}"
        self.hosts.lose(number, signal.SIGTERM)
        self.hosts.lose(number)

    def _ray(self, number: int, *options: str) -> subprocess.Popen[bytes]:
        return self._run(
            number, sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats",
            f"--node-ip-address={self.hosts.address(number)}", "--object-store-memory=80000000", *options,
        )  # fmt: skip

    def _run(self, number: int, *command: str) -> subprocess.Popen[bytes]:
        apart = {"TMPDIR": str(self._folder / "ray")}  # for the files of Baton's ranks, too
        if self._keeps_tables:  # as KubeRay does
            apart |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
            apart |= {"RAY_REDIS_ADDRESS": f"{self.hosts.address(REDIS)}:6379"} if number == HEAD else {}
        self._running.append(
            subprocess.Popen(
                [*self.hosts.command(number), *command],
                cwd=self._folder,
                env=os.environ | apart | {"RAY_USAGE_STATS_ENABLED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        return self._running[-1]

    def _deploy(self, *arguments: str) -> Deployed:
        self._deployed.append(Deployed(*arguments, before=self.hosts.command(GATEWAY)))
        return self._deployed[-1]


def pool_group(pool: str) -> dict[str, Any]:
    """A pool's group of pods, as the manifests have it."""
    manifests = yaml.safe_load_all((K8S / "base" / "raycluster.yaml").read_text())
    [ray] = [manifest for manifest in manifests if manifest["kind"] == "RayCluster"]
    [group] = [group for group in ray["spec"]["workerGroupSpecs"] if group["groupName"] == pool]
    return dict(group)


def ray_ports(pool: str) -> dict[str, int]:
    """The ports of a pool's Ray nodes, as the manifests name them."""
    parameters = pool_group(pool)["rayStartParams"]
    return {name: int(value) for name, value in parameters.items() if name.endswith("-port")}


@contextmanager
def serving_hosts(
    *, room: int = 1, spans: bool = False, keeps_tables: bool = False, doubled: bool = False
) -> Iterator[RayHosts]:
    """All workers serve."""
    folder = Path(tempfile.mkdtemp(prefix="bh", dir="/tmp"))  # short, for the paths of Ray's sockets
    started = RayHosts(folder, room=room, spans=spans, keeps_tables=keeps_tables, doubled=doubled)
    try:
        started.start()
        started.gateway.wait_for(r"^worker \S+ at \S+ is ready", times=4 if doubled else 2)
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def five_hosts() -> Iterator[RayHosts]:
    with serving_hosts() as started:
        yield started


def text(gateway: Deployed) -> str:
    body = {"model": "demo", "prompt": LONG, "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    response = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=240.0)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def pids(gateway: Deployed) -> dict[str, int]:
    """The processes of the workers that serve."""
    return {
        worker["worker_id"]: worker["info"]["process_id"]
        for worker in gateway.status()["workers"]
        if worker["state"] == "ready"
    }


def is_decoding(gateway: Deployed) -> bool:
    return any(
        worker["load"]["num_running"] for worker in gateway.status()["workers"] if worker["worker_id"] == "decode-0"
    )


def test_workers_are_on_their_pools_nodes_and_kv_uses_the_network(five_hosts: RayHosts) -> None:
    gateway, hosts = five_hosts.gateway, five_hosts.hosts
    before = gateway.metric("baton_pool_transfer_bytes_total", "decode")
    text(gateway)
    status = gateway.status()
    places = {worker["worker_id"]: worker["address"].partition(":")[0] for worker in status["workers"]}
    assert places == {"prefill-0": hosts.address(PREFILL), "decode-0": hosts.address(DECODE)}
    assert gateway.metric("baton_pool_transfer_bytes_total", "decode") > before
    lanes = [lane for held in status["kv"].values() for lane in held["lanes"]]
    assert {lane["transport"] for lane in lanes} == {"gloo"}, lanes


def test_workers_listen_where_network_policies_let_gateways_in(five_hosts: RayHosts) -> None:
    """On a pool's host: Ray's ports as the manifests name them, Ray's own workers', and Baton's in the open range."""
    policies = {
        manifest["metadata"]["name"]: manifest["spec"]
        for manifest in yaml.safe_load_all((K8S / "base" / "networkpolicy.yaml").read_text())
    }
    [opened] = [rule["ports"][0] for rule in policies["ray-workers"]["ingress"] if "ports" in rule]
    listening = five_hosts.hosts.listening(DECODE)
    own = {port for port in listening if opened["port"] <= port <= opened["endPort"]}
    [address] = [
        worker["address"] for worker in five_hosts.gateway.status()["workers"] if worker["worker_id"] == "decode-0"
    ]
    assert int(address.rpartition(":")[2]) in own
    named = set(ray_ports("decode").values())
    assert not {port for port in listening - own - named if not 10002 <= port <= 19999}, "a port that no policy knows"
    assert five_hosts.hosts.listening(REDIS) == {6379}
    gateway = httpx.URL(five_hosts.gateway.url).port
    assert {gateway, five_hosts.gateway.grpc_port} <= five_hosts.hosts.listening(GATEWAY)


def test_an_answer_outlives_a_cut_link_and_a_lost_node(five_hosts: RayHosts) -> None:
    gateway, hosts = five_hosts.gateway, five_hosts.hosts
    undisturbed = text(gateway)
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(text, gateway)
        gateway.wait_until(lambda: is_decoding(gateway))
        hosts.cut(DECODE)
        gateway.wait_for(r"^worker decode-0 at \S+ is lost")
        hosts.mend(DECODE)
        assert asked.result() == undisturbed

        asked = client.submit(text, gateway)
        gateway.wait_until(lambda: is_decoding(gateway))
        num_ready = gateway.count(r"^worker decode-0 at \S+ is ready")
        hosts.lose(DECODE)
        five_hosts.pools.wait_for(r"^worker decode-0: .*starting it again")
        five_hosts.nodes(DECODE)
        gateway.wait_for(r"^worker decode-0 at \S+ is ready", times=num_ready + 1)
        assert asked.result() == undisturbed
    assert text(gateway) == undisturbed
