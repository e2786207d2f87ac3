"""A gateway that keeps a ledger: what clients received is what is in it, and administrators can read it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from cluster.cli.main import make_app
from cluster.cli.serve import DEMO
from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.model_backend import ModelSettings
from protos.errors import Misconfigured
from protos.tls import FaceTls, PeerTls
from router.auth.tenants import hash_of
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.router_config import LedgerConfig, RouterConfig
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, parts_of
from tests.contract.test_ledger_store import ROW
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

ADMIN, KEY, OTHER = "sk-baton-admin", "sk-baton-acme", "sk-baton-other"
ASKED = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
PRICES = "device_hour = 36.0\n[[price]]\nsince = 2020-01-01\ninput = 1000\ncached = 10\noutput = 2000\n"


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[GatewayServer]:
    tables = "".join(
        f'[tenants.{name}]\nkeys = ["{hash_of(key)}"]\n' for name, key in (("acme", KEY), ("other", OTHER))
    )
    (tmp_path / "tenants.toml").write_text(f'admin_keys = ["{hash_of(ADMIN)}"]\n{tables}')
    (tmp_path / "prices.toml").write_text(PRICES)
    listening = socket.create_server(("127.0.0.1", 0))
    config = RouterConfig(
        model_path=Path(DEMO["model"]), model_name="demo", grpc_port=0, tenants=str(tmp_path / "tenants.toml"),
        ledger=LedgerConfig(path=str(tmp_path / "ledger.db"), prices=str(tmp_path / "prices.toml")),
    )  # fmt: skip
    worker = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    info = await worker.start("127.0.0.1", peers=PeerTls())
    server = GatewayServer([ModelSettings(config=config)], listening, tls=FaceTls(), peers=PeerTls())
    try:
        await server.start()
        server.fleet.add_worker(info.address, worker_id="w")
        await server.ready()
        yield server
    finally:
        await server.stop(0.0)
        await worker.stop()


def client(front: GatewayServer, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=front.url, headers={"authorization": f"Bearer {key}"})


async def rows(front: GatewayServer, count: int, by: str = "tenant") -> dict[str, Any]:
    """The report once it has so many requests and the fleet's devices: they are written behind the answers."""
    async with client(front, ADMIN) as admin:
        while True:
            report: dict[str, Any] = (await admin.get(f"/admin/costs?by={by}")).json()
            if sum(row["requests"] for row in report["rows"]) >= count and report["fleet_usd"]:
                return report


