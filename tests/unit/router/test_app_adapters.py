"""LoRA adapters as models of every API: named in requests and answers, and kept apart in every cache."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtransfer.hashing import salted
from protos.values import Adapter
from router.jobs import Job
from router.observe.ledger.ledger_report import sums
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import Price, PriceList
from router.observe.ledger.request_ledger import RequestLedger
from tests.unit.router.scripted import Crew, Scripted, make_gateway, saying, serving

SQL = Adapter(adapter_id="ab" * 16, name="sql", path="/adapters/sql", rank=8, num_bytes=4096)
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "responses": ("/v1/responses", {"input": "hello"}),
    "anthropic": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    "ollama": ("/api/chat", {"messages": MESSAGES, "stream": False}),
    "ollama-generate": ("/api/generate", {"prompt": "hello", "stream": False}),
}


@pytest.mark.parametrize("face", REQUESTS)
async def test_every_api_serves_an_adapter_by_its_name(face: str) -> None:
    path, body = REQUESTS[face]
    jobs: list[Job] = []
    script = saying("hi")
    generate = Scripted(lambda job: (jobs.append(job), script(job))[1])
    crew = Crew()
    crew.loaded_adapters["sql"] = SQL
    async with serving(make_gateway(generate, fleet=crew)) as url, httpx.AsyncClient(base_url=url) as client:
        for name in ("sql", "tiny"):
            reply = await client.post(path, json={"model": name} | body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == name
        missing = await client.post(path, json={"model": "mysql"} | body)
    assert missing.status_code == 404
    assert "this server serves 'tiny', 'sql'" in missing.text
    adapted, base = jobs
    assert (adapted.adapter, base.adapter) == (SQL.adapter_id, "")
    assert adapted.prompt_ids == base.prompt_ids
    assert (base.cache_salt, adapted.cache_salt) == (b"", salted(b"", SQL.adapter_id.encode()))


async def test_models_lists_adapters_with_their_parent() -> None:
    crew = Crew()
    crew.loaded_adapters["sql"] = SQL
    async with (
        serving(make_gateway(Scripted(saying("hi")), fleet=crew)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        models = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"], model["root"]) for model in models] == [
            ("tiny", None, "tiny"),
            ("sql", "tiny", "tiny"),
        ]
        assert (await client.get("/v1/models/sql")).json() == models[1]
        tags = (await client.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == ["tiny", "sql"]
        crew.loaded_adapters.clear()
        assert (await client.get("/v1/models/sql")).status_code == 404


async def test_an_administrator_loads_lists_and_unloads() -> None:
    crew = Crew()
    async with (
        serving(make_gateway(Scripted(saying("hi")), fleet=crew)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        loaded = await client.post("/admin/adapters", json={"name": "sql", "path": "/adapters/sql"})
        assert loaded.json() == {"name": "sql", "done": ["w0"], "failed": {"w1": "its disk is full"}}
        assert (await client.get("/v1/models/sql")).status_code == 200
        assert (await client.get("/admin/adapters")).json() == {"adapters": []}
        assert (await client.post("/admin/adapters", json={"name": "sql"})).json()["error"]["param"] == "path"
        assert (await client.delete("/admin/adapters/sql")).json()["done"] == ["w0"]
        assert (await client.delete("/admin/adapters/sql")).status_code == 404


async def test_the_ledger_charges_an_adapter_like_its_model(tmp_path: Path) -> None:
    crew = Crew()
    crew.loaded_adapters["sql"] = SQL
    usd = {"input": 1e6, "cached": 1e6, "output": 1e6}
    prices = PriceList(prices=(Price(since_s=0.0, model="tiny", usd=usd),))
    ledger = RequestLedger(LedgerStore(ledger_database(tmp_path / "ledger.db")), prices, crew, model="tiny")
    gateway = make_gateway(Scripted(saying("hi")), fleet=crew, ledger=ledger)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url) as client:
        for name in ("sql", "tiny"):
            await client.post("/v1/completions", json={"model": name, "prompt": "hello"})
    ledger.close()
    with closing(ledger_database(tmp_path / "ledger.db")) as database:
        rows = sums(database, since_s=0, until_s=10**11, by=["model"])
    assert [(row.group["model"], row.requests) for row in rows] == [("sql", 1), ("tiny", 1)]
    assert rows[0].charged_usd == rows[1].charged_usd > 0
