"""`baton doctor` on real trouble: each fault is made as it happens to an operator, and is found by its name.

What cannot be had here (an old Redis, a slow network between hosts, a Ray without a node) is planted in what the rules
read: tests/unit/cluster/doctor.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from safetensors.torch import load_file, save_file

from cluster.cli.serve import DEMO
from cluster.doctor import gather
from cluster.doctor.gather import examine
from cluster.doctor.rules import findings
from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.model_backend import ModelSettings
from protos.model_files.digests import read_digests
from protos.model_files.opening import open_model
from protos.tls import FaceTls, PeerTls
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.dispatch import lane_probe
from router.fleet.member import WorkerState
from router.router_config import RouterConfig
from tests.cluster.redis_server import RedisServer
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.operating import operating
from tests.unit.router.scripted import make_gateway

pytestmark = pytest.mark.cluster


async def names(url: str, **options: Any) -> list[str]:
    """The findings at the URL, without this host's."""
    seen = await asyncio.to_thread(examine, url, **options)
    return [finding.name for finding in findings(replace(seen[0], host=None))]


@pytest.fixture
async def fleet() -> AsyncIterator[Cluster]:
    """Two workers over real gRPC that have the demo model's files."""
    digests = read_digests(open_model(DEMO["model"]))
    cluster = Cluster()
    await cluster.add("p0", "d0", digests=digests)
    cluster["d0"].cached = 10**6
    yield cluster
    await cluster.close()


@asynccontextmanager
async def gateway(fleet: Cluster, **changes: Any) -> AsyncIterator[str]:
    async with operating(fleet, **changes) as (client, _):
        yield str(client.base_url)


async def test_nothing_is_found_where_nothing_is_wrong(fleet: Cluster) -> None:
    async with gateway(fleet) as url:
        assert await names(url) == []


async def test_a_gateway_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert await names(f"http://127.0.0.1:{port}") == ["gateway-unreachable"]


async def test_a_gateway_that_wants_another_key(fleet: Cluster, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(f'admin_keys = ["{hash_of("sk-admin")}"]\n[tenants.a]\n')
    async with gateway(fleet, access=AccessControl(tmp_path / "tenants.toml")) as url:
        assert await names(url) == ["no-admin-key"]
        assert await names(url, api_key="sk-other") == ["no-admin-key"]
        assert await names(url, api_key="sk-admin") == []


async def test_a_fleet_without_workers() -> None:
    cluster = Cluster()
    async with gateway(cluster) as url:
        assert await names(url) == ["not-ready"]
    await cluster.close()


async def test_a_worker_that_died(fleet: Cluster) -> None:
    await fleet["p0"].die()
    await fleet.until_state("p0", WorkerState.LOST)
    async with gateway(fleet) as url:
        assert "worker-away" in await names(url)


async def test_a_certificate_for_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("gateway.example").configure_cert(shown)

    async def nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0, ssl=shown)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await names(f"https://127.0.0.1:{port}") == ["tls-name", "gateway-unreachable"]


async def test_wrong_clock_and_expiring_certificate_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is that of the doctor's host: the two are the same to it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    mine = authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=5))
    mine.private_key_pem.write_to_path(tmp_path / "key.pem")
    mine.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    server = GatewayServer(
        [ModelSettings(config=RouterConfig(model_path=Path(DEMO["model"]), model_name="demo", grpc_port=0))],
        socket.create_server(("127.0.0.1", 0)),
        tls=FaceTls(cert=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem")),
        peers=PeerTls(),
    )
    try:
        await server.start()
        assert sorted(await names(server.url)) == ["not-ready", "tls-expiry"]
        wrong = SimpleNamespace(time=lambda: time.time() + 60.0, monotonic=time.monotonic)
        monkeypatch.setattr(gather, "time", wrong)
        assert sorted(await names(server.url)) == ["clock-skew", "not-ready", "tls-expiry"]
    finally:
        await server.stop(0.0)


def trained_on(model: Path) -> None:
    """Every weight is another one, and nothing else."""
    path = model / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path, {"format": "pt"})


def other_tokens(model: Path) -> None:
    path = model / "tokenizer.json"
    state = json.loads(path.read_text())
    state["added_tokens"].append(state["added_tokens"][-1] | {"id": 4095, "content": "<another>"})
    path.write_text(json.dumps(state))


