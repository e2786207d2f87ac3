"""`baton doctor`: each planted fault is found by its name and no other, and a healthy cluster has no finding."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from redis.exceptions import ResponseError
from typer.testing import CliRunner

from cluster.cli.main import make_app
from cluster.doctor import gather
from cluster.doctor.doctor_verb import _left_out, _moved, described, measured
from cluster.doctor.examination import (
    ClosedPort,
    Examination,
    Finding,
    HostFacts,
    LaneProbe,
    LaneSpeed,
    RedisFacts,
    Severity,
)
from cluster.doctor.gather import _closed, _policy, _probe, examine
from cluster.doctor.rules import findings
from router.dispatch import lane_probe
from router.fleet_owner import NoFleetOwner
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.operating import operating

NOW = 1_800_000_000.0
GIB = 2**30


def worker(name: str, role: str, port: int) -> dict[str, Any]:
    info = {"role": role, "model": "m", "vocab_size": 100, "weights": "", "device": "cpu", "layout": {"tp": 1}}
    return {"worker_id": name, "address": f"127.0.0.1:{port}", "state": "ready", "reason": "", "info": info}


LANE = {"peer": "d0#1", "transport": "shared memory", "state": "open", "num_bytes": 10**9, "busy_s": 0.5, "reason": ""}
STATUS: dict[str, Any] = {
    "ready": True, "reason": "", "workers": [worker("p0", "prefill", 1), worker("d0", "decode", 2)],
    "kv": {"p0": {"lanes": [LANE]}, "d0": None}, "capacity": {"waiting_for": []}, "troubles": [],
}  # fmt: skip
SPEEDS = (
    LaneSpeed(num_tokens=100, num_bytes=10**6, seconds=0.02, computed_s=0.01, same=True),
    LaneSpeed(num_tokens=1100, num_bytes=11 * 10**6, seconds=0.03, computed_s=0.11, same=True),
)
PROBE = LaneProbe(source="p0", destination="d0", transport="shared memory", speeds=SPEEDS)
HOST = HostFacts(
    num_cores=2, shm_bytes=8 * GIB, shm_free_bytes=7 * GIB, max_open_files=2**20, addresses=frozenset({"127.0.0.1"})
)
REDIS = RedisFacts(url="redis://r:6379", version="7.0.15", eviction="noeviction", round_trip_s=0.001)
HEALTHY = Examination(
    url="http://127.0.0.1:8000", now_s=NOW, clock_ahead_s=0.4, status=STATUS, certificates={"clients": NOW + 1e7},
    host=HOST, redis=REDIS, probes=(PROBE,),
)  # fmt: skip


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The status with one value changed."""
    made = copy.deepcopy(STATUS)
    *way, last = path
    place: Any = made
    for step in way:
        place = place[step]
    place[last] = to
    return made


def lane(**change: Any) -> dict[str, Any]:
    return {"status": changed("kv", "p0", "lanes", to=[LANE | change])}


def speeds(**change: Any) -> dict[str, Any]:
    return {"probes": (replace(PROBE, speeds=(SPEEDS[0], replace(SPEEDS[1], **change))),)}


