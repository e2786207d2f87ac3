"""How long reports of a month of a million requests take, and how much CPU time a row costs its writer.

    python -m benchmarks.ledger.month --rows 1000000

Twenty tenants with two keys each, two models, two endpoints; 2 % of the requests fail. Times are the shortest of five.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from router.database.database import Database
from router.observe.ledger.ledger_report import spent_by_tenant, sums
from router.observe.ledger.ledger_store import columns_of
from router.observe.ledger.ledger_tables import INSERT_ROW, ledger_database
from router.observe.ledger.rows import LedgerRow

DAY_S, DAYS = 86_400, 30
START_S = 20_758 * DAY_S  # 2026-11-01
NUM_TENANTS = 20
AT_ONCE = 50  # rows of a transaction
NUM_TIMED = 50_000  # rows whose writes are timed: the last ones
LOAD_AT_ONCE = 20_000  # rows of a transaction, before those


def made(count: int, rng: random.Random) -> Iterator[LedgerRow]:
    for number in range(count):
        tenant = rng.randrange(NUM_TENANTS)
        yield LedgerRow(
            request_id=f"chatcmpl-{rng.getrandbits(128):032x}", at_s=START_S + number * DAYS * DAY_S / count,
            seconds=1.0, tenant=f"tenant-{tenant}", key_id=f"key-{tenant}-{rng.randrange(2)}",
            model=rng.choice(("large", "small")), endpoint=rng.choice(("chat.completions", "messages")),
            outcome="ok" if rng.random() < 0.98 else "overloaded", input_tokens=rng.randrange(4000),
            cached_tokens=rng.randrange(1000), output_tokens=rng.randrange(800), reasoning_tokens=0,
            prefill_device_s=0.1, decode_device_s=0.2, charged_usd=0.001,
        )  # fmt: skip


def fill(database: Database, count: int) -> float:
    """Returns microseconds of CPU time per row: of the last `NUM_TIMED`, which are written as a gateway writes them."""
    rows = made(count, random.Random(7))
    timed = min(count, NUM_TIMED)
    write(database, islice(rows, count - timed), LOAD_AT_ONCE)
    return 1e6 * write(database, rows, AT_ONCE) / timed


def write(database: Database, rows: Iterator[LedgerRow], at_once: int) -> float:
    """Returns CPU seconds of the writes."""
    spent_s = 0.0
    while part := [columns_of(row) for row in islice(rows, at_once)]:
        begun_s = time.process_time()
        with database.writing() as transaction:
            transaction.run_many(INSERT_ROW, part)
        spent_s += time.process_time() - begun_s
    return spent_s


def measured(database: Database) -> dict[str, float]:
    """Milliseconds of each report."""
    month: dict[str, Any] = {"since_s": START_S, "until_s": START_S + DAYS * DAY_S}
    odd: dict[str, Any] = {"since_s": START_S + 77, "until_s": START_S + DAYS * DAY_S - 1234}
    reports: dict[str, Any] = {
        "by tenant": lambda: sums(database, by=("tenant",), **month),
        "by tenant, from a second to another": lambda: sums(database, by=("tenant",), **odd),
        "by key, model, endpoint and outcome": lambda: sums(
            database, by=("key_id", "model", "endpoint", "outcome"), **month
        ),
        "by tenant and day": lambda: sums(database, by=("tenant",), bucket_s=DAY_S, **month),
        "budgets": lambda: spent_by_tenant(database, START_S),
    }
    return {name: min(_ms(report) for _ in range(5)) for name, report in reports.items()}


def _ms(report: Any) -> float:
    begun_s = time.perf_counter()
    report()
    return 1000 * (time.perf_counter() - begun_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--database", default="", help="an empty Postgres database, instead of SQLite")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(ledger_database(asked.database or Path(folder) / "ledger.db")) as database,
    ):
        row_us = fill(database, asked.rows)
        found = measured(database)
    if asked.json:
        print(json.dumps({"rows": asked.rows, "write_us": row_us, "report_ms": found}))
        return
    print(f"{asked.rows:,} rows: {row_us:.1f} us of CPU each, {AT_ONCE} a transaction")
    for name, ms in found.items():
        print(f"{ms:8.1f} ms  {name}")


if __name__ == "__main__":
    main()
