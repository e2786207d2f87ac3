"""Rows are in the database once, from several processes, and after a process was killed: SQLite and Postgres."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from protos.errors import InvalidRequest, Misconfigured, Unavailable
from router.database.database import Transaction
from router.observe.ledger import ledger_store as store_module
from router.observe.ledger.ledger_report import CostReport, UsageSum, costs, spent_by_tenant, sums
from router.observe.ledger.ledger_store import LOST_S, LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import Price, PriceList
from router.observe.ledger.rows import FleetMinute, LedgerRow, OpenRequest, WorkerCount

DAY = 86_400
ROW = LedgerRow(
    request_id="r", at_s=DAY * 20_000.0, seconds=1.5, tenant="acme", key_id="sha256:00", model="demo",
    endpoint="completions", outcome="ok", input_tokens=100, cached_tokens=50, output_tokens=20, reasoning_tokens=5,
    prefill_device_s=0.25, decode_device_s=0.75, charged_usd=0.001,
)  # fmt: skip


Where = Path | str


def rows(where: Where) -> list[str]:
    with closing(ledger_database(where)) as database, database.reading() as transaction:
        return sorted(row["request_id"] for row in transaction.run("SELECT request_id FROM requests"))


def store_at(where: Where, clock: Callable[[], float] | None = None) -> LedgerStore:
    return LedgerStore(ledger_database(where), clock)


def summed(where: Where, **asked: Any) -> list[UsageSum]:
    with closing(ledger_database(where)) as database:
        return sums(database, **asked)


def cost(where: Where, prices: PriceList, **asked: Any) -> CostReport:
    with closing(ledger_database(where)) as database:
        return costs(database, prices, **asked)


def later() -> float:
    """When a process that wrote something at the start of the test is silent for too long."""
    return time.time() + LOST_S + 1


def test_a_row_is_written_once(ledger_at: Where) -> None:
    store = store_at(ledger_at)
    for number in (1, 2, 2, 1):
        store.write(replace(ROW, request_id=f"r{number}"))
    store.close()
    again = store_at(ledger_at)
    again.write(replace(ROW, request_id="r1"))
    again.close()
    assert rows(ledger_at) == ["r1", "r2"]
    assert store.outcomes == {"written": 4, "dropped": 0, "recovered": 0, "deleted": 0}
    found = summed(ledger_at, since_s=int(ROW.at_s), until_s=int(ROW.at_s) + 3600)
    assert [row.requests for row in found] == [2], "the sums count it once, too"


def keep_writing(where: Where, name: str) -> None:
    store = store_at(where)
    for number in range(10**9):
        store.write(replace(ROW, request_id=f"{name}-{number}"))
        time.sleep(0.001)


def test_a_killed_process_leaves_its_rows_to_others(ledger_at: Where) -> None:
    store_at(ledger_at).close()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=keep_writing, args=(ledger_at, name), daemon=True) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    try:
        deadline = time.monotonic() + 60
        while len({name[0] for name in rows(ledger_at)}) < 2:
            assert time.monotonic() < deadline
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    left = rows(ledger_at)
    for name in ("a", "b"):
        numbers = sorted(int(line.partition("-")[2]) for line in left if line.startswith(name))
        assert numbers == list(range(len(numbers))), "none is missing before the last one"
    store = store_at(ledger_at)
    store.write(replace(ROW, request_id="after"))
    store.close()
    assert "after" in rows(ledger_at)


def test_an_invalid_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(Misconfigured, match=r"router\.ledger\.path: .*text: file is not a database: give a file"):
        ledger_database(tmp_path / "text")
    with pytest.raises(Misconfigured, match="No such file"):
        ledger_database(tmp_path / "missing" / "ledger.db")


def test_a_new_file_may_be_opened_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself does not wait for another process that writes in a file without a write-ahead log."""
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr("router.database.sqlite.time.sleep", lambda _: other.execute("COMMIT"))
        ledger_database(tmp_path / "ledger.db").close()
        assert not other.in_transaction