def other_template(model: Path) -> None:
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "{# mended upstream #}"
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "found"),
    [(trained_on, "model-differs"), (other_tokens, "tokenizer-differs"), (other_template, "template-differs")],
)
async def test_a_host_that_has_other_files_of_the_model(
    fleet: Cluster, tmp_path: Path, change: Callable[[Path], None], found: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO["model"], model)
    assert read_digests(open_model(model)) == read_digests(open_model(DEMO["model"])), "wherever it lies"
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert read_digests(open_model(model)) == read_digests(open_model(DEMO["model"])), "nobody reads the copy"
    change(model)
    digests = read_digests(open_model(model))
    await fleet.add("d1", digests=digests)
    async with gateway(fleet) as url:
        assert await names(url, probes=False) == [found]
    card = replace(make_gateway(fleet.router.dispatcher).card, digests=digests)
    await fleet["d1"].die()
    async with gateway(fleet, card=card) as url:
        assert found in await names(url, probes=False), "the gateway's files are others than the workers'"


async def test_a_port_that_a_firewall_closes(fleet: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    lane = replace(fleet["d0"].info().lane, worker_id="d1", port=port)
    await fleet.add("d1", lane=lane, digests=fleet["d0"].info().digests)
    async with gateway(fleet) as url:
        assert await names(url, probes=False) == ["port-closed"]


async def test_lanes_that_lose_kv_or_change_it(fleet: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(fleet) as url:
        fleet["d0"].pause_after = 0
        with monkeypatch.context() as impatient:
            impatient.setattr(lane_probe, "MOVE_TIMEOUT_S", 0.2)
            assert await names(url) == ["lane-silent"]
        fleet["d0"].pause_after = None
        fleet["d0"].go()
        fleet["d0"].token = lambda request, index: 7  # type: ignore[method-assign]
        assert await names(url) == ["lane-corrupt"]


async def test_redis_that_is_away_evicts_or_is_slow(fleet: Cluster, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    delays_s = [0.03]

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(4096):
                await asyncio.sleep(delays_s[-1])
                sink.write(data)
            sink.close()

        inner = await asyncio.open_connection("127.0.0.1", redis.port)
        await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))

    async with gateway(fleet) as url:
        assert await names(url, redis_url=redis.url, probes=False) == ["redis-unreachable"]
        redis.start()
        try:
            assert await names(url, redis_url=redis.url, probes=False) == []
            far = await asyncio.start_server(slowly, "127.0.0.1", 0)
            through = f"redis://127.0.0.1:{far.sockets[0].getsockname()[1]}"
            assert await names(url, redis_url=through, probes=False) == ["redis-slow"]
            delays_s.append(0.1)
            assert await names(url, redis_url=through, probes=False) == ["redis-slow"], "and not away"
            far.close()
            redis.pause()
            assert await names(url, redis_url=redis.url, probes=False) == ["redis-unreachable"]
            redis.resume()
            redis.stop()
            redis.add("--maxmemory-policy", "allkeys-lru")
            redis.start()
            assert await names(url, redis_url=redis.url, probes=False) == ["redis-eviction"]
        finally:
            redis.stop()


def may_mount() -> bool:
    command = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    return subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, check=False).returncode == 0


def doctor_after(shell: str, url: str) -> list[str]:
    """The names that `baton doctor` prints after this shell command."""
    program = f"{sys.executable} -c 'from cluster.entry import main; main()'"
    command = f"set -e; {shell}; exec {program} doctor --json --no-probe --url {url}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout, done.stderr
    return [finding["name"] for finding in json.loads(done.stdout)["findings"]]


@pytest.mark.skipif(not may_mount(), reason="a small /dev/shm is mounted in a namespace, which is not allowed here")
async def test_a_host_that_gives_too_little(fleet: Cluster) -> None:
    mount = "mount -t tmpfs -o size={} tmpfs /dev/shm"
    one_core = "taskset -pc $(taskset -pc $$ | sed 's/.*: //; s/[-,].*//') $$ >/dev/null"
    async with gateway(fleet) as url:
        for shell, expected in (
            (f"{mount.format('16m')}; ulimit -n 1024", ["shm-small", "open-files"]),
            (f"{mount.format('260m')}; fallocate -l 250M /dev/shm/psm_1", ["shm-full"]),
            (one_core, ["cores"]),
        ):
            assert await asyncio.to_thread(doctor_after, shell, url) == expected
