"""Rows that are older than they are kept are deleted, and reports say the same as before: SQLite and Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from protos.errors import InvalidRequest, Misconfigured
from router.observe.ledger import ledger_store as store_module
from router.observe.ledger import retention
from router.observe.ledger.ledger_report import CostReport, UsageSum, costs, spent_by_tenant, sums
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import GROUPS, ledger_database
from router.observe.ledger.organization import PageQuery, costs_page
from router.observe.ledger.prices import PriceList
from router.observe.ledger.rows import FleetMinute, LedgerRow, WorkerCount
from router.router_config import LedgerConfig

Where = Path | str
HOUR, DAY = 3600, 86_400
START = 20_000 * DAY
NUM_DAYS = 6
PRICES = PriceList(device_hour=3600.0, prices=())
ROW = LedgerRow(
    request_id="r", at_s=START, seconds=1.5, tenant="acme", key_id="sha256:00", model="demo",
    endpoint="completions", outcome="ok", input_tokens=100, cached_tokens=50, output_tokens=20, reasoning_tokens=5,
    prefill_device_s=0.25, decode_device_s=0.75, charged_usd=0.5, price="2026-01-01 *",
    charged_input_usd=0.125, charged_cached_usd=0.125, charged_output_usd=0.25,
)  # fmt: skip


def today() -> float:
    return START + NUM_DAYS * DAY + 0.5 * HOUR


@pytest.fixture
def ledger(ledger_at: Where) -> Where:
    """Six days of two tenants, a changing fleet and two workers, one of which restarts; each has counts from before a
    gateway met it."""
    store = LedgerStore(ledger_database(ledger_at))
    for number in range(NUM_DAYS * 48):
        at_s, tenant = START + 1800.0 * number + number, f"t{number % 2}"
        store.write(replace(ROW, request_id=f"r{number}", at_s=at_s, tenant=tenant, output_tokens=number))
    for number in range(0, NUM_DAYS * 1440, 7):
        minute = START // 60 + number
        store.write(FleetMinute(minute=minute, devices=1 + number // 500, model="demo"))
        for worker, met, starts in (("w0", (900, 90), ((0, 10**9),)), ("w1", (5, 5), ((0, 4000), (4001, 10**9)))):
            for incarnation, (first, last) in enumerate(starts):
                if first <= number <= last:
                    before = met if not incarnation else (0, 0)
                    tokens = {"prompt_tokens": before[0] + 3 * (number - first), "output_tokens": before[1] + number}
                    store.write(
                        WorkerCount(worker=worker, incarnation=incarnation, minute=minute, before=before, **tokens)
                    )
    store.close()
    return ledger_at


def delete_old(where: Where, *, keep_days: int = 2) -> int:
    """All that is due, by two gateways in turn. Returns how many rows were deleted."""
    stores = [LedgerStore(ledger_database(where), today, keep_days=keep_days) for _ in range(2)]
    while sum([store.delete_old() for store in stores]):
        pass
    for store in stores:
        store.close()
    return sum(store.outcomes["deleted"] for store in stores)


def reports(where: Where) -> tuple[Sequence[Sequence[UsageSum]], Sequence[CostReport], dict[str, float]]:
    """The hourly report by every selection."""
    times = [START, START + 5 * HOUR, START + DAY, START + 3 * DAY + HOUR, START + 5 * DAY, START + NUM_DAYS * DAY]
    with closing(ledger_database(where)) as database:
        answers = [
            sums(database, since_s=since_s, until_s=until_s, by=by, bucket_s=bucket_s)
            for since_s, until_s in pairwise([*times, START + 7 * DAY])
            for by in ((), ("tenant",), ("kind", "tenant"), GROUPS)
            for bucket_s in (None, HOUR, DAY)
        ]
        told = [
            replace(costs(database, PRICES, since_s=since_s, until_s=until_s, by=("tenant",)), rows_from=0)
            for since_s, until_s in [*pairwise(times), (times[0], times[-1]), (times[1], times[-2])]
        ]
        return answers, told, spent_by_tenant(database, START + DAY)


def count(where: Where, table: str) -> int:
    with closing(ledger_database(where)) as database, database.reading() as transaction:
        return int(transaction.run(f"SELECT count(*) AS number FROM {table}")[0]["number"])


def test_reports_of_whole_hours_are_the_same_without_the_rows(ledger: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reports(ledger)
    assert before[1][0].worker_output_tokens > 0
    monkeypatch.setattr(retention, "CHUNK", 50)
    assert delete_old(ledger) >= 4 * 48
    assert reports(ledger) == before
    assert count(ledger, "requests") == 2 * 48
    assert count(ledger, "model_devices") <= 4 * 24 + 2 * 206
    assert count(ledger, "worker_tokens") <= 2 * (4 * 24 + 1) + 2 * 2 * 206
    assert delete_old(ledger) == 0


def test_a_report_says_from_when_on_requests_are_kept(ledger: Where) -> None:
    delete_old(ledger)
    kept_s = START + 4 * DAY
    with closing(ledger_database(ledger)) as database:
        report = costs(database, PRICES, since_s=START + HOUR + 17, until_s=START + 2 * HOUR + 1, by=())
        assert (report.rows_from, report.since, report.until) == (kept_s, START + HOUR, START + 3 * HOUR)
        assert [row.requests for row in report.rows] == [4]
        recent = costs(database, PRICES, since_s=kept_s + 17, until_s=kept_s + HOUR + 1, by=())
        assert (recent.since, recent.until) == (kept_s + 17, kept_s + HOUR + 1)
        day = "2024-10-08"
        for asked in ({"bucket_s": 60}, {"until_s": START + 90}):
            times: dict[str, Any] = {"since_s": START, "until_s": START + DAY}
            with pytest.raises(InvalidRequest, match=f"single requests are kept from {day} on: before, ask for whole"):
                sums(database, **(times | asked))


def test_a_page_ending_within_an_hour_includes_all_before(ledger: Where) -> None:
    delete_old(ledger)
    with closing(ledger_database(ledger)) as database:
        asked = PageQuery(start_s=START, end_s=START + 2 * HOUR + 7, width_s=DAY, count=7, by=())
        [bucket] = costs_page(database, asked)["data"]
    assert bucket["results"][0]["amount"]["value"] == 6 * 0.5


def test_a_page_without_buckets_is_empty_before_that_time_too(ledger: Where) -> None:
    delete_old(ledger)
    with closing(ledger_database(ledger)) as database:
        asked = PageQuery(start_s=START, end_s=START, width_s=DAY, count=7, by=())
        assert costs_page(database, asked)["data"] == []


def test_a_negative_number_of_days_is_refused() -> None:
    """It would delete today's rows."""
    with pytest.raises(Misconfigured, match="keep_days"):
        LedgerConfig(keep_days=-1)


