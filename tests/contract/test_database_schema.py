"""A database of an earlier Baton is opened by a later one, and then refused by the earlier one: SQLite and Postgres."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from protos.errors import Misconfigured
from router.database.database import Database
from router.files import batch_storage
from router.files.batch_storage import open_storage
from router.observe.ledger import ledger_tables
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from tests.contract.test_batch_store import BATCH, FILE
from tests.contract.test_ledger_store import ROW


def ledger(where: Path, url: str) -> Database:
    return ledger_database(url or where / "ledger.db")


def batches(where: Path, url: str) -> Database:
    return open_storage(where, max_file_bytes=1 << 20, max_lines=100, database_url=url).database


@pytest.mark.parametrize(
    ("opened", "schema", "setting"),
    [
        (ledger, f"{ledger_tables.__name__}.SCHEMA", "router.ledger.path"),
        (batches, f"{batch_storage.__name__}.SCHEMA", "router.batch.folder"),
    ],
)
def test_tables_of_a_later_version_are_refused(
    opened: Callable[[Path, str], Database], schema: str, setting: str, database_url: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for _ in range(2):
        opened(tmp_path, database_url).close()
    with monkeypatch.context() as later:
        later.setattr(schema, 2)
        opened(tmp_path, database_url).close()
    with pytest.raises(Misconfigured) as refused:
        opened(tmp_path, database_url)
    assert refused.value.param == ("router.database" if database_url else setting)
    assert "schema 2" in refused.value.message
    assert "secret" not in refused.value.message
    assert "\n" not in refused.value.message


def test_an_earlier_version_that_runs_goes_on_beside_a_later_one(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rolling upgrade gateways of both write into one database."""
    where = database_url or tmp_path / "ledger.db"
    earlier = LedgerStore(ledger_database(where))
    storage = open_storage(tmp_path, max_file_bytes=1 << 20, max_lines=100, database_url=database_url)
    for tables in (ledger_tables, batch_storage):
        monkeypatch.setattr(tables, "SCHEMA", 2)
    with closing(ledger(tmp_path, database_url)) as later, later.writing() as transaction:
        transaction.run("ALTER TABLE requests ADD COLUMN region TEXT NOT NULL DEFAULT ''")
    with closing(batches(tmp_path, database_url)) as later, later.writing() as transaction:
        transaction.run("ALTER TABLE batches ADD COLUMN region TEXT NOT NULL DEFAULT ''")
    earlier.write(replace(ROW, request_id="new"))
    earlier.close()
    storage.files.contents.store(FILE.id, BytesIO(b"abc"))
    storage.files.add(FILE)
    storage.batches.add(BATCH)
    storage.close()
    with closing(ledger(tmp_path, database_url)) as later, later.reading() as transaction:
        assert transaction.run("SELECT request_id, region FROM requests") == [{"request_id": "new", "region": ""}]
    with closing(batches(tmp_path, database_url)) as later, later.reading() as transaction:
        assert transaction.run("SELECT id, region FROM batches") == [{"id": BATCH.id, "region": ""}]
