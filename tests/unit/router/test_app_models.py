"""Several models behind one address: requests go to the model that they name, and each has its own application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cluster.cli.admin_client import open_client, request_json
from cluster.doctor.doctor_verb import summary
from cluster.doctor.gather import examine
from cluster.doctor.rules import findings
from protos.errors import Misconfigured, NotFound, UnknownModel
from protos.values import Adapter
from router.app import beside_each_other, create_models_app, front_of
from router.batches.batch_routes import model_of
from router.gateway import Gateway
from router.request_metrics import RequestMetrics
from router.router_metrics import ModelsCollector
from tests.unit.router.scripted import Crew, Scripted, Worker, make_gateway, saying, serving_app, with_card
from tests.unit.router.test_app_adapters import MESSAGES, REQUESTS

SQL = Adapter(adapter_id="ab" * 16, name="sql", path="/adapters/sql", rank=8, num_bytes=4096)


def model(name: str, says: str, **given: Any) -> tuple[Gateway, Crew]:
    crew = Crew(Worker(worker_id=f"{name}-decode-0"))
    made = make_gateway(Scripted(saying(says)), fleet=crew)
    aliases = given.pop("model_aliases", ())
    made = with_card(made, name=name, aliases=aliases, max_model_len=32 if name == "small" else 64)
    return replace(made, metrics=RequestMetrics(model=name), **given), crew


@asynccontextmanager
async def two(*gateways: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(ModelsCollector({gateway.card.name: gateway.metrics.registry for gateway in gateways}))
    async with (
        serving_app(create_models_app(gateways, registry)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield client


@pytest.mark.parametrize("face", REQUESTS)
async def test_every_api_serves_the_model_that_is_named(face: str) -> None:
    path, body = REQUESTS[face]
    (big, _), (small, _) = model("big", "hello"), model("small", "the")
    async with two(big, small) as client:
        for name, said in (("big", "hello"), ("small", "the")):
            reply = await client.post(path, json={"model": name} | body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == name
            assert said in reply.text
        missing = await client.post(path, json={"model": "none"} | body)
        assert missing.status_code == 404
        assert "this server serves 'big', 'small'" in missing.text


@pytest.mark.parametrize("root", ["", "/models/big", "/models/small"])
async def test_an_adapter_gets_no_name_that_another_model_has(root: str) -> None:
    (big, of_big), (small, of_small) = model("big", "hello", model_aliases=("gpt", "llama-*")), model("small", "the")
    (of_big if root == "/models/small" else of_small).loaded_adapters["sql"] = SQL
    async with two(big, small) as client:
        for name in ("big", "small", "gpt", "sql"):
            refused = await client.post(f"{root}/admin/adapters", json={"name": name, "path": "/adapters/x"})
            assert refused.status_code == 400, (name, refused.text)
            assert "give the adapter another one" in refused.json()["error"]["message"]
        loaded = await client.post(f"{root}/admin/adapters", json={"name": "llama-sql", "path": "/adapters/x"})
        assert loaded.status_code == 200, loaded.text


async def test_a_duplicate_name_on_a_worker_gets_no_requests() -> None:
    (big, of_big), (small, of_small) = model("big", "hello"), model("small", "the")
    of_big.loaded_adapters |= {"small": replace(SQL, name="small"), "sql": SQL}
    of_small.loaded_adapters["sql"] = SQL
    async with two(big, small) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(entry["id"], entry["root"]) for entry in listed] == [
            ("big", "big"),
            ("small", "small"),
            ("sql", "big"),
        ]
        reply = await client.post("/v1/chat/completions", json={"model": "small", "messages": MESSAGES})
        assert "the" in reply.text


async def test_a_name_goes_before_the_alias_of_another_model() -> None:
    (big, _), (small, _) = model("big", "hello", model_aliases=("s*", "gpt-4o")), model("small", "the")
    async with two(big, small) as client:
        for asked, name in (("small", "small"), ("smart", "big"), ("gpt-4o", "big")):
            body = {"model": asked, "messages": MESSAGES}
            assert (await client.post("/v1/chat/completions", json=body)).json()["model"] == name
        assert [row["id"] for row in (await client.get("/v1/models")).json()["data"]] == ["big", "gpt-4o", "small"]


async def test_an_adapter_belongs_to_its_model() -> None:
    (big, _), (small, crew) = model("big", "hello"), model("small", "the")
    crew.loaded_adapters["sql"] = SQL
    async with two(big, small) as client:
        body = {"model": "sql", "messages": MESSAGES}
        assert (await client.post("/v1/chat/completions", json=body)).json()["model"] == "sql"
        found = (await client.get("/v1/models/sql")).json()
        assert (found["parent"], found["max_model_len"]) == ("small", small.card.max_model_len)


async def test_a_body_may_be_as_long_as_its_model_allows() -> None:
    (small, _), (big, _) = model("small", "the"), model("big", "hello")
    async with two(small, big) as client:
        for name, status in (("big", 200), ("small", 400)):
            body = {"model": name, "prompt": [7] * 40, "max_tokens": 4}
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == status, reply.text
        assert f"maximum context length is {small.card.max_model_len}" in reply.json()["error"]["message"]


async def test_each_model_has_its_own_application_below_its_name() -> None:
    (big, _), (small, _) = model("big", "hello"), model("org/small", "the")
    async with two(big, small) as client:
        assert (await client.get("/admin/status")).json()["models"] == ["big", "org/small"]
        own = (await client.get("/models/org/small/admin/status")).json()
        assert (own["model"], own["models"]) == ("org/small", ["org/small"])
        assert [worker["worker_id"] for worker in own["workers"]] == ["org/small-decode-0"]
        said = await client.post("/models/org/small/v1/completions", json={"model": "org/small", "prompt": "hello"})
        assert "the" in said.json()["choices"][0]["text"]
        assert (await client.get("/models/org/small")).headers["location"] == "/models/org/small/"
        assert "Baton: org/small" in (await client.get("/models/org/small/")).text
        assert '<a href="models/org/small/">org/small</a>' in (await client.get("/")).text
        assert (await client.get("/models/none/admin/status")).status_code == 404


async def test_metrics_are_counted_by_model() -> None:
    (big, _), (small, _) = model("big", "hello"), model("small", "the")
    async with two(big, small) as client:
        for name in ("big", "small", "small"):
            await client.post("/v1/completions", json={"model": name, "prompt": "hello"})
        shown = (await client.get("/metrics")).text
    for name, count in (("big", 1), ("small", 2)):
        assert f'baton_requests_total{{endpoint="completions",model="{name}",outcome="ok"}} {count}.0' in shown
        assert f'baton_requests_in_flight{{endpoint="completions",model="{name}"}} 0.0' in shown
    assert shown.count("# TYPE baton_requests_total counter") == 1


async def test_ready_while_any_model_is_and_others_are_named() -> None:
    (big, crew), (small, other) = model("big", "hello"), model("small", "the")
    crew.is_ready = False
    async with two(big, small) as client:
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (200, "")
        assert ready.json()["degraded"].startswith("big: ")
        other.is_ready = False
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "big: " in ready.json()["reason"]
        assert "small: " in ready.json()["reason"]


async def test_the_description_is_of_all_models() -> None:
    (big, _), (small, _) = model("big", "hello"), model("small", "the")
    async with two(big, small) as client:
        body = (await client.get("/openapi.json")).json()["components"]["schemas"]["ChatBody"]["properties"]
        assert body["model"]["enum"] == ["big", "small"]


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(Misconfigured, match="two models are called 'big'"):
        create_models_app([model("big", "hello")[0], model("big", "the")[0]])


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b'{"custom_id": "1", "body": {"model": "small"}}\n{"custom_id": "2"}', "small"),
        (b'\n  \n{"body": {"model": "small"}}\n', "small"),
        (b'{"custom_id": "1", "body": {"model": "sql"}}', "small"),
        (b'{"custom_id": "1", "body": {"model": "none"}}', "big"),
        (b"no JSON", "big"),
    ],
)
def test_a_batch_is_of_the_model_of_its_first_line(content: bytes, name: str) -> None:
    (big, _), (small, crew) = model("big", "hello"), model("small", "the")
    crew.loaded_adapters["sql"] = SQL
    assert model_of(front_of([big, small]), lambda start, size: content[start : start + size]) == name


async def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    async with two(model("big", "hello")[0], model("small", "the")[0]) as client:
        missing = await client.get("/models/nope/admin/status")
        assert missing.status_code == 404
        problem = "The model 'nope' does not exist: this server serves 'big', 'small'"
        assert missing.json()["error"]["message"] == problem
        with pytest.raises(NotFound, match=problem):
            await asyncio.to_thread(_status_of, f"{client.base_url}/models/nope")


async def test_the_doctor_looks_at_every_model() -> None:
    """A lost worker of the second one was not found."""
    (big, _), (small, crew) = model("big", "hello"), model("org/small", "the")
    crew.workers = (replace(crew.workers[0], state="lost", reason="it hung up"),)
    async with two(big, small) as client:
        seen = await asyncio.to_thread(examine, str(client.base_url), probes=False)
        results = findings(*(replace(view, host=None) for view in seen))
        assert [(entry.name, entry.subject) for entry in results] == [("worker-away", "org/small: org/small-decode-0")]
        assert summary(seen, results) == "2 workers of 2 models, 0 lanes examined: 1 finding"
        [only] = await asyncio.to_thread(examine, f"{client.base_url}/models/big", probes=False)
        assert [worker["worker_id"] for worker in only.workers] == ["big-decode-0"]


def _status_of(url: str) -> None:
    with open_client(url) as client:
        request_json(client, "/admin/status")


def test_a_batch_line_for_another_model_is_refused() -> None:
    big, small = beside_each_other([model("big", "hello")[0], model("small", "the")[0]])
    big.check_batch_model("big")
    with pytest.raises(UnknownModel, match=r"its first request \(big\): give requests for small a batch of"):
        big.check_batch_model("small")
    with pytest.raises(UnknownModel, match="'none' does not exist"):
        small.check_batch_model("none")