async def test_the_ledger_equals_the_clients_tokens(front: GatewayServer) -> None:
    received = dict.fromkeys(("prompt_tokens", "completion_tokens"), 0)
    async with client(front, KEY) as acme, client(front, OTHER) as other:
        for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            answer = await acme.post("/v1/completions", json=ASKED | {"n": 2} | options)
            last = answer.text.strip().split("\n\n")[-2].removeprefix("data: ") if options else answer.text
            for name in received:
                received[name] += json.loads(last)["usage"][name]
        async with other.stream("POST", "/v1/completions", json=ASKED | {"max_tokens": 400, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break  # and hangs up
    report = await rows(front, 3)
    acme_row, other_row = report["rows"]
    assert (acme_row["group"], acme_row["requests"]) == ({"tenant": "acme"}, 2)
    assert acme_row["input_tokens"] + acme_row["cached_tokens"] == received["prompt_tokens"]
    assert acme_row["output_tokens"] == received["completion_tokens"] == 16
    expected = 1000 * acme_row["input_tokens"] + 10 * acme_row["cached_tokens"] + 2000 * acme_row["output_tokens"]
    assert acme_row["charged_usd"] == pytest.approx(expected / 1e6)
    by_kind = (await rows(front, 3, "tenant,kind"))["rows"]
    kinds = {row["group"]["kind"]: row for row in by_kind if row["group"]["tenant"] == "acme"}
    assert list(kinds) == ["input", "cached", "output"]
    assert [kinds[kind][f"{kind}_tokens"] for kind in kinds] == [acme_row[f"{kind}_tokens"] for kind in kinds]
    for name in ("charged_usd", "cost_usd"):
        assert sum(row[name] for row in kinds.values()) == pytest.approx(acme_row[name])
    assert kinds["output"]["charged_usd"] == pytest.approx(2000 * acme_row["output_tokens"] / 1e6)
    assert other_row["requests"] == 1
    assert 0 < other_row["output_tokens"] <= 400
    assert report["fleet_usd"] >= report["idle_usd"] > 0
    by_key = await rows(front, 3, "key_id,outcome")
    assert {row["group"]["key_id"] for row in by_key["rows"]} == {hash_of(key)[:19] for key in (KEY, OTHER)}


async def test_openais_client_reads_usage_and_costs(front: GatewayServer) -> None:
    async with client(front, KEY) as acme:
        await acme.post("/v1/completions", json=ASKED)
        await acme.post("/v1/embeddings", json={"model": "demo", "input": ["Hello", "Good evening"]})  # no vectors here
    report = await rows(front, 2, "endpoint")
    [vectors] = [row for row in report["rows"] if row["group"] == {"endpoint": "embeddings"}]
    sdk = openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=ADMIN, admin_api_key=ADMIN, max_retries=0)
    usage = await sdk.admin.organization.usage.completions(start_time=1_700_000_000, limit=1)
    assert usage.has_more
    bucket_start = int(time.time()) // 86_400 * 86_400
    usage = await sdk.admin.organization.usage.completions(start_time=bucket_start, group_by=["project_id", "model"])
    [result] = usage.data[0].results
    assert (result.project_id, result.model, result.num_model_requests) == ("acme", "demo", 1)  # type: ignore[union-attr]
    vector_usage = await sdk.admin.organization.usage.embeddings(start_time=bucket_start, group_by=["project_id"])
    [vector_result] = vector_usage.data[0].results
    assert (vector_result.project_id, vector_result.num_model_requests) == ("acme", 1)  # type: ignore[union-attr]
    assert vector_result.input_tokens == vectors["input_tokens"] + vectors["cached_tokens"] > 0  # type: ignore[union-attr]
    costs = await sdk.admin.organization.usage.costs(start_time=bucket_start)
    assert costs.data[0].results[0].amount.value == pytest.approx(0.011 + vectors["charged_usd"])  # type: ignore[union-attr]
    costs = await sdk.admin.organization.usage.costs(start_time=bucket_start, group_by=["line_item"])
    assert costs.data[0].end_time == bucket_start + 86_400, "a bucket that is not over is a whole one"
    items: dict[str, Any] = {result.line_item or "": result for result in costs.data[0].results}  # type: ignore[union-attr]
    assert list(items) == ["demo, input", "demo, cached", "demo, output"]
    assert (items["demo, output"].quantity, items["demo, output"].amount.value) == (4.0, pytest.approx(0.008))
    await sdk.close()


async def test_a_budget_is_noticed_then_refused(front: GatewayServer, tmp_path: Path) -> None:
    roster = (tmp_path / "tenants.toml").read_text()
    acme = f'keys = ["{hash_of(KEY)}"]\nsoft_budget_usd = 0.005\nhard_budget_usd = 0.02\n'
    (tmp_path / "tenants.toml").write_text(roster.replace(f'keys = ["{hash_of(KEY)}"]\n', acme))
    async with client(front, KEY) as caller:
        front._access._looked_s = float("-inf")  # as if two seconds had passed
        first = await caller.post("/v1/completions", json=ASKED)
        assert (first.status_code, first.headers.get("x-baton-budget")) == (200, None)
        second = await caller.post("/v1/completions", json=ASKED)
        assert second.status_code == 200
        assert re.fullmatch(r"spent 0\.0110 of 0\.00500 USD until 20\d\d-\d\d-01", second.headers["x-baton-budget"])
        third = await caller.post("/v1/completions", json=ASKED)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "insufficient_quota")
        message = third.json()["error"]["message"]
        assert re.search(r"has spent 0\.02[12]\d USD of its budget of 0\.0200 USD a month", message), message
        assert third.headers["x-should-retry"] == "false"
    async with client(front, OTHER) as other, httpx.AsyncClient(base_url=front.url) as anyone:
        assert (await other.post("/v1/completions", json=ASKED)).status_code == 200
        shown = (await anyone.get("/metrics")).text
    assert 'baton_tenant_budget_usd{kind="hard",tenant="acme"} 0.02' in shown
    [budget] = (await rows(front, 3))["budgets"]
    assert (budget["tenant"], budget["spent_usd"]) == ("acme", pytest.approx(0.0211, abs=0.002))


