"""Ledger, files and batches are backed up while they are written, and a new gateway continues with the copy."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.model_backend import ModelSettings
from protos.tls import FaceTls, PeerTls
from router.database.database import Database
from router.files.batch_storage import CONTENTS, DATABASE
from router.observe.ledger.ledger_report import sums
from router.observe.ledger.ledger_tables import ledger_database
from router.router_config import BatchConfig, LedgerConfig, RouterConfig
from tests.cluster.deployed import DEMO
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, Slow, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

NUM_LINES, NUM_CLIENTS = 60, 3
ASKED = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}


@dataclass
class Place:
    """Where a gateway keeps its rows and contents: a folder, or a database of a Postgres."""

    folder: Path
    url: str

    def config(self) -> RouterConfig:
        ledger, batches = ("", "") if self.url else (str(self.folder / "ledger.db"), str(self.folder / "batches"))
        return RouterConfig(
            model_path=DEMO, model_name="demo", grpc_port=0, database=self.url, ledger=LedgerConfig(path=ledger),
            batch=BatchConfig(folder=batches, lease_s=5.0),
        )  # fmt: skip

    def back_up(self, to: Place) -> None:
        """Copies rows before contents, like docs/operating.md."""
        if self.url:
            dumped = subprocess.run(["pg_dump", "--schema=baton", self.url], check=True, capture_output=True).stdout
            subprocess.run(
                ["psql", "--quiet", "-v", "ON_ERROR_STOP=1", to.url],
                input=dumped,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            return
        for name in ("ledger.db", f"batches/{DATABASE}"):
            (to.folder / name).parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.folder / name)) as database:
                database.execute("VACUUM INTO ?", (str(to.folder / name),))
        shutil.copytree(self.folder / "batches" / CONTENTS, to.folder / "batches" / CONTENTS)

    def outcomes(self) -> dict[str, int]:
        """Requests by outcome, from the sums and row by row, while no row is added."""
        with closing(ledger_database(self.url or self.folder / "ledger.db")) as ledger:
            while True:
                before = _by_outcome(ledger)
                counted = {
                    row.group["outcome"]: row.requests
                    for row in sums(ledger, since_s=0, until_s=10**11, by=("outcome",))
                }
                if before == _by_outcome(ledger):
                    assert counted == before
                    return counted


def _by_outcome(ledger: Database) -> dict[str, int]:
    with ledger.reading() as transaction:
        rows = transaction.run("SELECT outcome, count(*) AS num FROM requests GROUP BY outcome")
    return {row["outcome"]: row["num"] for row in rows}


@pytest.fixture
def places(database_url: str, tmp_path: Path) -> tuple[Place, Place]:
    urls = ("", "")
    if database_url:
        other = database_url.replace("/postgres?", "/restored?")
        for statement in ("DROP DATABASE IF EXISTS restored", "CREATE DATABASE restored"):
            subprocess.run(["psql", "--quiet", "-c", statement, database_url], check=True, stderr=subprocess.DEVNULL)
        urls = (database_url, other)
    first, second = (Place(tmp_path / name, url) for name, url in zip(("here", "restored"), urls, strict=True))
    for place in (first, second):
        place.folder.mkdir()
    return first, second


@asynccontextmanager
async def gateway(place: Place, address: str) -> AsyncIterator[httpx.AsyncClient]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = GatewayServer([ModelSettings(config=place.config())], listening, tls=FaceTls(), peers=PeerTls())
    try:
        await server.start()
        server.fleet.add_worker(address, worker_id="w")
        await server.ready()
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
            yield client
    finally:
        await server.stop(0.0)


async def created(client: httpx.AsyncClient) -> str:
    line = {"method": "POST", "url": "/v1/completions", "body": ASKED | {"max_tokens": 24}}
    content = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(NUM_LINES))
    file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)})
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str((await client.post("/v1/batches", json=body)).json()["id"])


async def until(client: httpx.AsyncClient, batch_id: str, least: int, status: str = "") -> dict[str, Any]:
    while True:
        batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).json()
        assert not batch["errors"], batch
        if batch["status"] == (status or batch["status"]) and batch["request_counts"]["completed"] >= least:
            return batch
        await asyncio.sleep(0.01)


async def counted(place: Place, least: int) -> int:
    """Its rows are written behind the answers."""
    while True:
        if (count := sum(place.outcomes().values())) >= least:
            return count
        await asyncio.sleep(0.01)


async def results(client: httpx.AsyncClient, batch: dict[str, Any]) -> set[str]:
    text = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text
    return {json.loads(line)["custom_id"] for line in text.splitlines()}


async def test_a_copy_made_under_load_is_served_by_a_new_gateway(
    places: tuple[Place, Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of rows on their way to Postgres
    here, there = places
    worker = Worker(parts_of(Slow(ToyRunner(WEIGHT, BLOCK, VOCAB))))
    address = (await worker.start("127.0.0.1")).address
    num_answers, lines = 0, {str(number) for number in range(NUM_LINES)}

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal num_answers
        while True:
            (await client.post("/v1/completions", json=ASKED)).raise_for_status()
            num_answers += 1

    try:
        async with gateway(here, address) as client:
            done = await until(client, await created(client), NUM_LINES, "completed")
            asking = [asyncio.create_task(ask(client)) for _ in range(NUM_CLIENTS)]
            running = await until(client, await created(client), 1)
            least = await counted(here, NUM_LINES + 10)
            await asyncio.to_thread(here.back_up, there)
            most = num_answers + NUM_CLIENTS + 2 * NUM_LINES
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
        copied = there.outcomes()
        assert least <= sum(copied.values()) <= most
        assert copied.keys() == {"ok"}
        async with gateway(there, address) as client:
            assert (await client.get(f"/v1/batches/{done['id']}")).json() == done
            assert await results(client, done) == lines
            ended = await until(client, running["id"], NUM_LINES, "completed")
            assert await results(client, ended) == lines
            await client.post("/v1/completions", json=ASKED)
        assert there.outcomes()["ok"] > sum(copied.values())
    finally:
        await worker.stop()
