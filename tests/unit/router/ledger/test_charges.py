"""What a request is charged, by how it ended: what failed for a reason of the cluster's is free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from protos.errors import DeadlineExceeded, Internal, Overloaded, WorkerLost
from protos.values import FinishReason
from router.jobs import Job, TokenDelta
from router.ledger.ledger import RequestLedger
from router.ledger.prices import Price, PriceList
from router.ledger.rows import LedgerRow, Written
from tests.unit.router.scripted import Crew, Scripted, make_gateway, saying, serving

PRICES = PriceList(prices=(Price(since_s=0.0, model="*", usd={"input": 1.0, "cached": 1.0, "output": 1.0}),))


class Rows:
    """Instead of a database."""

    def __init__(self) -> None:
        self.written: list[Written] = []

    def write(self, row: Written) -> None:
        self.written.append(row)


async def row_of(path: str, body: dict[str, Any], script: Any) -> tuple[int, LedgerRow]:
    rows = Rows()
    ledger = RequestLedger(rows, PRICES, Crew(), model="tiny")  # type: ignore[arg-type]
    async with (
        serving(make_gateway(Scripted(script), ledger=ledger)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        reply = await http.post(path, json={"model": "tiny"} | body)
    [row] = [one for one in rows.written if isinstance(one, LedgerRow)]
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
async def test_an_answer_that_failed_for_a_reason_of_the_clusters_is_free(
    error: Exception, is_free: bool, stream: bool
) -> None:
    _, row = await row_of("/v1/completions", {"prompt": "hello", "stream": stream}, failing(error))
    assert row.outcome == error.code  # type: ignore[attr-defined]
    assert row.output_tokens > 0
    assert (row.charged_usd == 0.0) is is_free


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "hello"}), ("/v1/embeddings", {"input": "hello"})]
)
async def test_a_request_that_was_refused_before_anything_was_sent_is_free(path: str, body: dict[str, Any]) -> None:
    status, row = await row_of(path, body, lambda job: [Overloaded("no room")])
    assert (status, row.outcome, row.output_tokens, row.charged_usd) == (429, "overloaded", 0, 0.0)
    assert (row.input_tokens, row.cached_tokens) == (0, 0), "no worker had it"


async def test_a_vector_that_did_not_come_is_free() -> None:
    def plain(_: Job) -> list[TokenDelta]:
        return [TokenDelta(token_ids=(5,), finish_reason=FinishReason.LENGTH)]

    status, row = await row_of("/v1/embeddings", {"input": "hello"}, plain)
    assert (status, row.outcome, row.charged_usd) == (503, "unavailable", 0.0)


async def test_more_dimensions_than_a_vector_has_are_refused_before_it_is_computed() -> None:
    card = replace(make_gateway(Scripted(saying(""))).card, vector_size=8)
    generate = Scripted(saying(""))
    async with (
        serving(make_gateway(generate, card=card)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        reply = await http.post("/v1/embeddings", json={"model": "tiny", "input": "hello", "dimensions": 9})
        described = (await http.get("/openapi.json")).json()["components"]["schemas"]["EmbeddingBody"]
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dimensions")
    assert not generate.jobs
    assert described["properties"]["dimensions"]["anyOf"][0]["maximum"] == 8


async def test_an_answer_is_charged_by_its_tokens() -> None:
    status, row = await row_of("/v1/completions", {"prompt": "hello"}, saying("a few tokens"))
    assert (status, row.outcome) == (200, "ok")
    assert row.charged_usd == pytest.approx((row.input_tokens + row.cached_tokens + row.output_tokens) / 1e6)