@pytest.fixture
def ledger(ledger_at: Where) -> Where:
    """Two tenants on two days; a fleet of three devices for two minutes."""
    store = store_at(ledger_at)
    for number in range(6):
        day, tenant = divmod(number, 3)
        store.write(
            replace(ROW, request_id=f"r{number}", at_s=ROW.at_s + DAY * day, tenant="acme" if tenant else "other")
        )
    store.write(FleetMinute(minute=20_000 * 1440, devices=3))
    store.write(FleetMinute(minute=20_000 * 1440 + 1, devices=3))
    store.write(FleetMinute(minute=20_000 * 1440 + 1, devices=2))
    store.close()
    return ledger_at


def test_sums_are_by_group_and_day(ledger: Where) -> None:
    start_s = 20_000 * DAY
    found = summed(ledger, since_s=start_s, until_s=start_s + 2 * DAY, by=("tenant",), bucket_s=DAY)
    shown = [(row.start_s, row.group["tenant"], row.requests, row.input_tokens, row.output_tokens) for row in found]
    assert shown == [
        (start_s, "acme", 2, 200, 40), (start_s, "other", 1, 100, 20),
        (start_s + DAY, "acme", 2, 200, 40), (start_s + DAY, "other", 1, 100, 20),
    ]  # fmt: skip
    assert summed(ledger, since_s=0, until_s=start_s) == []
    with pytest.raises(InvalidRequest, match="by=secret: give some of tenant"):
        summed(ledger, since_s=0, until_s=1, by=("secret",))


def test_cost_is_use_plus_idle_time(ledger: Where) -> None:
    prices = PriceList(device_hour=3600.0, prices=(Price(since_s=0.0, model="*", usd={}),))
    report = cost(ledger, prices, since_s=20_000 * DAY, until_s=20_001 * DAY, by=("tenant",))
    assert report.fleet_device_s == 3 * 60 * 2
    assert {row.group["tenant"]: report.cost_usd(row) for row in report.rows} == {"acme": 2.0, "other": 1.0}
    assert report.fleet_usd == 360.0
    assert report.idle_usd == pytest.approx(357.0)


def test_each_kind_of_tokens_has_its_charge_and_cost(ledger_at: Where) -> None:
    """Rows of earlier versions have no charges by kind."""
    store = store_at(ledger_at)
    kinds: dict[str, Any] = {"charged_input_usd": 0.25, "charged_cached_usd": 0.125, "charged_output_usd": 0.5}
    for number, charged in enumerate(({"charged_usd": 0.875} | kinds, {"charged_usd": 2.0})):
        store.write(replace(ROW, request_id=f"r{number}", **charged))
    store.close()
    prices = PriceList(device_hour=3600.0, prices=())
    report = cost(ledger_at, prices, since_s=20_000 * DAY, until_s=20_001 * DAY, by=("kind", "tenant"))
    assert report.rows[0].group == {"tenant": "acme", "kind": "input"}
    tokens = [row.input_tokens + row.cached_tokens + row.output_tokens for row in report.rows]
    shown = {
        row.group["kind"]: (num_tokens, row.charged_usd, report.cost_usd(row))
        for num_tokens, row in zip(tokens, report.rows, strict=True)
    }
    assert shown == {
        "input": (200, 0.25, 0.5), "cached": (100, 0.125, 0.0), "output": (40, 0.5, 1.5), "unknown": (0, 2.0, 0.0),
    }  # fmt: skip
    whole = cost(ledger_at, prices, since_s=20_000 * DAY, until_s=20_001 * DAY, by=())
    assert (whole.idle_usd, whole.fleet_usd) == (report.idle_usd, report.fleet_usd)


def test_the_devices_of_several_models_are_added_up(ledger_at: Where) -> None:
    store = store_at(ledger_at)
    for model, devices in (("big", 4), ("small", 1), ("big", 2)):
        store.write(FleetMinute(minute=7, devices=devices, model=model))
    store.close()
    prices = PriceList(device_hour=3600.0, prices=())
    report = cost(ledger_at, prices, since_s=0, until_s=3600, by=())
    assert report.fleet_device_s == 60 * 5