def test_nothing_is_deleted_where_rows_are_kept_for_ever(ledger: Where) -> None:
    assert delete_old(ledger, keep_days=0) == 0
    assert delete_old(ledger, keep_days=400) == 0
    assert count(ledger, "requests") == NUM_DAYS * 48


def change_sums(where: Where, change: str) -> None:
    with closing(ledger_database(where)) as database, database.writing() as transaction:
        for table in ("days", "hours"):
            on = " ON requests" if transaction.dialect == "postgres" else ""
            for trigger in (f"count_{table}", f"move_{table}"):
                transaction.run(f"DROP TRIGGER {trigger}{on}")
            for statement in change.split("; "):
                transaction.run(statement.format(table=table))


def test_a_later_version_keeps_the_sums_of_deleted_rows(ledger: Where) -> None:
    """A version with further columns."""
    before = reports(ledger)
    delete_old(ledger)
    change_sums(ledger, "ALTER TABLE {table} DROP COLUMN drafted_tokens")
    assert reports(ledger) == before
    store = LedgerStore(ledger_database(ledger))
    store.write(replace(ROW, request_id="new", at_s=today()))
    store.close()
    with closing(ledger_database(ledger)) as database:
        [row] = sums(database, since_s=START + NUM_DAYS * DAY, until_s=START + NUM_DAYS * DAY + HOUR)
    assert row.requests == 1


def test_a_later_version_may_come_while_rows_are_deleted(ledger: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reports(ledger)
    monkeypatch.setattr(retention, "CHUNK", 10)
    monkeypatch.setattr(store_module, "MAX_CHUNKS", 1)
    store = LedgerStore(ledger_database(ledger), today, keep_days=2)
    assert store.delete_old()
    store.close()
    assert count(ledger, "requests") == NUM_DAYS * 48 - 10
    change_sums(ledger, "ALTER TABLE {table} DROP COLUMN drafted_tokens")
    assert reports(ledger) == before
    assert delete_old(ledger)
    assert reports(ledger) == before


def test_an_earlier_version_adds_up_the_groups_that_it_has_not(ledger: Where) -> None:
    before = reports(ledger)
    delete_old(ledger)
    change_sums(
        ledger,
        "CREATE TABLE more AS SELECT * FROM {table}; DROP TABLE {table}; "
        "CREATE TABLE {table} AS SELECT *, 'a' AS region FROM more UNION ALL SELECT *, 'b' AS region FROM more; "
        "DROP TABLE more",
    )
    with closing(ledger_database(ledger)) as database:
        [row] = sums(database, since_s=START, until_s=START + 5 * HOUR)
    [once] = before[0][0]
    assert (row.requests, row.output_tokens) == (2 * once.requests, 2 * once.output_tokens)
