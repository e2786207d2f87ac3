"""A running cluster is upgraded in the order of docs/upgrading.md: no stream is dropped, no text differs."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from operator import attrgetter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import make_app
from deploy.dist import PACKAGES
from protos.release import VERSION, WIRE
from router.observe.ledger.ledger_report import sums
from router.observe.ledger.ledger_tables import ledger_database
from tests.cluster.deployed import DEMO, PRECISE, Deployed
from tests.cluster.redis_server import RedisServer
from tests.cluster.test_rollout import NUM_STREAMS, RolloutStreams, Service, all_run, asking

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
LATER = f"{VERSION}.later"
NUM_TOKENS, NUM_LINES = 48, 20
MANY = NUM_STREAMS // 2  # streams under way: some clients are always between two of them
WORKERS = ("prefill-0", "decode-0", "decode-1")
MODEL = (
    "--model",
    str(DEMO),
    "--served-name",
    "demo",
    "--set",
    "peers.token=from-0.1.0-to-later",
    "--set",
    "supervision.grace_s=300",
)
LINE = {"method": "POST", "url": "/v1/completions"}


def copied(root: Path, wire: int = WIRE) -> Sequence[str]:
    """Copies Baton as a later version. Returns the command in which Python finds it."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "eagle3", "medusa")
        )
    release = root / "protos" / "release.py"
    text = release.read_text(encoding="utf-8").replace(f'VERSION = "{VERSION}"', f'VERSION = "{LATER}"')
    release.write_text(text.replace(f"WIRE = {WIRE}", f"WIRE = {wire}"), encoding="utf-8")
    return "env", "-C", str(root), f"PYTHONPATH={root}"


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    return copied(tmp_path_factory.mktemp("later"))


class Site:
    """Processes of a cluster: three workers at fixed addresses; gateways that share Redis, ledger and batches."""

    def __init__(self, folder: Path, redis: str) -> None:
        self.folder, self.redis = folder, redis
        self.addresses = {worker_id: f"127.0.0.1:{port}" for worker_id, port in zip(WORKERS, _ports(), strict=True)}
        self.processes: list[Deployed] = []

    def worker(self, worker_id: str, before: Sequence[str] = ()) -> Deployed:
        port = self.addresses[worker_id].rpartition(":")[2]
        role = ("--role", worker_id.partition("-")[0], "--id", worker_id, "--port", port)
        return self._started("worker", *role, *PRECISE, "--set", "worker.num_blocks=2000", before=before)

    def gateway(self, before: Sequence[str] = (), *, finds: Sequence[str] = ()) -> Deployed:
        workers = tuple(word for address in self.addresses.values() for word in ("--worker", address))
        kept = f"router.ledger.path={self.folder / 'ledger.db'}", f"router.batch.folder={self.folder / 'batches'}"
        return self._started(
            "gateway", "--port", "0", "--grpc-port", "0", "--index", self.redis, *(finds or workers),
            *(word for setting in kept for word in ("--set", setting)), before=before,
        )  # fmt: skip

    def pools(self, before: Sequence[str] = ()) -> Deployed:
        size = ("--prefill", "1", "--decode", "2", "--discovery", self.redis, "--set", "worker.num_blocks=2000")
        return self._started("pools", *size, *PRECISE, "--set", "supervision.orphan_timeout_s=300", before=before)

    def _started(self, verb: str, *arguments: str, before: Sequence[str]) -> Deployed:
        self.processes.append(Deployed(verb, *MODEL, *arguments, before=before))
        return self.processes[-1]


def _ports() -> list[int]:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in WORKERS]
    ports = [one.getsockname()[1] for one in listening]
    for one in listening:
        one.close()
    return ports


@pytest.fixture
def site(tmp_path: Path, redis: RedisServer) -> Iterator[Site]:
    made = Site(tmp_path, redis.url)
    yield made
    for process in made.processes:
        process.kill()


async def ready(gateway: Deployed, versions: dict[str, str]) -> str:
    """The gateway's address when all workers serve, each with the expected version."""
    url = await asyncio.to_thread(lambda: gateway.url)
    async with asking(url) as client, asyncio.timeout(300):
        while True:
            workers = (await client.get("/admin/status")).json()["workers"]
            serving = {one["worker_id"]: one["info"]["version"] for one in workers if one["state"] == "ready"}
            if serving == versions:
                return url
            await asyncio.sleep(0.05)


async def created_batch(url: str) -> str:
    lines = [
        {"custom_id": str(number), **LINE, "body": {"model": "demo", "prompt": [number, 7], "max_tokens": 4}}
        for number in range(NUM_LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    async with asking(url) as client:
        file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)})
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str((await client.post("/v1/batches", json=body)).json()["id"])