def test_workers_counts_are_reported_beside_the_rows(ledger_at: Where) -> None:
    """One worker ran before the ledger, one restarts, and two gateways look at different times."""
    store, minute = store_at(ledger_at), int(ROW.at_s) // 60
    for worker, incarnation, after, prompt, output in (
        ("decode-0", 1, 0, 7_000, 5_000), ("decode-0", 1, 2, 7_100, 5_020), ("decode-0", 1, 2, 7_050, 5_010),
        ("decode-0", 2, 3, 0, 0), ("decode-0", 2, 3, 10, 4), ("decode-1", 9, 0, 0, 0), ("decode-1", 9, 200, 0, 30),
    ):  # fmt: skip
        count = WorkerCount(
            worker=worker, incarnation=incarnation, minute=minute + after, prompt_tokens=prompt, output_tokens=output,
            before=(7_000, 5_000) if incarnation == 1 else (0, 0),
        )  # fmt: skip
        store.write(count)
    store.write(ROW)
    store.close()
    begun = minute * 60

    def computed(since_s: int, until_s: int) -> tuple[int, int, int]:
        report = cost(ledger_at, PriceList(), since_s=since_s, until_s=until_s, by=())
        return report.worker_prompt_tokens, report.worker_output_tokens, report.unrecorded_output_tokens

    assert computed(begun, begun + 3600) == (110, 24, 24 - ROW.output_tokens)
    assert computed(begun + 60, begun + 3600)[:2] == (110, 24), "counts go on from those of earlier minutes"
    assert computed(begun + 180, begun + 86_400)[:2] == (10, 34)
    assert computed(begun - 3600, begun) == (0, 0, 0)


@pytest.mark.parametrize("bucket_s", [None, 1800, 3600, DAY])
def test_sums_of_days_and_hours_equal_those_of_requests(ledger_at: Where, bucket_s: int | None) -> None:
    """Whatever part of a day or an hour a report begins or ends with."""
    store, start_s = store_at(ledger_at), 20_000 * DAY
    times = [start_s + 9770.0 * number for number in range(60)]
    for number, at_s in enumerate(times):
        store.write(replace(ROW, request_id=f"r{number}", at_s=at_s, output_tokens=number, tenant=f"t{number % 2}"))
    store.close()
    for since_s, until_s in ((0, 500_000), (1, 499_999), (3599, 7201), (1800, 2000), (3600, 3600 * 90), (9770, DAY)):
        found = summed(
            ledger_at, since_s=start_s + since_s, until_s=start_s + until_s, by=("tenant",),
            bucket_s=bucket_s,
        )  # fmt: skip
        width = bucket_s or until_s - since_s
        expected: dict[tuple[int, str], int] = {}
        for number, at_s in enumerate(times):
            if start_s + since_s <= at_s < start_s + until_s:
                bucket = start_s + since_s + int(at_s - start_s - since_s) // width * width
                key = bucket, f"t{number % 2}"
                expected[key] = expected.get(key, 0) + number
        assert {(row.start_s, row.group["tenant"]): row.output_tokens for row in found} == expected


def test_a_database_of_an_earlier_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE requests (request_id TEXT NOT NULL, at_s NUMERIC NOT NULL, seconds NUMERIC NOT NULL, tenant "
            "TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL, outcome TEXT NOT NULL, "
            "input_tokens NUMERIC NOT NULL, cached_tokens NUMERIC NOT NULL, output_tokens NUMERIC NOT NULL, "
            "reasoning_tokens NUMERIC NOT NULL, prefill_device_s NUMERIC NOT NULL, decode_device_s NUMERIC NOT NULL, "
            "charged_usd NUMERIC NOT NULL, PRIMARY KEY (request_id)) WITHOUT ROWID"
        )
        row = (ROW.request_id, ROW.at_s, 1.5, "acme", "k", "demo", "chat", "ok", 100, 50, 20, 5, 0.25, 0.75, 0.001)
        database.execute(f"INSERT INTO requests VALUES ({', '.join('?' * len(row))})", row)
        database.execute(
            "CREATE TABLE fleet_devices (minute BIGINT NOT NULL, devices BIGINT NOT NULL, model TEXT NOT NULL, "
            "PRIMARY KEY (minute, model)) WITHOUT ROWID"
        )
        database.execute("INSERT INTO fleet_devices VALUES (?, 3, 'demo')", (20_000 * 1440,))
    store = store_at(path)
    store.write(replace(ROW, request_id="new"))
    store.close()
    prices = PriceList(device_hour=3600.0, prices=())
    report = cost(path, prices, since_s=20_000 * DAY, until_s=20_001 * DAY, by=())
    assert [(row.requests, row.output_tokens) for row in report.rows] == [(2, 40)]
    assert report.fleet_device_s == 180.0
    with closing(ledger_database(path)) as migrated:
        assert spent_by_tenant(migrated, 20_000 * DAY) == {"acme": pytest.approx(0.002)}
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]  # in SQLite 3.40 it was NULLs


