"""OpenAI's batch walk-through with OpenAI's own client, and every way in which a batch can end."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from protos.errors import BatonError, BudgetExhausted, Internal, NoWorkers, UnknownModel, WorkerLost
from router.auth.tenants import NOBODY
from router.batches.batch_runner import MAX_FAILURES
from router.files.batches import BatchStore
from router.files.contents import FolderContents
from router.files.records import StoredBatch
from router.gateway import Gateway
from router.jobs import Job
from router.observe.ledger.ledger_report import sums
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import Price, PriceList
from router.observe.ledger.request_ledger import RequestLedger
from tests.unit.router.batches.batching import CHAT, Batching, batching, ended, jsonl, line, results, upload
from tests.unit.router.scripted import Crew, saying
from tests.unit.router.sdk_types import read_as


async def test_the_walk_through(tmp_path: Path) -> None:
    async with batching(tmp_path) as (client, _):
        lines = [line(f"request-{number}") for number in range(5)]
        lines[3]["body"]["temperature"] = 9
        file = await client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch")
        assert (file.filename, file.purpose, file.bytes) == ("requests.jsonl", "batch", len(jsonl(lines)))
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"description": "nightly"}
        )
        assert (batch.status, batch.metadata) == ("validating", {"description": "nightly"})
        assert batch.expires_at == batch.created_at + 86_400
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.request_counts.model_dump() == {"total": 5, "completed": 4, "failed": 1}
        raw = await client.batches.with_raw_response.retrieve(batch.id)
        assert read_as(openai.types.Batch, json.loads(raw.text)).model == "tiny"
        listed = await client.batches.with_raw_response.list(limit=1)
        assert read_as(openai.types.Batch, json.loads(listed.text)["data"][0]).id == batch.id
        files = await client.files.with_raw_response.list(purpose="batch_output")
        assert [read_as(openai.types.FileObject, row).id for row in json.loads(files.text)["data"]] == [
            batch.error_file_id,
            batch.output_file_id,
        ]
        entries = await results(client, batch.output_file_id)
        assert [entry["custom_id"] for entry in entries] == [f"request-{number}" for number in (0, 1, 2, 4)]
        assert {entry["response"]["status_code"] for entry in entries} == {200}
        answer = entries[0]["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == "hi"
        assert batch.usage.output_tokens == 4 * answer["usage"]["completion_tokens"]
        [failed] = await results(client, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("request-3", 400)
        assert failed["response"]["body"]["error"]["param"] == "temperature"
        assert (await client.files.retrieve(batch.output_file_id)).purpose == "batch_output"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 2}),
        ("/v1/embeddings", {"model": "tiny", "input": "hello"}),
        ("/v1/rerank", {"model": "tiny", "query": "q", "documents": ["d"], "method": "embedding"}),
        ("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b", "method": "embedding"}),
        ("/v1/responses", {"model": "tiny", "input": "hello"}),
    ],
)
async def test_other_endpoints(tmp_path: Path, url: Any, body: dict[str, Any]) -> None:
    async with batching(tmp_path) as (client, _):
        file_id = await upload(client, [line("a", url=url, body=body)])
        batch = await client.batches.create(input_file_id=file_id, endpoint=url, completion_window="24h")
        batch = await ended(client, batch.id)
        [entry] = await results(client, batch.output_file_id)
        alone = await client.post(url.removeprefix("/v1"), cast_to=object, body=body)
        assert entry["response"]["body"].keys() == dict(alone).keys()  # type: ignore[call-overload]


async def test_each_wrong_line_is_named_by_its_number(tmp_path: Path) -> None:
    good = line("a")
    wrong = [
        good,
        line("a"),
        line("b", url="/v1/completions"),
        line("c", method="GET"),
        {"method": "POST", "url": CHAT, "body": {}},
        line("d", body={"model": "gpt-5", "messages": []}),
        line("e", body=good["body"] | {"stream": True}),
        [1],
    ]
    async with batching(tmp_path) as (client, made):
        file = await client.files.create(file=("f", jsonl(wrong) + b"\n{nonsense\n"), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch = await ended(client, batch.id)
        assert batch.status == "failed"
        assert not made.generate.jobs
        assert [(row.line, row.code) for row in batch.errors.data] == [
            (2, "duplicate_custom_id"),
            (3, "mismatched_url"),
            (4, "invalid_method"),
            (5, "missing_required_parameter"),
            (5, "missing_required_parameter"),
            (6, "model_not_found"),
            (7, "invalid_request"),
            (8, "invalid_request"),
            (10, "invalid_json_line"),
        ]


@pytest.mark.parametrize(
    ("content", "code"), [(b"\n", "empty_file"), (jsonl([line("a"), line("b")]), "too_many_tasks")]
)
async def test_a_file_must_have_the_right_number_of_lines(tmp_path: Path, content: bytes, code: str) -> None:
    async with batching(tmp_path, max_lines=1) as (client, _):
        file = await client.files.create(file=("f", content), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert [row.code for row in (await ended(client, batch.id)).errors.data] == [code]


async def test_cancelled_and_expired_batches_keep_their_results(tmp_path: Path) -> None:
    gate = asyncio.Event()

    def script(job: Job) -> Any:
        return [gate, *saying("hi")(job)] if len(job.prompt_ids) > 30 else saying("hi")(job)

    long = line("long", body={"model": "tiny", "messages": [{"role": "user", "content": "hello " * 40}]})
    for way in ("cancelled", "expired"):
        async with batching(tmp_path / way, script) as (client, made):
            file_id = await upload(client, [line("short"), long])
            batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
            while batch.request_counts is None or not batch.request_counts.completed:
                batch = await client.batches.retrieve(batch.id)
                await asyncio.sleep(0.01)
            if way == "cancelled":
                assert (await client.batches.cancel(batch.id)).status == "cancelling"
            else:
                made.clock.now_s += 86_400
            batch = await asyncio.wait_for(ended(client, batch.id), 60)
            assert batch.status == way
            assert [result["custom_id"] for result in await results(client, batch.output_file_id)] == ["short"]
            [undone] = await results(client, batch.error_file_id)
            assert (undone["custom_id"], undone["response"]) == ("long", None)
            assert undone["error"]["code"] == f"batch_{way}"
            if way == "expired":
                with pytest.raises(openai.BadRequestError, match=way):
                    await client.batches.cancel(batch.id)


async def test_a_lost_lease_takes_no_place_for_a_line(tmp_path: Path) -> None:
    """A line that waited for room when its batch stopped kept a place forever."""
    gate = asyncio.Event()

    def script(job: Job) -> Any:
        return [gate, *saying("hi")(job)]

    async with batching(tmp_path, script, runs=False) as (client, made):
        file_id = await upload(client, [line(str(number)) for number in range(5)])
        batch: Any = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        runner = made.runner(max_running=2)
        for _ in range(4):
            work = asyncio.create_task(runner.run())
            while not runner._room._free._waiters:  # noqa: ASYNC110 - a line waits for room
                await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.wait([work])
            made.clock.now_s += 31.0
        gate.set()
        work = asyncio.create_task(runner.run())
        batch = await ended(client, batch.id)
        work.cancel()
        await asyncio.wait([work])
        assert batch.request_counts.completed == 5
        assert runner._room._free._value == 2


async def test_a_line_waits_for_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that passes is no result."""
    monkeypatch.setattr("router.batches.batch_runner.FIRST_PAUSE_S", 0.0)
    tries: list[str] = []

    def script(job: Job) -> Any:
        tries.append(job.request_id)
        return [NoWorkers("none")] if len(tries) == 1 else saying("hi")(job)

    async with batching(tmp_path, script) as (client, _):
        file_id = await upload(client, [line("a")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        assert (await ended(client, batch.id)).request_counts.completed == 1
    assert len(tries) == 2
    assert tries[0] == tries[1]  # the same row in the ledger


async def _handed_over(made: Batching, client: openai.AsyncOpenAI, lines: list[Any], num_done: int) -> Any:
    """A batch whose owner was stopped after some lines."""
    file_id = await upload(client, lines)
    batch: Any = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    owner = made.run()
    while batch.request_counts.completed < num_done:
        batch = await client.batches.retrieve(batch.id)
        await asyncio.sleep(0.01)
    owner.cancel()
    await asyncio.wait([owner])
    return batch


def _short_alone(job: Job) -> Any:
    return [asyncio.Event()] if len(job.prompt_ids) > 30 else saying("hi")(job)


LONG = line("long", body={"model": "tiny", "messages": [{"role": "user", "content": "hello " * 40}]})


async def test_a_new_owner_accepts_lines_that_ran_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model, an adapter perhaps, is there no more; the limits are lower now."""
    async with batching(tmp_path, _short_alone, runs=False) as (client, made):
        batch = await _handed_over(made, client, [line("short"), LONG], 1)

        def gone(_: Gateway, name: str) -> Any:
            raise UnknownModel(f"The model '{name}' does not exist", param="model")

        monkeypatch.setattr(Gateway, "_named", gone)
        made.run(storage=replace(made.storage, max_lines=1))
        batch = await asyncio.wait_for(ended(client, batch.id), 60)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
        assert [result["custom_id"] for result in await results(client, batch.output_file_id)] == ["short"]
        [failed] = await results(client, batch.error_file_id)
        assert failed["response"]["status_code"] == 404


async def test_a_batch_without_its_input_keeps_its_results(tmp_path: Path) -> None:
    async with batching(tmp_path, _short_alone, runs=False) as (client, made):
        batch = await _handed_over(made, client, [line("short"), LONG], 1)
        made.storage.files.contents.delete(batch.input_file_id)
        made.run()
        batch = await asyncio.wait_for(ended(client, batch.id), 60)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "file_not_found")
        assert [result["custom_id"] for result in await results(client, batch.output_file_id)] == ["short"]


@pytest.mark.parametrize("way", ["cancelled", "expired"])
async def test_a_batch_of_a_removed_model_ends(tmp_path: Path, way: str) -> None:
    async with batching(tmp_path, runs=False) as (client, made):
        file_id = await upload(client, [line("a"), line("b")])
        made.storage.batches.add(
            StoredBatch(
                id="batch_1", tenant=NOBODY.name, key_id="", api="openai", endpoint=CHAT, model="retired",
                input_file_id=file_id, window_text="24h", created_s=made.clock(), expires_s=made.clock() + 86_400,
            )
        )  # fmt: skip
        if way == "cancelled":
            await client.batches.cancel("batch_1")
        else:
            made.clock.now_s += 86_401
        made.run()
        batch = await asyncio.wait_for(ended(client, "batch_1"), 60)
        assert (batch.status, batch.request_counts.failed) == (way, 2)
        assert not made.generate.jobs


async def test_a_line_without_a_result_does_not_end_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, failures = FolderContents.read, iter([OSError("bug")])

    def failing(contents: FolderContents, file_id: str, start: int, size: int) -> bytes:
        if size < 1000:  # a line, not the check of all
            for failure in failures:
                raise failure
        return read(contents, file_id, start, size)

    async with batching(tmp_path) as (client, made):
        monkeypatch.setattr(FolderContents, "read", failing)
        file_id = await upload(client, [line("a"), line("b")])
        batch: Any = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        while "stops until its lease ends" not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)
        made.clock.now_s += 31
        made.storage.changed.set()
        batch = await asyncio.wait_for(ended(client, batch.id), 60)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    assert "line 1 has no result" in caplog.text


async def test_a_failed_look_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.batch_runner.LOOK_S", 0.01)
    claim, failures = BatchStore.claim, iter([KeyError("bug"), OSError("disk")])

    def failing(store: BatchStore, *values: Any) -> Any:
        for failure in failures:
            raise failure
        return claim(store, *values)

    monkeypatch.setattr(BatchStore, "claim", failing)
    async with batching(tmp_path) as (client, _):
        file_id = await upload(client, [line("a")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        assert (await asyncio.wait_for(ended(client, batch.id), 60)).status == "completed"


async def test_a_spent_budget_is_the_answer_of_a_line(tmp_path: Path) -> None:
    async with batching(tmp_path, lambda _: [BudgetExhausted("spent", retry_after_s=1e6)]) as (client, made):
        file_id = await upload(client, [line("a")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        batch = await asyncio.wait_for(ended(client, batch.id), 60)
        [entry] = await results(client, batch.error_file_id)
        assert entry["response"]["status_code"] == 429
        assert entry["response"]["body"]["error"]["code"] == "insufficient_quota"
        assert len(made.generate.jobs) == 1


async def test_a_killed_owner_leaves_each_line_exactly_once(tmp_path: Path) -> None:
    """Its successor computes lines without results; its own later results are refused."""
    gate, reached = asyncio.Event(), {number: asyncio.Event() for number in (14, 22)}
    begun = 0

    def script(job: Job) -> Any:
        nonlocal begun
        begun += 1
        if begun in reached:
            reached[begun].set()
        return [gate, *saying("hi")(job)] if begun > 10 and not gate.is_set() else saying("hi")(job)

    async with batching(tmp_path, script, runs=False) as (client, made):
        file_id = await upload(client, [line(str(number)) for number in range(30)])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        made.run(max_running=4)
        await reached[14].wait()  # ten lines are done, four hang
        other = made.opened()
        made.clock.now_s += 31  # the lease is over, while the first owner hangs
        made.run(storage=other)
        await reached[22].wait()
        gate.set()  # both owners go on
        batch = await ended(client, batch.id)
        assert batch.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
        ids = [result["custom_id"] for result in await results(client, batch.output_file_id)]
        assert ids == [str(number) for number in range(30)]
        await made.close()
        other.close()


@pytest.mark.parametrize(("error", "tries"), [(WorkerLost("gone"), 2), (Internal("bug"), 1)])
async def test_a_line_that_fails_for_good_has_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BatonError, tries: int
) -> None:
    monkeypatch.setattr("router.batches.batch_runner.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("router.batches.batch_runner.MAX_ATTEMPTS", 2)
    ledger = RequestLedger(
        LedgerStore(ledger_database(tmp_path / "ledger.db")), PriceList(prices=()), Crew(), model="tiny"
    )
    async with batching(tmp_path, lambda _: [error], ledger=ledger) as (client, made):
        file_id = await upload(client, [line("a")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        assert (await asyncio.wait_for(ended(client, batch.id), 60)).request_counts.failed == 1
        assert len(made.generate.jobs) == tries
    ledger.close()
    with closing(ledger_database(tmp_path / "ledger.db")) as database:
        [row] = sums(database, since_s=0, until_s=10**11, by=["outcome"])
    assert (row.group["outcome"], row.requests) == (error.code, 1)


async def test_requests_of_batches_cost_half_and_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.batch_runner.FIRST_PAUSE_S", 0.0)
    tries = 0

    def script(job: Job) -> Any:
        nonlocal tries
        tries += 1
        return [*list(saying("hi")(job))[:1], NoWorkers("none")] if tries == 1 else saying("hi")(job)

    usd = {"input": 1e6, "cached": 0.0, "output": 1e6}
    prices = PriceList(prices=(Price(since_s=0.0, model="*", usd=usd),))
    ledger = RequestLedger(LedgerStore(ledger_database(tmp_path / "ledger.db")), prices, Crew(), model="tiny")
    async with batching(tmp_path, script, ledger=ledger) as (client, _):
        file_id = await upload(client, [line("a"), line("b")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        usage = (await ended(client, batch.id)).usage
        await client.chat.completions.create(**line("c")["body"])
    ledger.close()
    with closing(ledger_database(tmp_path / "ledger.db")) as database:
        alone, ran = sums(database, since_s=0, until_s=10**11, by=["batch"])
    assert ([alone.group["batch"], ran.group["batch"]], alone.requests, ran.requests) == (["no", "yes"], 1, 2)
    assert ran.output_tokens == usage.output_tokens
    for row, share in ((alone, 1.0), (ran, 0.5)):
        assert row.charged_usd == pytest.approx(share * (row.input_tokens + row.output_tokens))


async def test_a_running_line_of_a_cancelled_batch_is_free(tmp_path: Path) -> None:
    begun = asyncio.Event()

    def script(job: Job) -> Any:
        begun.set()
        return [*list(saying("a few words")(job))[:3], asyncio.Event()]

    usd = {"input": 1e6, "cached": 1e6, "output": 1e6}
    prices = PriceList(prices=(Price(since_s=0.0, model="*", usd=usd),))
    ledger = RequestLedger(LedgerStore(ledger_database(tmp_path / "ledger.db")), prices, Crew(), model="tiny")
    async with batching(tmp_path, script, ledger=ledger) as (client, _):
        file_id = await upload(client, [line("a")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        await begun.wait()
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch.id)).status == "cancelled"
    await asyncio.to_thread(ledger.close)
    with closing(ledger_database(tmp_path / "ledger.db")) as database:
        [row] = sums(database, since_s=0, until_s=10**11, by=["batch", "outcome"])
    assert (row.group, row.requests, row.charged_usd) == ({"batch": "yes", "outcome": "cancelled"}, 1, 0.0)
    assert row.output_tokens > 0


@pytest.mark.parametrize("levels", [200, 300, 1000])
async def test_a_nested_body_is_its_own_lines_error(tmp_path: Path, levels: int) -> None:
    nested = b"[" * levels + b"]" * levels
    lines = jsonl([line("a"), line("deep", body={"model": "tiny", "messages": "NESTED"}), line("b")])
    async with batching(tmp_path) as (client, _):
        file = await client.files.create(file=("f", lines.replace(b'"NESTED"', nested)), purpose="batch")
        batch: Any = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch = await asyncio.wait_for(ended(client, batch.id), 60)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1)
        [failed] = await results(client, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("deep", 400)
        await client.files.delete(batch.input_file_id)


@pytest.mark.parametrize("way", ["completed", "cancelled"])
async def test_a_batch_that_always_fails_ends_after_a_few_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    failures: list[str] = []

    def failing(*_: Any, **__: Any) -> Any:
        failures.append("bug")
        raise RecursionError("bug")

    monkeypatch.setattr("router.batches.batch_runner.LOOK_S", 0.01)
    monkeypatch.setattr("router.batches.lines.InputChecker.read", failing)
    async with batching(tmp_path, runs=False) as (client, made):
        file_id = await upload(client, [line("a")])
        batch: Any = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        if way == "cancelled":
            await client.batches.cancel(batch.id)
        made.run()
        async with asyncio.timeout(60):
            while batch.status not in ("failed", "cancelled"):
                made.clock.now_s += 10
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
        assert batch.errors.data[0].code == "internal_error"
        assert len(failures) == (MAX_FAILURES if way == "completed" else 1)