async def ended_batch(url: str, batch_id: str) -> dict[str, int]:
    async with asking(url) as client, asyncio.timeout(300):
        while True:
            batch = (await client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] == "completed":
                return dict(batch["request_counts"])
            await asyncio.sleep(0.05)


@asynccontextmanager
async def streaming(service: Service) -> AsyncIterator[RolloutStreams]:
    """Runs clients until the block ends; no stream may be dropped, and each text must be that of an undisturbed one."""
    over, alone, streams = asyncio.Event(), *(RolloutStreams(service, NUM_TOKENS) for _ in range(2))
    over.set()
    await asyncio.gather(*(alone.run(number, over) for number in range(NUM_STREAMS)))
    over.clear()
    clients = [asyncio.create_task(streams.run(number, over)) for number in range(NUM_STREAMS)]
    try:
        yield streams
        over.set()
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
    assert streams.dropped == []
    assert streams.texts == alone.texts


async def test_gateways_and_then_workers_are_replaced(site: Site, later: Sequence[str]) -> None:
    workers = {worker_id: site.worker(worker_id) for worker_id in WORKERS}
    gateways, versions, service = [site.gateway(), site.gateway()], dict.fromkeys(WORKERS, VERSION), Service()
    for gateway in gateways:
        service.add(await ready(gateway, versions))
    batch_id = await created_batch(gateways[0].url)
    async with streaming(service) as streams:
        for place, old in enumerate(gateways):
            new = site.gateway(later)
            service.add(await ready(new, versions))
            await all_run(*(one.url for one in (*gateways, new)), least=MANY)
            service.remove(old.url)
            await streams.answered(old.url)
            old.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(old.ended, timeout_s=400.0) == 0, old.log
            gateways[place] = new
        for worker_id, old in workers.items():
            await all_run(*(gateway.url for gateway in gateways), least=MANY)
            old.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(old.ended, timeout_s=400.0) == 0, old.log
            site.worker(worker_id, later)
            versions[worker_id] = LATER
            for gateway in gateways:
                await ready(gateway, versions)
    assert await ended_batch(gateways[1].url, batch_id) == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    for gateway in gateways:
        assert await asyncio.to_thread(gateway.stop, signal.SIGTERM) == 0
    with closing(ledger_database(site.folder / "ledger.db")) as ledger:
        counted = sums(ledger, since_s=0, until_s=10**11, by=("outcome",))
    assert {row.group["outcome"]: row.requests for row in counted} == {
        "ok": NUM_STREAMS + streams.num_whole + NUM_LINES
    }


async def test_the_workers_of_a_host_are_replaced_by_a_later_supervisor(site: Site, later: Sequence[str]) -> None:
    versions, service = dict.fromkeys(WORKERS, VERSION), Service()
    old, gateway = site.pools(), site.gateway(later, finds=("--discovery", site.redis))
    service.add(url := await ready(gateway, versions))
    async with streaming(service):
        await all_run(url, least=MANY)
        old.process.kill()  # its workers serve on
        new = site.pools(later)
        await asyncio.to_thread(new.wait_for, "^serving with 3 workers")
        await ready(gateway, versions)
        for worker_id in WORKERS:
            drain = ("drain", worker_id, "--replaced", "--url", url)
            assert (await asyncio.to_thread(CliRunner().invoke, make_app(drain), drain)).exit_code == 0
            versions[worker_id] = LATER
            await ready(gateway, versions)
    assert await asyncio.to_thread(new.stop) == 0, new.log


async def test_each_gateway_serves_the_workers_of_its_wire(site: Site, tmp_path: Path) -> None:
    other = copied(tmp_path / "other", WIRE + 1)
    site.worker("decode-0")
    site.worker("decode-1", other)
    for gateway, own, foreign in ((site.gateway(), 0, 1), (site.gateway(other), 1, 0)):
        url = await asyncio.to_thread(attrgetter("url"), gateway)
        async with asking(url) as client, asyncio.timeout(300):
            states: dict[str, str] = {}
            while states != {f"decode-{own}": "ready", f"decode-{foreign}": "incompatible"}:
                workers = (await client.get("/admin/status")).json()["workers"]
                states = {one["worker_id"]: one["state"] for one in workers if "decode" in one["worker_id"]}
            degraded = (await client.get("/ready")).json()["degraded"]
            assert VERSION in degraded
            assert LATER in degraded
            body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0.0}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