def test_a_postgres_of_an_earlier_version_is_brought_up_to_date(postgres_url: str) -> None:
    first = store_at(postgres_url)
    first.write(ROW)
    first.close()
    with closing(ledger_database(postgres_url)) as database, database.writing() as transaction:
        for table in ("requests", "open_requests"):
            for name in ("drafted_tokens", "price"):
                transaction.run(f"ALTER TABLE {table} DROP COLUMN {name}")
        for table in ("days", "hours"):
            transaction.run(f"ALTER TABLE {table} DROP COLUMN drafted_tokens")
    store = store_at(postgres_url)
    store.write(replace(ROW, request_id="new", drafted_tokens=4, price="2026-01-01 *"))
    store.close()
    [row] = summed(postgres_url, since_s=int(ROW.at_s), until_s=int(ROW.at_s) + DAY)
    assert (row.requests, row.output_tokens, row.drafted_tokens) == (2, 40, 4)


def answer_and_be_killed(where: Where, written: Synchronized[int]) -> None:
    store = store_at(where)
    store.write(OpenRequest(row=replace(ROW, request_id="long", outcome="gateway_lost", output_tokens=7)))
    store.write(OpenRequest(row=replace(ROW, request_id="long", outcome="gateway_lost", output_tokens=9)))
    store.write(OpenRequest(row=replace(ROW, request_id="short", outcome="gateway_lost", output_tokens=3)))
    store.write(replace(ROW, request_id="short", output_tokens=4))
    while store.outcomes["written"] < 1:
        time.sleep(0.001)
    written.value = 1
    time.sleep(3600)


