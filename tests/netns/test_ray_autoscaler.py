"""Ray's autoscaler v2 with fake nodes, on a host of its own: a worker without room brings a node, the node of a drained
worker goes. Takes a minute: only with BATON_TEST_RAY_HOSTS=1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.exceptions import RaySystemError, RpcError

from tests.cluster.deployed import DEMO, PRECISE, Deployed
from tests.netns.hosts import SwitchedHosts
from tests.netns.test_ray_hosts import REASON

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON or "possible")]

POOL = "colocated"
MODEL = ("--model", str(DEMO), "--served-name", "demo")
CLUSTER: dict[str, Any] = {
    "cluster_name": "fake_multinode", "max_workers": 8, "upscaling_speed": 1.0, "idle_timeout_minutes": 0.1,
    "provider": {
        "type": "external", "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "head_node_id": FAKE_HEAD_NODE_ID, "launch_multiple": True,
    },
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        POOL: {"resources": {"CPU": 1, POOL: 1}, "node_config": {}, "min_workers": 0, "max_workers": 3},
    },
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{name: [] for name in ("initialization_commands", "setup_commands", "cluster_synced_files")},
    **{f"{node}_{kind}_commands": [] for node in ("head", "worker") for kind in ("setup", "start_ray")},
}  # fmt: skip
"""Ray's wheel lacks the file from which ray.cluster_utils.AutoscalingCluster makes its own, and the fake provider's."""
START_S = 180.0  # a trial of Ray's client that fails takes 30


class AutoscaledRay:
    """A head without CPUs whose autoscaler starts nodes for what waits; Redis, the supervisor and a gateway."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hosts = SwitchedHosts(1)
        self._running: list[subprocess.Popen[bytes]] = []
        self._deployed: list[Deployed] = []
        self.address = self._hosts.address(1)

    def start(self) -> None:
        self._run("redis-server", "--save", "", "--protected-mode", "no", "--dir", str(self._folder))
        self._head()
        redis, ray = f"redis://{self.address}:6379", f"ray://{self.address}:10001"
        self._deploy(
            "pools", *MODEL, *PRECISE, "--colocated", "--discovery", redis, "--ray-address", ray,
            "--set", "ray.pool_resources=true",
        )  # fmt: skip
        self.gateway = self._deploy(
            "gateway", *MODEL, "--host", self.address, "--port", "0", "--grpc-port", "0", "--discovery", redis
        )

    def nodes(self) -> set[str]:
        """Ids of the living nodes that offer the pool's resource."""
        infos = GcsClient(address=f"{self.address}:6380").get_all_node_info(timeout=10.0)
        return {id_.hex() for id_, node in infos.items() if node.state == 0 and POOL in node.resources_total}

    def close(self) -> None:
        for deployed in reversed(self._deployed):
            deployed.kill()
        self._hosts.close()
        for process in self._running:
            process.wait()

    def _head(self) -> None:
        """Returns when Ray's head serves."""
        config = self._folder / "autoscaler.json"
        provider = CLUSTER["provider"] | {"gcs_address": f"{self.address}:6380"}
        config.write_text(json.dumps(CLUSTER | {"provider": provider}))
        started = self._run(
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--autoscaling-config={config}",
            f"--node-ip-address={self.address}", "--port=6380", "--num-cpus=0", "--include-dashboard=false",
            "--ray-client-server-port=10001", "--object-store-memory=80000000", "--disable-usage-stats",
            f"--temp-dir={self._folder / 'ray'}",
        )  # fmt: skip
        assert started.wait(START_S) == 0

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        environment = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(self._folder),
        }  # fmt: skip
        with (self._folder / f"log{len(self._running)}").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    [*self._hosts.command(1), *command],
                    cwd=self._folder, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            )  # fmt: skip
        return self._running[-1]

    def _deploy(self, *arguments: str) -> Deployed:
        self._deployed.append(Deployed(*arguments, before=self._hosts.command(1)))
        return self._deployed[-1]


@pytest.fixture
def autoscaled() -> Iterator[AutoscaledRay]:
    folder = Path(tempfile.mkdtemp(prefix="ba", dir="/tmp"))  # short, for the paths of Ray's sockets
    started = AutoscaledRay(folder)
    try:
        started.start()
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with suppress(RpcError, RaySystemError):
            if holds():
                return
        assert time.monotonic() < deadline, f"not in {START_S:g} s: {what}"
        time.sleep(0.2)


def ready(ray: AutoscaledRay) -> dict[str, int]:
    """Process ids of the ready workers by their names."""
    workers: list[dict[str, Any]] = ray.gateway.status()["workers"]
    return {worker["worker_id"]: worker["info"]["process_id"] for worker in workers if worker["state"] == "ready"}


def answer(ray: AutoscaledRay) -> str:
    body = {"model": "demo", "prompt": "def add(", "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    response = httpx.post(f"{ray.gateway.url}/v1/completions", json=body, timeout=60.0)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def scale(ray: AutoscaledRay, count: int) -> None:
    response = httpx.post(
        f"{ray.gateway.url}/admin/capacity", json={"kind": "scale", "counts": {POOL: count}}, timeout=60.0
    )
    assert response.status_code == 202, response.text


def test_nodes_come_for_waiting_workers_and_go_with_drained_ones(autoscaled: AutoscaledRay) -> None:
    until("a worker on the first node", lambda: len(ready(autoscaled)) == 1)
    first, nodes, before = ready(autoscaled), autoscaled.nodes(), answer(autoscaled)
    assert len(nodes) == 1
    scale(autoscaled, 2)
    until("a second worker, on a node of its own", lambda: len(ready(autoscaled)) == 2)
    assert len(autoscaled.nodes() - nodes) == 1
    scale(autoscaled, 1)
    until("the other's node is gone", lambda: len(autoscaled.nodes()) == 1)
    assert (ready(autoscaled), autoscaled.nodes()) == (first, nodes)
    assert answer(autoscaled) == before
