"""The charge of a request by its ending: failures of the cluster are free."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from protos.errors import DeadlineExceeded, Internal, Overloaded, WorkerLost
from protos.values import FinishReason
from router.auth.auth import AccessControl
from router.auth.tenants import Roster, Tenant, hash_of
from router.faces.openai.embeddings import SilentBody
from router.faces.openai.openai_api import OPENAI_FACE
from router.jobs import Job, TokenDelta
from router.observe.ledger.organization import VECTOR_ENDPOINTS
from router.observe.ledger.prices import Price, PriceList
from router.observe.ledger.request_ledger import RequestLedger
from router.observe.ledger.rows import LedgerRow, Written
from router.request_metrics import RequestMetrics
from tests.unit.router.scripted import Crew, Scripted, make_gateway, saying, serving

PRICES = PriceList(prices=(Price(since_s=0.0, model="*", usd={"input": 1.0, "cached": 1.0, "output": 1.0}),))


class Rows:
    """Instead of a database."""

    def __init__(self) -> None:
        self.written: list[Written] = []
        self.ended: asyncio.Queue[LedgerRow] = asyncio.Queue()

    def write(self, row: Written) -> None:
        self.written.append(row)
        if isinstance(row, LedgerRow):
            self.ended.put_nowait(row)


async def row_of(path: str, body: dict[str, Any], script: Any) -> tuple[int, LedgerRow]:
    rows = Rows()
    ledger = RequestLedger(rows, PRICES, Crew(), model="tiny")  # type: ignore[arg-type]
    async with (
        serving(make_gateway(Scripted(script), ledger=ledger)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        reply = await http.post(path, json={"model": "tiny"} | body)
    [row] = [record for record in rows.written if isinstance(record, LedgerRow)]
    return reply.status_code, row


def failing(error: Exception) -> Any:
    def script(job: Any) -> list[Any]:
        return [*list(saying("a few tokens", at_once=1)(job))[:2], error]

    return script


@pytest.mark.parametrize(
    ("error", "is_free"),
    [(WorkerLost("gone"), True), (DeadlineExceeded("late"), True), (Internal("a bug"), True), (Overloaded("x"), False)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_failed_by_the_cluster_is_free(error: Exception, is_free: bool, stream: bool) -> None:
    _, row = await row_of("/v1/completions", {"prompt": "hello", "stream": stream}, failing(error))
    assert row.outcome == error.code  # type: ignore[attr-defined]
    assert row.output_tokens > 0
    assert (row.charged_usd == 0.0) is is_free


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/rerank", {"query": "hello", "documents": ["fox"], "method": "embedding"}),
    ],
)
async def test_a_request_refused_before_its_answer_is_free(path: str, body: dict[str, Any]) -> None:
    status, row = await row_of(path, body, lambda job: [Overloaded("no room")])
    assert (status, row.outcome, row.output_tokens, row.charged_usd) == (429, "overloaded", 0, 0.0)
    assert (row.input_tokens, row.cached_tokens) == (0, 0), "no worker had it"


def test_endpoints_without_answers_are_counted_with_embeddings() -> None:
    silent = [one for one in OPENAI_FACE.endpoints if one.body is not None and issubclass(one.body, SilentBody)]
    assert {name for one in silent for name in (one.track, f"batch:{one.path}")} <= {*VECTOR_ENDPOINTS}


async def test_requests_that_run_cannot_spend_a_hard_budget_many_times() -> None:
    tenant = Tenant(name="acme", hard_budget_usd=1e-5)
    access = AccessControl()
    access.roster = Roster(tenants={"acme": tenant}, by_key={hash_of("key"): tenant})
    rows, gate = Rows(), asyncio.Event()
    ledger = RequestLedger(rows, PRICES, Crew(), model="tiny", budgets=access.budgets)  # type: ignore[arg-type]
    generate = Scripted(lambda job: [gate, *saying("hi")(job)])
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 20}
    async with (
        serving(make_gateway(generate, ledger=ledger, access=access)) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"authorization": "Bearer key"}) as http,
    ):
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        await generate.began.wait()
        others = [await http.post("/v1/completions", json=body) for _ in range(5)]
        gate.set()
        assert (await first).status_code == 200
        again = await http.post("/v1/completions", json=body)
    for other in others:
        assert (other.status_code, other.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert other.headers["retry-after"] == "1"
    assert again.status_code == 200, "it cost less than was set aside"


def hanging(job: Job) -> list[Any]:
    return [*list(saying("a few tokens", at_once=1)(job))[:2], asyncio.Event()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [saying("hi"), failing(WorkerLost("gone")), failing(Overloaded("x")), lambda job: [Overloaded("x")], hanging],
)
async def test_counters_of_tokens_agree_with_the_ledger_after_any_end(script: Any, stream: bool) -> None:
    rows, metrics = Rows(), RequestMetrics(model="tiny")
    ledger = RequestLedger(rows, PRICES, Crew(), model="tiny")  # type: ignore[arg-type]
    generate = Scripted(script)
    gateway = make_gateway(generate, ledger=ledger, metrics=metrics, access=AccessControl(registry=metrics.registry))
    body = {"model": "tiny", "prompt": "hello", "stream": stream}
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        if script is hanging:
            await generate.began.wait()
            asking.cancel()  # the client goes away
        await asyncio.gather(asking, return_exceptions=True)
        row = await asyncio.wait_for(rows.ended.get(), timeout=30)

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"baton_{name}_tokens_total", labels) or 0.0

    served = {"endpoint": "completions", "model": "tiny"}
    counted = [value(name, **served) for name in ("prompt", "cached", "generated")]
    assert counted == [row.input_tokens + row.cached_tokens, row.cached_tokens, row.output_tokens]
    by_tenant = [value("tenant", tenant="", kind=kind) for kind in ("input", "cached", "output")]
    assert by_tenant == [row.input_tokens, row.cached_tokens, row.output_tokens]


async def test_a_vector_that_did_not_come_is_free() -> None:
    def plain(_: Job) -> list[TokenDelta]:
        return [TokenDelta(token_ids=(5,), finish_reason=FinishReason.LENGTH)]

    status, row = await row_of("/v1/embeddings", {"input": "hello"}, plain)
    assert (status, row.outcome, row.charged_usd) == (503, "unavailable", 0.0)


async def test_too_many_dimensions_are_refused_before_computing() -> None:
    card = replace(make_gateway(Scripted(saying(""))).card, vector_size=8)
    generate = Scripted(saying(""))
    async with (
        serving(make_gateway(generate, card=card)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        reply = await http.post("/v1/embeddings", json={"model": "tiny", "input": "hello", "dimensions": 9})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dimensions")
    assert not generate.jobs


async def test_an_answer_is_charged_by_its_tokens() -> None:
    status, row = await row_of("/v1/completions", {"prompt": "hello"}, saying("a few tokens"))
    assert (status, row.outcome) == (200, "ok")
    assert row.charged_usd == pytest.approx((row.input_tokens + row.cached_tokens + row.output_tokens) / 1e6)