PLANTED: dict[str, dict[str, Any]] = {
    "gateway-unreachable": {"no_answer": "no cluster answers", "status": {}},
    "not-ready": {"status": changed("ready", to=False)},
    "gateway-degraded": {"status": changed("troubles", to=["the file of tenants was not loaded again"])},
    "tls-expiry": {"certificates": {"clients": NOW + 86_400}},
    "clock-skew": {"clock_ahead_s": -60.0},
    "worker-away": {"status": changed("workers", 1, "state", to="lost")},
    "model-differs": {"status": changed("workers", 1, "info", "model", to="other")},
    "fleet-short": {"status": changed("capacity", "waiting_for", to=["a node with 2 GPUs"])},
    "port-closed": {"closed": (ClosedPort(what="lanes of p0", address="10.0.0.1:9", error="timed out"),)},
    "lane-broken": lane(state="quarantined", reason="no progress for 5 s"),
    "lane-detour": lane(transport="gloo", reason="no memory in common"),
    "lane-slow": lane(num_bytes=10**8, busy_s=10.0),
    "lane-silent": {"probes": (LaneProbe(source="p0", destination="d0", error="timed out"),)},
    "lane-corrupt": speeds(same=False),
    "lane-not-worth-it": speeds(seconds=4.0),
    "shm-small": {"host": replace(HOST, shm_bytes=64 * 2**20, shm_free_bytes=60 * 2**20)},
    "shm-full": {"host": replace(HOST, shm_free_bytes=2**20)},
    "open-files": {"host": replace(HOST, max_open_files=1024)},
    "cores": {"host": replace(HOST, num_cores=1)},
    "redis-unreachable": {"redis": RedisFacts(url="redis://r:6379", error="Connection refused")},
    "redis-version": {"redis": replace(REDIS, version="5.0.7")},
    "redis-eviction": {"redis": replace(REDIS, eviction="allkeys-lru")},
    "redis-slow": {"redis": replace(REDIS, round_trip_s=0.1)},
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_by_its_name_alone(name: str) -> None:
    results = findings(replace(HEALTHY, **PLANTED[name]))
    assert [entry.name for entry in results] == [name]
    assert results[0].fix
    assert results[0].text in described(results[0])
    assert ".. Fix" not in described(replace(results[0], text="A sentence of somebody else."))


def test_a_certificate_for_another_host_is_named() -> None:
    seen = replace(HEALTHY, status={}, tls_error="Hostname mismatch", no_answer="not trusted")
    assert [finding.name for finding in findings(seen)] == ["tls-name", "gateway-unreachable"]


def test_a_healthy_cluster_has_no_finding() -> None:
    assert findings(HEALTHY) == []
    assert findings(replace(HEALTHY, probes=(), redis=None, host=None, certificates={}, clock_ahead_s=None)) == []
    assert findings(replace(HEALTHY, status=changed("workers", 1, "state", to="drained"))) == [], "it is being replaced"


def test_a_repository_that_has_moved_is_shown_without_a_finding() -> None:
    path = "/hub/models--acme--tiny/snapshots/0123456789abcdef/tiny.gguf"
    seen = replace(HEALTHY, status=changed("workers", 0, "info", "model_path", to=path))
    for commit, is_shown in (("0123456789abcdef", False), ("fedcba", True), ("", False)):
        now = replace(seen, hub_commits={"acme/tiny": commit})
        assert bool(_moved([now])) is is_shown
        assert not findings(now)


def test_faults_come_first() -> None:
    both = replace(HEALTHY, clock_ahead_s=60.0, closed=(ClosedPort(what="p0", address="a:1", error="refused"),))
    assert [finding.severity for finding in findings(both)] == [Severity.FAULT, Severity.WARNING]


def test_the_break_even_is_where_the_lines_cross() -> None:
    # moving: 0.019 s and 10 us a token; computing: 100 us a token
    assert PROBE.break_even_tokens == pytest.approx(0.019 / 90e-6)
    assert "moving is faster from 211 tokens on" in measured(PROBE)
    slower = replace(PROBE, speeds=(SPEEDS[0], replace(SPEEDS[1], seconds=0.5)))
    assert "computing is faster" in measured(slower)
    assert "0.050 GB/s with 1.0 MB" in measured(PROBE)


def test_a_roll_has_two_models_and_a_revision_has_one() -> None:
    newer = STATUS["workers"][1]["info"] | {"model": "other", "revision": "new"}
    rolling = replace(HEALTHY, status=changed("workers", 1, "info", to=newer))
    assert findings(rolling) == []


def found_at(monkeypatch: pytest.MonkeyPatch, status: int, **content: Any) -> Sequence[Finding]:
    """The findings about http://other, which answers everything with this status and content."""
    pages = httpx.MockTransport(lambda _: httpx.Response(status, **content))
    opened = lambda url, _: httpx.Client(transport=pages, base_url=url)  # noqa: E731
    monkeypatch.setattr("cluster.doctor.gather.open_client", opened)
    return findings(replace(examine("http://other")[0], host=None))


@pytest.mark.parametrize("page", ["<html>Welcome</html>", "[]", '{"status": "ok"}'])
def test_another_server_at_the_url_is_a_fault(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    [finding] = found_at(monkeypatch, 200, text=page)
    assert (finding.name, finding.text) == (
        "gateway-unreachable", "http://other answers, and not as a gateway: /admin/status is no report",
    )  # fmt: skip


@pytest.mark.parametrize("status", [401, 403])
def test_a_gateway_that_wants_a_key_is_not_to_be_started(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    [finding] = found_at(monkeypatch, status, json={"error": {"message": "no key", "code": "x"}})
    assert (finding.name, finding.fix) == (
        "no-admin-key", "give --api-key, or the environment variable BATON_ADMIN_KEY",
    )  # fmt: skip


def test_a_probe_that_is_answered_with_a_page_is_silent() -> None:
    facts: dict[str, Any] = {"max_model_len": 4096, "layout": {"block_size": 16}}
    source, destination = (
        {"worker_id": name, "info": facts, "load": {"num_free_blocks": 64}} for name in ("p0", "d0")
    )  # fmt: skip
    pages = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    with httpx.Client(transport=pages, base_url="http://other") as client:
        probe = _probe(client, source, destination, time.monotonic() + 10.0)
    assert probe is not None
    assert probe.error == "the gateway's answer is not JSON"


def test_ports_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trying = most = 0

    async def silent(*_: object) -> None:
        nonlocal trying, most
        trying += 1
        most = max(most, trying)
        await asyncio.Event().wait()

    monkeypatch.setattr(gather, "CONNECT_S", 0.05)
    monkeypatch.setattr("cluster.doctor.gather.asyncio.open_connection", silent)
    status = copy.deepcopy(STATUS)
    for number, entry in enumerate(status["workers"]):
        entry["info"]["lane"] = {"host": "10.0.0.1", "port": number}
    closed, untried = _closed(status)
    assert (most, untried) == (4, 0)
    assert {finding.error for finding in closed} == {"timed out"}
    assert [finding.what for finding in closed] == ["p0", "lanes of p0", "d0", "lanes of d0"]
    monkeypatch.setattr(gather, "MAX_CONNECTS", 1)
    monkeypatch.setattr(gather, "PORTS_S", 0.075)
    closed, untried = _closed(status)
    assert len(closed) + untried == 4
    assert untried, "there is time for one and a half"
    assert _left_out([replace(HEALTHY, untried=3, unseen=1)]) == [
        "no time for 1 more model",
        "no time for 3 more ports",
    ]


def test_names_that_nobody_resolves_hold_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a firewalled name server never answers."""
    released, resolve = threading.Event(), socket.getaddrinfo

    def silent(host: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(host, str) and host.endswith(".example"):
            released.wait()
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(gather, "NAMES_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        [seen] = examine("http://gateway.example:8000", redis_url="redis://redis.example")
        assert seen.no_answer == "the name gateway.example is not resolved in 0.1 s"
        assert seen.redis is not None
        assert seen.redis.error == "the name redis.example is not resolved in 0.1 s"
        status = copy.deepcopy(STATUS)
        for entry in status["workers"]:
            entry["info"]["lane"] = {"host": "worker.example", "port": 1}
        assert {"lanes of p0", "lanes of d0"} <= {
            finding.what for finding in _closed(status)[0] if "name" in finding.error
        }
    finally:
        released.set()


async def test_a_redis_that_refuses_config_is_reached() -> None:
    class ManagedRedis:
        async def config_get(self, name: str) -> dict[str, str]:
            raise ResponseError("unknown command 'CONFIG'")

    assert await _policy(ManagedRedis()) == ""
    assert findings(replace(HEALTHY, redis=replace(REDIS, eviction=""))) == []


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    await made.add("p0", "d0")
    made["d0"].cached = 10**6
    yield made
    await made.close()


async def test_a_cluster_is_examined_and_its_lanes_are_proved(cluster: Cluster) -> None:
    async with operating(cluster) as (client, _):
        url = str(client.base_url)
        [seen] = await asyncio.to_thread(examine, url)
        assert [(probe.name, probe.error) for probe in seen.probes] == [("p0 to d0", "")]
        assert seen.probes[0].speeds[0].same
        refused = await client.post("/admin/lanes/probe?source=p0&destination=nobody")
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "destination")
        assert (await client.post("/admin/lanes/probe?num_tokens=0")).status_code == 400

        cluster["d0"].token = lambda request, index: 7  # type: ignore[method-assign]
        cluster["p0"].token = lambda request, index: 8  # type: ignore[method-assign]
        [corrupt] = await asyncio.to_thread(examine, url)
        assert "lane-corrupt" in [finding.name for finding in findings(corrupt)]
        answer = await asyncio.to_thread(CliRunner().invoke, make_app(["doctor"]), ["doctor", "--json", "--url", url])
        assert answer.exit_code == 2
        told = json.loads(answer.output)
        assert "lane-corrupt" in [finding["name"] for finding in told["findings"]]
        assert told["lanes"][0]["speeds"][0]["same"] is False


async def test_a_busy_source_is_no_fault_of_its_lane(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_probe, "COMPUTE_TIMEOUT_S", 0.05)
    cluster["p0"].pause_after = 0
    async with operating(cluster) as (client, _):
        [seen] = await asyncio.to_thread(examine, str(client.base_url))
    assert (seen.probes, seen.unprobed) == ((), 1)
    assert "lane-silent" not in [finding.name for finding in findings(seen)]


async def test_kv_that_does_not_arrive_is_a_fault(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_probe, "MOVE_TIMEOUT_S", 0.05)
    cluster["d0"].pause_after = 0
    async with operating(cluster) as (client, _):
        [seen] = await asyncio.to_thread(examine, str(client.base_url))
    [silent] = [finding for finding in findings(seen) if finding.name == "lane-silent"]
    assert "from p0 has not arrived at d0" in silent.text


async def test_a_lane_for_which_little_time_is_left_is_left_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor's own deadline ends the probe at the gateway: the lane is not called silent for it."""
    monkeypatch.setattr(gather, "TOTAL_S", 1.8)
    monkeypatch.setattr(lane_probe, "MOVE_TIMEOUT_S", 600.0)  # nothing waits for the gateway's own limits
    cluster["d0"].pause_after = 0
    async with operating(cluster) as (client, _):
        [seen] = await asyncio.to_thread(examine, str(client.base_url))
    assert (seen.probes, seen.unprobed) == ((), 1)
    assert "lane-silent" not in [finding.name for finding in findings(seen)]


async def test_a_hung_worker_does_not_make_the_gateway_unreachable(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    class HungOwner(NoFleetOwner):
        view = never

    monkeypatch.setattr(cluster.fleet, "stats", never)
    async with operating(cluster, fleet_owner=HungOwner()) as (client, _):
        [seen] = await asyncio.to_thread(examine, str(client.base_url), probes=False)
    assert seen.no_answer == ""
    assert (seen.status["capacity"], seen.status["kv"]) == (None, {"p0": None, "d0": None})


@pytest.mark.parametrize("timeout_s", ["0", "13", "nan", "x"])
async def test_a_probes_time_has_bounds(cluster: Cluster, timeout_s: str) -> None:
    async with operating(cluster) as (client, _):
        query = f"source=p0&destination=d0&timeout_s={timeout_s}"
        answer = await client.post(f"/admin/lanes/probe?{query}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], timeout_s in error["message"], "0.1 to 12" in error["message"]) == ("timeout_s", True, True)


def test_who_cannot_be_reached_is_a_fault() -> None:
    answer = CliRunner().invoke(make_app(["doctor"]), ["doctor", "--url", "http://127.0.0.1:9"])
    assert answer.exit_code == 2
    assert "fault gateway-unreachable: http://127.0.0.1:9: no cluster answers" in answer.output


@pytest.mark.parametrize(
    ("asked_s", "came_s", "ahead_s"),
    [(0.0, 0.1, 0.0), (0.9, 4.9, 0.0), (-1.5, 0.0, 0.0), (60.0, 60.5, -58.0), (-60.0, -59.5, 59.5), (4.5, 8.0, -2.5)],
)
def test_an_answer_that_took_long_says_nothing_of_the_clock(asked_s: float, came_s: float, ahead_s: float) -> None:
    answer = httpx.Response(200, headers={"date": formatdate(NOW, usegmt=True)})
    assert gather._ahead_s(answer, NOW + asked_s, NOW + came_s) == pytest.approx(ahead_s)
