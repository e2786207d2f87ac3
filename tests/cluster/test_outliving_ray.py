"""`kill -9` of Ray's processes, the supervisor, gateway processes and workers under seeded requests: no answer changes,
none lacks its end, and the cluster heals by itself without a restart of the workers that live.

Three kills in every test run; `BATON_RAY_KILLS=100 make test ARGS=tests/cluster/test_outliving_ray.py` makes as many as
wanted, of kinds and at moments made from their numbers.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.deployed import PRECISE, Deployed
from tests.cluster.test_chaos import Choice, answer, check

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4 * 3600)]

KILLS = int(os.environ.get("BATON_RAY_KILLS", "3"))
CLIENTS = 16
EACH = 2
HEALED_S = 100.0  # on an otherwise idle machine it takes some ten
WORKERS = ("prefill-0", "decode-0", "decode-1")
PROCESSES = {
    "gcs": "gcs_server ",
    "raylet": "raylet/raylet ",
    "supervisor": "cluster.supervisor_process",
    "daemon": r"dashboard\.py|monitor\.py|DashboardAgent|RuntimeEnvAgent",
    "gateway": "cluster.processes.child",
}
VITAL = ("gcs", "raylet", "supervisor")
FIRST = (("gcs", "worker"), ("supervisor",), ("raylet", "gateway"))
"""What is killed, one right after the other: the first three times, and then one of `PROCESSES` or a worker."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Deployed]:
    size = ("--prefill", "1", "--decode", "2", "--processes", "2", "--port", "0", "--grpc-port", "0")
    deployed = Deployed("up", *size, *PRECISE)
    try:
        deployed.wait_for("^serving ", timeout_s=120.0)
        yield deployed
    finally:
        deployed.kill()


@pytest.fixture(scope="module")
def undisturbed(cluster: Deployed) -> list[list[Choice]]:
    return [answer(cluster.url, number) for number in range(CLIENTS)]


class Asking:
    """Clients, each of which asks one thing after another."""

    def __init__(self, url: str, undisturbed: list[list[Choice]], *, may_break: bool) -> None:
        self._url = url
        self._undisturbed = undisturbed
        self._may_break = may_break
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._ask, client) for client in range(CLIENTS)]

    def _ask(self, client: int) -> tuple[int, int]:
        """How many were answered, and how many connections broke."""
        num_asked = num_broken = 0
        for _ in range(EACH):
            number = (client + 5 * (num_asked + num_broken)) % CLIENTS
            try:
                seen = answer(self._url, number)
            except httpx.TransportError:
                if not self._may_break:
                    raise
                num_broken += 1
                continue
            check(seen, self._undisturbed[number])
            num_asked += 1
        return num_asked, num_broken

    def answered(self) -> tuple[int, int]:
        """Raises what any client found wrong."""
        counts = [client.result() for client in self._clients]
        self._pool.shutdown()
        return sum(asked for asked, _ in counts), sum(broken for _, broken in counts)


@pytest.mark.parametrize("number", range(KILLS))
def test_whatever_is_killed_no_answer_changes_and_the_cluster_heals(
    cluster: Deployed, undisturbed: list[list[Choice]], number: int
) -> None:
    chance = random.Random(number)
    kinds = FIRST[number] if number < len(FIRST) else (chance.choice([*PROCESSES, "worker"]),)
    num_launches = cluster.count("runs in process")
    asking = Asking(cluster.url, undisturbed, may_break="gateway" in kinds)
    try:
        time.sleep(chance.uniform(0.0, 1.5))  # the moment is what is random here, nothing waits for it
        begun_s = time.monotonic()
        killed = [pid for kind in kinds for pid in kill(cluster, kind, chance)]
        told = troubles(cluster, until_told=bool(set(kinds) & set(VITAL)))
        told_s = time.monotonic() - begun_s
    finally:
        num_asked, num_broken = asking.answered()
    cluster.wait_until(lambda: healed(cluster, killed), timeout_s=HEALED_S)
    healed_s = time.monotonic() - begun_s
    print(f"{kinds}: told {told!r} after {told_s:.1f} s, healed after {healed_s:.1f} s, {num_asked} answers, "
          f"{num_broken} broken with their gateway process")  # fmt: skip
    assert num_asked
    assert cluster.count("runs in process") == num_launches + kinds.count("worker"), "only those killed start anew"


def test_a_worker_that_is_killed_after_all_that_is_started_again(cluster: Deployed) -> None:
    launches = cluster.count("^decode-0: runs in process")
    killed = kill(cluster, "worker", random.Random(0), "decode-0")
    cluster.worker_pids("decode-0", life=launches + 1)
    cluster.wait_until(lambda: healed(cluster, killed), timeout_s=HEALED_S)


def test_a_killed_cluster_leaves_nothing(cluster: Deployed) -> None:
    """The last of this file: workers, supervisor and Ray end with the process that has started it all."""
    os.kill(cluster.process.pid, signal.SIGKILL)
    cluster.wait_until(lambda: cluster.processes() == {}, timeout_s=20.0)


def kill(cluster: Deployed, kind: str, chance: random.Random, worker: str = "") -> list[int]:
    if kind == "worker":
        worker = worker or chance.choice(WORKERS)
        pids = list(cluster.worker_pids(worker, life=cluster.count(rf"^{worker}: runs in process")))
    else:
        pids = [pid for pid, command in cluster.processes().items() if re.search(PROCESSES[kind], command)]
        assert pids, f"no process of {kind}: {cluster.processes()}"
        pids = [chance.choice(sorted(pids))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def troubles(cluster: Deployed, *, until_told: bool) -> str:
    """What `degraded` says of the supervisor and Ray, within seconds."""
    deadline = time.monotonic() + 10.0
    while True:
        told = str(ready(cluster)["degraded"])
        if "workers serve on" in told or not until_told:
            return told
        assert time.monotonic() < deadline, f"`degraded` is {told!r}:\n{cluster.log}"


def healed(cluster: Deployed, killed: list[int]) -> bool:
    told = ready(cluster)
    if not told["ready"] or told["degraded"]:
        return False
    workers = cluster.status()["workers"]
    pids = [worker["info"]["process_id"] for worker in workers if worker["state"] == "ready"]
    return len(pids) == len(WORKERS) and not set(pids) & set(killed)


def ready(cluster: Deployed) -> dict[str, object]:
    """Of any gateway process that lives."""
    while True:
        try:
            told: dict[str, object] = httpx.get(f"{cluster.url}/ready", timeout=10.0).json()
            return told
        except httpx.TransportError:
            continue  # its process was killed just now
