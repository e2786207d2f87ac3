"""Rows that had ended when their process was killed, or when the database was away: SQLite and Postgres."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest

from router.observe.ledger import ledger_store as store_module
from router.observe.ledger.journal import RowJournal
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.rows import OpenRequest
from tests.contract.postgres_server import PostgresServer
from tests.contract.test_ledger_store import ROW, Where, rows, summed


def end_and_be_killed(where: Where, folder: Path, written: Synchronized[int]) -> None:
    store_module.GATHER_S = 3600.0
    store = LedgerStore(ledger_database(where), journal=RowJournal(folder))
    store.write(OpenRequest(row=replace(ROW, request_id="noted", outcome="gateway_lost", output_tokens=7)))
    for name in ("noted", "just ended"):
        store.write(replace(ROW, request_id=name, output_tokens=9))
    written.value = 1
    time.sleep(3600)


def test_ended_requests_of_a_killed_process_are_counted(ledger_at: Where, tmp_path: Path) -> None:
    """Once, though the next ones look for it at the same time; a torn row at the end costs nothing."""
    context, folder = multiprocessing.get_context("fork"), tmp_path / "rows"
    written = context.Value("i", 0)
    process = context.Process(target=end_and_be_killed, args=(ledger_at, folder, written), daemon=True)
    process.start()
    alive = LedgerStore(ledger_database(ledger_at), journal=RowJournal(folder))
    try:
        deadline = time.monotonic() + 60
        while not written.value:
            assert time.monotonic() < deadline
        assert alive.recover() == 0, "it lives"
    finally:
        process.kill()
        process.join()
    [left] = [path for path in folder.iterdir() if path.read_bytes().strip(b"\0")]
    data, end = left.read_bytes(), 0
    while size := int.from_bytes(data[end : end + 4], "little"):
        end += 8 + size
    left.write_bytes(data[:end] + b"\x40\0\0\0torn")
    other = LedgerStore(ledger_database(ledger_at), journal=RowJournal(folder))
    assert sum([alive.recover(), other.recover()]) == 2
    for store in (alive, other, other):
        store.close()
    assert rows(ledger_at) == ["just ended", "noted"]
    [row] = summed(ledger_at, since_s=int(ROW.at_s), until_s=int(ROW.at_s) + 1, by=("outcome",))
    assert (row.group["outcome"], row.requests, row.output_tokens) == ("ok", 2, 18)
    assert list(folder.iterdir()) == []


def unwritten(path: Path) -> bool:
    return any(path.read_bytes()[:8])


def test_a_journal_has_only_unwritten_rows(ledger_at: Where, tmp_path: Path) -> None:
    store = LedgerStore(ledger_database(ledger_at), journal=RowJournal(tmp_path / "rows"))
    for number in range(3):
        store.write(replace(ROW, request_id=f"r{number}"))
        while store.outcomes["written"] <= number or any(map(unwritten, (tmp_path / "rows").iterdir())):
            time.sleep(0.001)
    store.close()
    assert len(rows(ledger_at)) == 3


def test_rows_of_an_outage_wait_for_the_next_process(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CLOSE_S", 0.5)
    monkeypatch.setattr(store_module, "RETRY_S", 0.1)
    store = LedgerStore(ledger_database(postgres_url), journal=RowJournal(tmp_path / "rows"))
    postgres.kill()
    store.write(ROW)
    store.close()
    postgres.start()
    again = LedgerStore(ledger_database(postgres_url), journal=RowJournal(tmp_path / "rows"))
    assert again.recover() == 1
    again.close()
    assert rows(postgres_url) == [ROW.request_id]
