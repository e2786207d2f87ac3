"""The client against a scripted server: what it notes, what it gives up, and how it survives bad answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.bench_load import PrefixSpan, WorkloadItem
from cluster.bench.bench_report import RequestRecord
from cluster.bench.client import CompletionClient, Dialect
from cluster.bench.http import HttpEndpoint
from cluster.bench.load import run_load
from cluster.bench.prompts import Prompts
from protos.errors import InvalidRequest, Unavailable
from tests.unit.cluster.bench.fake_server import (
    DONE,
    FakeServer,
    Script,
    Step,
    answer,
    chunk,
    refusal,
    serving,
    sse,
    usage,
)
from tests.unit.cluster.virtual_time import run_virtually

ITEM = WorkloadItem(index=4, spans=(PrefixSpan(key=(0, 0), num_tokens=7),), num_output=3, due_s=0.0)
WHOLE = answer(0.5, chunk(11), 0.2, chunk(12), 0.3, chunk(13, finish="length"), usage(7, 3, cached=4), DONE)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: the path of a Unix socket has room for 107 bytes."""
    return tmp_path_factory.mktemp("s")


@asynccontextmanager
async def asking(script: Script, folder: Path, **more: Any) -> AsyncIterator[tuple[CompletionClient, FakeServer]]:
    async with serving(script, folder) as server:
        settings: dict[str, Any] = {"model": "m", "timeout_s": 60.0, "open_one": server.open_one} | more
        prompts = Prompts(seed=0, vocab_size=100)
        client = CompletionClient(HttpEndpoint.parse("http://fake/prefix/v1"), prompts=prompts, **settings)
        try:
            yield client, server
        finally:
            client.close()


async def ask(script: Script, folder: Path, **more: Any) -> tuple[RequestRecord, FakeServer]:
    async with asking(script, folder, **more) as (client, server):
        return await client.ask(ITEM, client.prepare(ITEM), start_s=0.0), server


def asked(steps: Sequence[Step], folder: Path, **more: Any) -> RequestRecord:
    return run_virtually(ask(lambda _: steps, folder, **more))[0]


def test_times_are_measured_at_the_bytes(folder: Path) -> None:
    record = asked(WHOLE, folder)
    assert record.error == ""
    assert record.sent_s == pytest.approx(0.0)
    assert record.arrivals_s == pytest.approx((0.5, 0.7, 1.0))
    assert (record.num_prompt, record.num_output, record.num_cached) == (7, 3, 4)
    assert (record.index, record.due_s, record.status) == (4, 0.0, 200)