async def test_budgets_without_prices_are_refused(front: GatewayServer, tmp_path: Path) -> None:
    roster = (tmp_path / "tenants.toml").read_text()
    (tmp_path / "tenants.toml").write_text(roster.replace("[tenants.acme]\n", "[tenants.acme]\nhard_budget_usd = 1\n"))
    config = RouterConfig(model_path=Path(DEMO["model"]), model_name="demo", tenants=str(tmp_path / "tenants.toml"))
    with socket.socket() as unused, pytest.raises(Misconfigured, match="no ledger with prices"):
        GatewayServer([ModelSettings(config=config)], unused, tls=FaceTls(), peers=PeerTls())


async def test_only_administrators_read_it(front: GatewayServer) -> None:
    for path in (
        "/admin/costs",
        "/v1/organization/usage/completions?start_time=1",
        "/v1/organization/costs?start_time=1",
    ):
        async with client(front, KEY) as tenant, httpx.AsyncClient(base_url=front.url) as anyone:
            assert (await tenant.get(path)).status_code == 403, path
            assert (await anyone.get(path)).status_code == 401, path
    async with client(front, ADMIN) as admin:
        for path, param in {
            "/admin/costs?since=tomorrow": "since",
            "/admin/costs?by=secret": "by",
            "/v1/organization/costs": "start_time",
            "/v1/organization/costs?start_time=1&end_time=": "end_time",
            "/v1/organization/costs?start_time=1&page=": "page",
            "/v1/organization/costs?start_time=1&bucket_width=1y": "bucket_width",
            "/v1/organization/usage/completions?start_time=1&limit=99": "limit",
            "/v1/organization/usage/completions?start_time=1&group_by=x": "group_by[0]",
        }.items():
            answer = await admin.get(path)
            assert answer.status_code == 400, path
            assert answer.json()["error"]["param"] == param


async def test_the_commands_show_it(front: GatewayServer) -> None:
    async with client(front, KEY) as acme:
        await acme.post("/v1/completions", json=ASKED)
    await rows(front, 1)

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(make_app(arguments), [*arguments, "--url", front.url, "--api-key", ADMIN])
        assert done.exit_code == 0, done.output
        return done.output

    usage = await asyncio.to_thread(run, "usage", "--by", "tenant,model", "--csv")
    assert usage.splitlines() == [
        "tenant,model,requests,computed,cached,output,reasoning", "acme,demo,1,3,0,4,0"
    ]  # fmt: skip
    wrong = CliRunner().invoke(make_app(["usage"]), ["usage", "--by", "tenant,foo"])
    assert "--by foo: give some of tenant, key_id" in str(wrong.exception)
    before = await asyncio.to_thread(run, "usage", "--since", "7d", "--until", "1d")
    assert "no request in this time" in before
    backwards = CliRunner().invoke(make_app(["usage"]), ["usage", "--since", "1d", "--until", "2d"])
    assert "--until 2d is not after --since 1d" in str(backwards.exception)
    costs = await asyncio.to_thread(run, "costs", "--since", "7d")
    assert "0.011000" in costs
    assert "(idle)" in costs
    assert max(map(len, costs.splitlines())) <= 80
    narrow = await asyncio.to_thread(run, "costs", "--by", "tenant,key_id,model,endpoint")
    assert "a wider terminal, or --csv, also shows" in narrow
    assert "device hours at 36 USD" in costs


async def test_a_report_of_old_times_is_widened_to_hours(front: GatewayServer, tmp_path: Path) -> None:
    store = LedgerStore(ledger_database(tmp_path / "ledger.db"))
    store.write(replace(ROW, at_s=time.time() - 10 * 86_400))
    await asyncio.to_thread(store.close)
    store = LedgerStore(ledger_database(tmp_path / "ledger.db"), keep_days=2)
    assert store.delete_old() == 1
    await asyncio.to_thread(store.close)
    arguments = ["usage", "--since", "15d", "--csv", "--url", front.url, "--api-key", ADMIN]
    done = await asyncio.to_thread(CliRunner().invoke, make_app(["usage"]), arguments)
    assert re.match(r"since [-0-9]+ \d\d:00 UTC: before [-0-9]+ whole hours are kept\n", done.stderr)
    assert done.stdout.splitlines()[1] == "acme,1,100,50,20,5"
    recent = await asyncio.to_thread(
        CliRunner().invoke, make_app(["usage"]), ["usage", "--since", "1d", *arguments[3:]]
    )
    assert recent.stderr == ""
