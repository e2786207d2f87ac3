"""Files, batches and the ledger on a disk that is full, that others read too, or that one tenant would fill."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.database.database import Database
from router.log_throttle import PERIOD_S
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import PriceList
from router.observe.ledger.request_ledger import RequestLedger
from tests.unit.router.batches.batching import batching, line
from tests.unit.router.scripted import Crew, Scripted, make_gateway, saying, serving


def resize(database: Database, num_pages: int) -> None:
    """The most pages that the database may have: with too few, SQLite says that the disk is full."""
    with database.reading() as transaction:
        transaction.run(f"PRAGMA max_page_count = {num_pages}")


async def upload(client: openai.AsyncOpenAI, num_lines: int = 1) -> str:
    content = b"\n".join(json.dumps(line(f"{number}")).encode() for number in range(num_lines))
    return (await client.files.create(file=("lines.jsonl", content), purpose="batch")).id


async def degraded(client: openai.AsyncOpenAI | httpx.AsyncClient) -> str:
    async with httpx.AsyncClient(base_url=str(client.base_url).removesuffix("v1/")) as http:
        return str((await http.get("/ready")).json()["degraded"])


async def until_degraded(client: openai.AsyncOpenAI | httpx.AsyncClient, what: str, *, is_set: bool) -> None:
    async with asyncio.timeout(PERIOD_S / 2):  # after PERIOD_S what is over is forgotten anyway
        while True:
            if (what in await degraded(client)) is is_set:
                return
            await asyncio.sleep(0.05)


async def test_an_upload_without_room_for_it_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    async with batching(tmp_path / "batches", runs=False) as (client, _):
        with pytest.raises(openai.InternalServerError) as refused:
            await client.files.create(file=("f", b"x" * ((1 << 20) + 1)), purpose="batch")
        assert refused.value.status_code == 503


async def test_batches_survive_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = saying("x " * 200)
    async with batching(tmp_path, long, runs=False) as (client, made):
        file_id = await upload(client, 60)
        batch = await client.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        resize(made.storage.database, 1)
        made.run()
        await until_degraded(client, "batches: ", is_set=True)
        for _ in range(5):  # it is claimed, fails, and waits for the end of its lease
            made.clock.now_s += 31.0
            made.storage.changed.set()
            await asyncio.sleep(0.05)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 3
        resize(made.storage.database, 1_000_000)
        await upload(client)  # something can be written, and the batch still waits
        await until_degraded(client, "batches: ", is_set=False)
        async with asyncio.timeout(60):
            while batch.status != "completed":
                made.clock.now_s += 31.0
                batch = await client.batches.retrieve(batch.id)
                await asyncio.sleep(0.05)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 60


async def test_a_ledger_on_a_full_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = ledger_database(tmp_path / "ledger.db")
    resize(database, 1)
    store = LedgerStore(database)
    ledger = RequestLedger(store, PriceList(), Crew(), model="tiny")
    try:
        async with (
            serving(make_gateway(Scripted(saying("hi")), ledger=ledger)) as url,
            httpx.AsyncClient(base_url=url) as http,
        ):
            body = {"model": "tiny", "prompt": "hello"}
            for _ in range(200):  # rows of more than a page
                assert (await http.post("/v1/completions", json=body)).status_code == 200
            await until_degraded(http, "ledger: ", is_set=True)
            assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 3
            resize(database, 1_000_000)
            await until_degraded(http, "ledger: ", is_set=False)
    finally:
        store.close()
    assert store.outcomes["written"] == 200


def modes_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mode & 0o777 for path in folder.rglob("*")}


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
async def test_nobody_else_on_the_host_reads_files_and_databases(tmp_path: Path) -> None:
    ledger_database(tmp_path / "ledger.db").close()
    async with batching(tmp_path / "new" / "batches", runs=False) as (client, _):
        await upload(client)
        modes = modes_below(tmp_path)
    assert len(modes) >= 6
    del modes[tmp_path / "new"]  # the folder that was named is in it
    assert {path.name: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}


async def test_a_tenants_quota_bounds_its_files(tmp_path: Path) -> None:
    size = len(json.dumps(line("0")))
    async with batching(tmp_path, runs=False, max_tenant_bytes=2 * size) as (client, _):
        first, _ = await upload(client), await upload(client)
        with pytest.raises(openai.APIStatusError) as refused:
            await upload(client)
        error: Any = refused.value.body
        assert (refused.value.status_code, error["code"], error["param"]) == (413, "payload_too_large", "file")
        assert len(list((tmp_path / "files").iterdir())) == 2
        await client.files.delete(first)
        await upload(client)