def test_the_requests_parameters(folder: Path) -> None:
    _, server = run_virtually(ask(lambda _: WHOLE, folder))
    [body] = server.bodies
    assert len(body["prompt"]) == 7
    assert all(10 <= token < 90 for token in body["prompt"])
    assert {name: value for name, value in body.items() if name != "prompt"} == {
        "model": "m", "stream": True, "temperature": 0.0, "max_tokens": 3, "ignore_eos": True,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_events_that_bring_no_tokens_are_not_timed(folder: Path) -> None:
    steps = answer(0.1, b": ping\n\n", chunk(), 0.4, chunk(1, 2), 1.0, chunk(3, finish="stop"), 5.0, usage(7, 3), DONE)
    record = asked(steps, folder)
    assert record.arrivals_s == pytest.approx((0.5, 1.5))
    assert record.tpot_s == pytest.approx(0.5), "three tokens in two events"


def test_events_may_be_cut_anywhere(folder: Path) -> None:
    stream = chunk(11).replace(b"\n", b"\r\n") + chunk(12, finish="length") + usage(7, 2) + DONE
    record = asked(answer(*(stream[i : i + 5] for i in range(0, len(stream), 5))), folder)
    assert (record.error, record.num_output, len(record.arrivals_s)) == ("", 2, 2)


def test_without_ids_or_usage_an_event_is_a_token(folder: Path) -> None:
    def text(finish: str | None = None) -> bytes:
        return sse({"choices": [{"text": "x", "finish_reason": finish}]})

    record = asked(answer(text(), text(), text("stop"), DONE), folder)
    assert (record.error, record.num_prompt, record.num_output, record.num_cached) == ("", 7, 3, None)


@pytest.mark.parametrize(
    ("steps", "error", "told"),
    [
        pytest.param(refusal(429, "too much", code="overloaded"), "overloaded", "HTTP 429: too much", id="refused"),
        pytest.param(refusal(503, "gone"), "http_503", "gone", id="no code"),
        pytest.param([b"HTTP/1.1 500 No\r\ncontent-length: 3\r\n\r\nbug"], "http_500", "bug", id="no JSON"),
        pytest.param([b"HTTP/1.1 502 No\r\ncontent-length: 2\r\n\r\n[]"], "http_502", "[]", id="other JSON"),
        pytest.param([b"nonsense\r\n\r\n"], "connection", "", id="no HTTP"),
        pytest.param([1.0, None], "connection", "closed", id="closed before an answer"),
        pytest.param([*answer(chunk(1))[:2], 1.0, None], "connection", "closed", id="closed within"),
        pytest.param(answer(chunk(1)), "incomplete", "without an end", id="ends too early"),
        pytest.param(answer(DONE), "incomplete", "without an end", id="no token at all"),
        pytest.param(answer(chunk(1), sse(b"{oops"), DONE), "bad_event", "{oops", id="broken event"),
        pytest.param(answer(chunk(1), sse(b"[1]"), DONE), "bad_event", "[1]", id="event of another kind"),
        pytest.param([*answer(chunk(1))[:2], 99.0], "timeout", "60 s", id="too slow"),
        pytest.param(
            answer(chunk(1), sse({"error": {"message": "died", "code": "worker_lost"}})),
            "worker_lost", "died", id="error within the stream",
        ),
    ],
)  # fmt: skip
def test_failures_have_codes(steps: Sequence[Step], error: str, told: str, folder: Path) -> None:
    record = asked(steps, folder)
    assert record.error == error
    assert told in record.message


def test_a_server_that_closes_after_the_last_event_has_answered(folder: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    assert asked([head, chunk(1, finish="stop"), DONE, None], folder).error == ""


def test_a_timeout_tells_the_server_to_stop(folder: Path) -> None:
    record, server = run_virtually(ask(lambda _: [*answer(chunk(1))[:2], 99.0], folder))
    assert record.error == "timeout"
    assert server.hung_up == 1


def test_nobody_listens(folder: Path) -> None:
    async def refused(protocol: Callable[[], Any]) -> Any:
        raise ConnectionRefusedError("nobody there")

    record = asked(WHOLE, folder, open_one=refused)
    assert (record.error, record.message, record.sent_s) == ("connection", "nobody there", None)


def test_there_are_as_many_kept_connections_as_requests(folder: Path) -> None:
    items = [WorkloadItem(index=i, spans=ITEM.spans, num_output=3) for i in range(6)]

    async def load(concurrency: int) -> FakeServer:
        async with asking(lambda _: WHOLE, folder) as (client, server):
            records = await run_load(items, client, concurrency=concurrency)
            assert [record.error for record in records] == [""] * 6
            return server

    assert run_virtually(load(1)).num_connections == 1
    crowded = run_virtually(load(6))
    assert (crowded.num_connections, crowded.max_running) == (6, 6), "nobody waits for somebody else's connection"


def test_a_connection_that_was_idle_for_long_is_not_trusted(folder: Path) -> None:
    """The server may be about to close it."""
    items = [WorkloadItem(index=i, spans=ITEM.spans, num_output=3, due_s=due) for i, due in enumerate((0.0, 1.5, 6.0))]

    async def load() -> FakeServer:
        async with asking(lambda _: WHOLE, folder) as (client, server):
            await run_load(items, client)
            return server

    assert run_virtually(load()).num_connections == 2, "used again after half a second, not after 3.5"


def test_a_stopped_run_hangs_up(folder: Path) -> None:
    async def stopped() -> FakeServer:
        async with asking(lambda _: [*answer(chunk(1))[:2], 50.0], folder) as (client, server):
            run = asyncio.ensure_future(run_load([ITEM], client))
            await asyncio.sleep(1.0)
            run.cancel()
            assert await run == []
            await asyncio.sleep(1.0)
            return server

    assert run_virtually(stopped()).hung_up == 1


def learned(script: Script, folder: Path) -> tuple[Dialect, FakeServer]:
    async def learn() -> tuple[Dialect, FakeServer]:
        async with asking(script, folder) as (client, server):
            await client.learn(num_prompt=4)
            return client.dialect, server

    return run_virtually(learn())


def test_a_server_that_knows_it_all_is_asked_once(folder: Path) -> None:
    dialect, server = learned(lambda _: WHOLE, folder)
    assert dialect == Dialect()
    assert (dialect.given_up, len(server.bodies)) == ((), 1)


def test_only_refused_parameters_are_dropped(folder: Path) -> None:
    def no_ids(body: dict[str, Any]) -> Sequence[Step]:
        return WHOLE if isinstance(body["prompt"], str) else refusal(400, "prompt must be a string")

    dialect, server = learned(no_ids, folder)
    assert dialect.given_up == ("prompt",)
    assert len(server.bodies[-1]["prompt"].split(" ")) == 4, "as many words as tokens were wanted"


def test_without_a_reason_parameters_are_dropped_one_by_one(folder: Path) -> None:
    def plain_only(body: dict[str, Any]) -> Sequence[Step]:
        plain = not body.keys() & {"ignore_eos", "return_token_ids", "stream_options"}
        return WHOLE if plain and isinstance(body["prompt"], str) else refusal(422, "no")

    dialect, server = learned(plain_only, folder)
    assert dialect == Dialect(return_token_ids=False, ignore_eos=False, prompt=False, stream_options=False)
    assert len(server.bodies) == 5


@pytest.mark.parametrize(
    ("steps", "error", "told"),
    [
        (refusal(400, "the model 'm' is asleep"), InvalidRequest, "the model 'm' is asleep"),
        (refusal(401, "who are you?"), InvalidRequest, "who are you"),
        ([None], Unavailable, "gives no answer"),
    ],
)
def test_a_server_that_answers_nothing_ends_the_run(
    steps: Sequence[Step], error: type[Exception], told: str, folder: Path
) -> None:
    with pytest.raises(error, match=told):
        learned(lambda _: steps, folder)
