"""Anthropic's Message Batches with Anthropic's own client, on the store of OpenAI's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from anthropic.types.messages import MessageBatch

from protos.errors import InvalidRequest
from router.app import create_models_app
from router.batches.message_batch_routes import RequestsReader
from tests.unit.router.batches.batching import Batching
from tests.unit.router.scripted import Script, saying, serving, serving_app, with_card
from tests.unit.router.sdk_types import read_as

PATH = "/v1/messages/batches"


def asking(custom_id: str, **changes: Any) -> Any:
    content = f"hello {custom_id}"
    params = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]} | changes
    return {"custom_id": custom_id, "params": params}


@asynccontextmanager
async def batching(
    folder: Path, script: Script | None = None, *, runs: bool = True, **changes: Any
) -> AsyncIterator[tuple[Any, Batching, str]]:
    made = Batching(folder, script, **changes)
    async with (
        serving(made.gateway()) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        if runs:
            made.run()
        try:
            yield client, made, url
        finally:
            await made.close()


async def until(client: Any, batch_id: str, holds: Callable[[Any], bool]) -> Any:
    """Polls as a client does."""
    while True:
        batch = await client.messages.batches.retrieve(batch_id)
        if holds(batch):
            return batch
        await asyncio.sleep(0.01)


async def ended(client: Any, batch_id: str) -> Any:
    return await until(client, batch_id, lambda batch: batch.processing_status == "ended")


async def test_the_walk_through(tmp_path: Path) -> None:
    async with batching(tmp_path) as (client, _, url):
        batch = await client.messages.batches.create(
            requests=[asking("first"), asking("wrong", temperature=9), asking("third")]
        )
        assert (batch.type, batch.processing_status, batch.results_url) == ("message_batch", "in_progress", None)
        assert batch.request_counts.processing == 3, "also before its requests are begun"
        assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
        batch = await ended(client, batch.id)
        assert batch.request_counts.model_dump() == {
            "processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0,
        }  # fmt: skip
        assert batch.results_url == f"{url}{PATH}/{batch.id}/results"
        results = {result.custom_id: result.result async for result in await client.messages.batches.results(batch.id)}
        assert {name: value.type for name, value in results.items()} == {
            "first": "succeeded", "third": "succeeded", "wrong": "errored",
        }  # fmt: skip
        assert results["first"].message.content[0].text == "hi"
        assert results["first"].message.usage.input_tokens > 0
        assert results["wrong"].error.error.type == "invalid_request_error"
        assert [entry.id async for entry in client.messages.batches.list(limit=1)] == [batch.id]
        async with httpx.AsyncClient(base_url=url) as http:
            read_as(MessageBatch, (await http.get(f"{PATH}/{batch.id}")).json())
            read_as(MessageBatch, (await http.get(PATH)).json()["data"][0])
            assert (await http.get("/v1/files")).json()["data"] == [], "its files are no files of OpenAI's API"
            assert (await http.get(f"/v1/batches/{batch.id}")).status_code == 404
        assert (await client.messages.batches.delete(batch.id)).id == batch.id
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(batch.id)
        assert list((tmp_path / "files").iterdir()) == []


async def test_a_batch_that_has_ended_without_results_names_the_reason(tmp_path: Path) -> None:
    async with batching(tmp_path, runs=False) as (client, made, url):
        batch = await client.messages.batches.create(requests=[asking("first")])
        async with httpx.AsyncClient(base_url=url) as http:
            early = (await http.get(f"{PATH}/{batch.id}/results")).json()["error"]["message"]
            for path in (tmp_path / "files").iterdir():
                path.unlink()
            made.run()
            await asyncio.wait_for(ended(client, batch.id), 60)
            late = (await http.get(f"{PATH}/{batch.id}/results")).json()["error"]["message"]
    assert early.endswith("its processing_status is not 'ended'")
    assert "has ended without results: the content of file" in late


async def test_a_canceled_batch_keeps_its_results(tmp_path: Path) -> None:
    gate, count = asyncio.Event(), 0

    def script(job: Any) -> Any:
        nonlocal count
        count += 1
        return saying("hi")(job) if count == 1 else [gate]

    async with batching(tmp_path, script, runs=False) as (client, made, _):
        batch = await client.messages.batches.create(requests=[asking(f"r{number}") for number in range(4)])
        made.run(max_running=1)
        await until(client, batch.id, lambda batch: batch.request_counts.succeeded == 1)
        with pytest.raises(anthropic.BadRequestError, match="while it runs"):
            await client.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
            await client.messages.batches.results(batch.id)
        assert (await client.messages.batches.cancel(batch.id)).processing_status == "canceling"
        batch = await ended(client, batch.id)
        assert batch.cancel_initiated_at is not None
        assert batch.request_counts.model_dump() == {
            "processing": 0, "succeeded": 1, "errored": 0, "canceled": 3, "expired": 0,
        }  # fmt: skip
        kinds = [result.result.type async for result in await client.messages.batches.results(batch.id)]
        assert kinds == ["succeeded", "canceled", "canceled", "canceled"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{}", "The body must be an object with one list"),
        (b'{"requests": []}', "'requests' is empty"),
        (b'{"requests": [1]}', "requests.0 is no object"),
        (b'{"requests": [{"custom_id": "a", "params": {}}', "The body must be an object with one list"),
        (b'{"requests": [{"custom_id": "a", "params": {}}], "x": 1}', "The body must be an object with one list"),
        (b'{"requests": [{"custom_id" "a"}]}', "requests.0 is not valid JSON"),
        (orjson.dumps({"requests": [asking("a b")]}), "requests.0.custom_id must be a string of 1 to 64"),
        (orjson.dumps({"requests": [asking("a"), {"custom_id": "b"}]}), "requests.1.params must be an object"),
        (orjson.dumps({"requests": [asking("a") | {"url": "x"}]}), "requests.0 has 'url': it may have custom_id and"),
        (orjson.dumps({"requests": [asking("a"), asking("a")]}), "requests.1: The custom_id 'a' is another request's"),
        (orjson.dumps({"requests": [asking("a", model="gpt-5")]}), "requests.0: The model 'gpt-5' does not exist"),
        (orjson.dumps({"requests": [asking("a", stream=True)]}), "requests.0: 'stream' must be false"),
        (orjson.dumps({"requests": [asking(f"r{n}") for n in range(6)]}), "A batch has at most 5 requests: split it"),
    ],
)
async def test_invalid_batches_are_refused_and_leave_nothing(tmp_path: Path, body: bytes, told: str) -> None:
    async with batching(tmp_path, runs=False, max_lines=5) as (_, _, url), httpx.AsyncClient(base_url=url) as http:
        reply = await http.post(PATH, content=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert told in reply.json()["error"]["message"]
        cursor = (await http.get(f"{PATH}?before_id=msgbatch_0")).json()["error"]["message"]
        assert cursor == "'before_id' is 'msgbatch_0': give the id of an entry of the list"
        assert (await http.get(PATH)).json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_requests_are_found_however_the_body_is_cut(size: int) -> None:
    requests: list[Any] = [
        {"a": 'quote " brace } bracket ] back\\slash \\"'}, {}, {"deep": [[{"b": ["{", "\\\\"]}]]}, {"é🙂": "\u2028"},
    ]  # fmt: skip
    body = b' { "requests" : [' + b" , ".join(map(orjson.dumps, requests)) + b" ] } \n"
    reader = RequestsReader(1000)
    lines: list[bytes] = []
    for at in range(0, len(body), size):
        lines += reader.feed(body[at : at + size])
    reader.end()
    assert [orjson.loads(line) for line in lines] == requests


@pytest.mark.parametrize("requests", [b"{}{}", b",{}", b"{},,{}", b"{},", b"{} ,\n, {}"])
@pytest.mark.parametrize("size", [1, 1000])
def test_requests_stand_behind_one_comma_each(requests: bytes, size: int) -> None:
    reader, body = RequestsReader(1000), b'{"requests": [' + requests + b"]}"
    parts = (body[at : at + size] for at in range(0, len(body), size))
    with pytest.raises(InvalidRequest, match=r"requests\.\d is no object"):
        deque((list(reader.feed(part)) for part in parts), maxlen=0)


def test_an_oversized_request_is_refused_early() -> None:
    reader = RequestsReader(100)
    with pytest.raises(InvalidRequest, match=r"requests\.1 has more than 100 bytes"):
        list(reader.feed(b'{"requests": [{}, {"a": "' + b"x" * 200))


async def test_a_batch_of_two_models_names_the_second_ones_request(tmp_path: Path) -> None:
    """It was taken, and ended without results or a reason."""
    made = Batching(tmp_path)
    tiny = made.gateway()
    small = with_card(tiny, name="small")
    try:
        async with (
            serving_app(create_models_app([tiny, small])) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        ):
            with pytest.raises(anthropic.BadRequestError, match=r"requests\.1: a batch is of one model.*\(tiny\)"):
                await client.messages.batches.create(requests=[asking("a"), asking("b", model="small")])
            taken = await client.messages.batches.create(requests=[asking("b", model="small")])
            assert taken.request_counts.processing == 1
            assert len((await client.messages.batches.list()).data) == 1
    finally:
        await made.close()


@pytest.mark.parametrize("levels", [200, 300, 1000])
async def test_a_nested_request_is_refused_by_its_number(tmp_path: Path, levels: int) -> None:
    body = orjson.dumps({"requests": [asking("a"), asking("b", metadata=0)]})
    body = body.replace(b'"metadata":0', b'"metadata":' + b"[" * levels + b"]" * levels)
    async with batching(tmp_path) as (_, _made, url), httpx.AsyncClient(base_url=url) as http:
        refused = await http.post(PATH, content=body)
    assert refused.status_code == 400
    assert "requests.1" in refused.json()["error"]["message"]