def test_running_requests_of_a_killed_process_are_counted(ledger_at: Where) -> None:
    context = multiprocessing.get_context("fork")
    written = context.Value("i", 0)
    process = context.Process(target=answer_and_be_killed, args=(ledger_at, written), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + 60
        while not written.value:
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.join()
    early = store_at(ledger_at)
    assert early.recover() == 0, "it may still answer"
    early.close()
    store = store_at(ledger_at, later)
    assert store.recover() == 1
    assert store.recover() == 0
    store.close()
    found = summed(ledger_at, since_s=int(ROW.at_s), until_s=int(ROW.at_s) + 1, by=("outcome",))
    assert {row.group["outcome"]: row.output_tokens for row in found} == {"gateway_lost": 9, "ok": 4}
    assert store.outcomes["recovered"] == 1


def test_a_frozen_process_replaces_its_estimated_rows(ledger_at: Where) -> None:
    """In the sums, too, of days and of hours, and once."""
    final = replace(ROW, output_tokens=30)
    frozen = store_at(ledger_at)
    frozen.write(OpenRequest(row=replace(ROW, outcome="gateway_lost", output_tokens=9)))
    frozen.write(replace(ROW, request_id="other", outcome="gateway_lost"))
    frozen.close()
    other = store_at(ledger_at, later)
    assert other.recover() == 1
    for row in (final, replace(final, output_tokens=31), replace(final, outcome="gateway_lost")):
        other.write(row)
    other.close()
    for width_s in (3600, DAY):
        start_s = int(ROW.at_s) // DAY * DAY
        found = summed(ledger_at, since_s=start_s, until_s=start_s + width_s, by=("outcome",))
        shown = {row.group["outcome"]: (row.requests, row.output_tokens, row.input_tokens) for row in found}
        assert shown == {"ok": (1, 30, 100), "gateway_lost": (1, 20, 100)}


def test_a_bug_costs_its_own_row_only(
    ledger_at: Where, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_all = LedgerStore._write_all

    def buggy(store: LedgerStore, transaction: Any, rows: Any, ended: Any) -> None:
        if any(row.request_id == "odd" for row in ended):
            raise ZeroDivisionError("a bug")
        write_all(store, transaction, rows, ended)

    monkeypatch.setattr(LedgerStore, "_write_all", buggy)
    store = store_at(ledger_at)
    for name in ("before", "odd", "after"):
        store.write(replace(ROW, request_id=name))
    while store.outcomes["dropped"] < 1:
        time.sleep(0.001)
    store.write(replace(ROW, request_id="later"))
    store.close()
    assert rows(ledger_at) == ["after", "before", "later"]
    assert "ZeroDivisionError: a bug" in caplog.text
    assert store.outcomes["dropped"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_tokens": 1 << 70},
        {"tenant": "\ud800"},
        {"charged_usd": float("nan")},
        {"tenant": None},
        {"decode_device_s": float("inf")},
        {"decode_device_s": -float("inf")},
    ],
)
def test_a_row_that_cannot_be_written_is_dropped_alone(ledger_at: Where, wrong: dict[str, Any]) -> None:
    store = store_at(ledger_at)
    for name, changes in (("before", {}), ("wrong", wrong), ("after", {})):
        store.write(replace(ROW, request_id=name, **changes))
    store.close()
    assert rows(ledger_at) == ["after", "before"]
    assert (store.outcomes["written"], store.outcomes["dropped"]) == (2, 1)


def test_a_failed_note_is_not_a_dropped_row(ledger_at: Where) -> None:
    store = store_at(ledger_at)
    store.write(OpenRequest(row=replace(ROW, outcome="gateway_lost", output_tokens=1 << 70)))
    store.write(ROW)
    store.close()
    assert (rows(ledger_at), store.outcomes["written"], store.outcomes["dropped"]) == (["r"], 1, 0)


class AwayDatabase:
    """Cannot be written for `tries` more times."""

    trouble = ""

    def __init__(self, where: Where, tries: int) -> None:
        self._database = ledger_database(where)
        self.now_s, self.reading, self.close = self._database.now_s, self._database.reading, self._database.close
        self.tries = tries
        self.num_failed = 0

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        if self.num_failed < self.tries:
            self.num_failed += 1
            raise Unavailable("the database is away")
        with self._database.writing() as transaction:
            yield transaction


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_store_that_is_closed_waits_for_its_database(ledger_at: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    store = LedgerStore(AwayDatabase(ledger_at, 3))
    store.write(ROW)
    store.close()
    assert (rows(ledger_at), store.outcomes["dropped"]) == (["r"], 0)


def test_rows_that_a_closed_store_could_not_write_are_counted(
    ledger_at: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CLOSE_S", 0.1)
    store = LedgerStore(AwayDatabase(ledger_at, 10**9))
    store.write(ROW)
    store.close()
    until(lambda: store.outcomes["dropped"] == 1)
    store.write(replace(ROW, request_id="late"))
    assert store.outcomes["dropped"] == 2
    assert rows(ledger_at) == []


def test_notes_take_no_room_of_rows_while_the_database_is_away(
    ledger_at: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    monkeypatch.setattr(store_module, "MAX_QUEUED", 100)
    database = AwayDatabase(ledger_at, 10**9)
    store = LedgerStore(database)
    store.write(ROW)
    until(lambda: database.num_failed > 1)
    for number in range(200):
        store.write(OpenRequest(row=replace(ROW, request_id="open", outcome="gateway_lost", output_tokens=number)))
    store.write(replace(ROW, request_id="ended"))
    database.tries = 0
    store.close()
    assert (rows(ledger_at), store.outcomes["dropped"]) == (["ended", "r"], 0)


def test_a_process_frozen_then_killed_is_counted(ledger_at: Where) -> None:
    for output_tokens, has_more in ((9, 1), (30, 1), (20, 0)):
        frozen = store_at(ledger_at)
        frozen.write(OpenRequest(row=replace(ROW, outcome="gateway_lost", output_tokens=output_tokens)))
        frozen.close()
        other = store_at(ledger_at, later)
        assert other.recover() == has_more
        other.close()
    [row] = summed(ledger_at, since_s=int(ROW.at_s), until_s=int(ROW.at_s) + DAY, by=("outcome",))
    assert (row.group["outcome"], row.requests, row.output_tokens) == ("gateway_lost", 1, 30)
