"""Postgres alone: its server goes and comes, its URL has a password, and its clock is everyone's."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from cluster.gateway.model_backend import open_ledger
from protos.errors import InvalidRequest, Misconfigured, Unavailable
from router.batches.open_batches import storage_for
from router.database.postgres import PostgresDatabase, shown
from router.files.batch_storage import prepare
from router.observe.ledger.ledger_report import sums
from router.observe.ledger.ledger_tables import ledger_database
from router.router_config import LedgerConfig, RouterConfig
from tests.contract.postgres_server import PostgresServer
from tests.contract.test_batch_store import FILE
from tests.contract.test_ledger_store import ROW


def test_a_server_that_was_restarted_is_found_again(postgres: PostgresServer, postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url, "batches", prepare)

    def lose_it() -> None:
        with database.writing() as transaction:
            postgres.kill()
            transaction.run("SELECT 1")

    with pytest.raises(Unavailable, match="cannot be read or written now"):
        lose_it()
    with pytest.raises(Unavailable), database.reading():
        pass
    postgres.start()
    with database.writing() as transaction:
        assert transaction.run("SELECT 1 AS found") == [{"found": 1}]
    postgres.kill()
    postgres.start()
    with database.reading() as transaction:
        assert transaction.run("SELECT count(*) AS found FROM files") == [{"found": 0}], "no call fails for it"
    database.close()


def test_a_frozen_writer_does_not_stop_the_others_for_ever(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.database.postgres._BUSY_MS", 100)
    frozen, other = (PostgresDatabase(postgres_url, "batches", prepare) for _ in range(2))
    monkeypatch.setattr("router.database.postgres._BUSY_MS", 10_000)
    other.close()

    def freeze() -> None:
        with frozen.writing() as transaction:
            with other.writing():  # waits until the server has ended the frozen one's
                pass
            transaction.run("DELETE FROM files")

    with pytest.raises(Unavailable, match="idle-in-transaction"):
        freeze()
    for storage in (frozen, other):
        storage.close()


@pytest.mark.parametrize("url", ["mysql://a/b", "/a/file", "postgresql://u:s%zzecret@h/x", "postgresql://[u:secret@h"])
def test_an_invalid_postgres_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Misconfigured, match="give postgresql://USER:PASSWORD@HOST:PORT/NAME") as refused:
        PostgresDatabase(url, "batches", prepare)
    assert "ecret" not in str(refused.value)


def test_an_unreachable_server_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"postgresql://u:secret@/x?host={tmp_path}&password=secret"
    with pytest.raises(Misconfigured, match=r"router\.database: postgresql://u@/x: .*No such file") as refused:
        PostgresDatabase(url, "batches", prepare)
    assert "secret" not in str(refused.value)
    assert shown("postgresql://u:secret@h:5432/x?password=secret") == "postgresql://u@h:5432/x"


def test_a_server_that_is_too_old_is_named_with_its_version(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.database.postgres.LEAST_VERSION", 99)
    with pytest.raises(Misconfigured, match=r"router\.database: postgresql://.*PostgreSQL \d\d: give 99 or later"):
        PostgresDatabase(postgres_url, "batches", prepare)


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(Misconfigured, match=r"\.venv/bin/pip install -e '\.\[postgres\]'"):
        PostgresDatabase("postgresql://u@h/x", "batches", prepare)


def test_the_servers_clock_is_used(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases mean the same on hosts with different clocks."""
    right = PostgresDatabase(postgres_url, "batches", prepare)
    now_s = right.now_s()
    monkeypatch.setattr("router.database.postgres.time.time", lambda: 1000.0)
    wrong = PostgresDatabase(postgres_url, "batches", prepare)
    assert 0 <= wrong.now_s() - now_s < 60.0
    for storage in (right, wrong):
        storage.close()


def test_text_that_postgres_cannot_hold_is_the_clients_mistake(postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url, "batches", prepare)
    with pytest.raises(InvalidRequest, match="NUL"), database.reading() as transaction:
        transaction.run("SELECT id FROM files WHERE id = ?", "a\0b")
    database.close()


def test_gateways_of_several_hosts_share_batches_and_a_ledger(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with a folder of its own, and no row left in it at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = RouterConfig(model_path=Path("m"), model_name="m", database=postgres_url)
    with ExitStack() as opened:
        here, there = storage_for(config), storage_for(config)
        assert here is not None
        assert there is not None
        ledgers = [open_ledger(config)[0] for _ in range(2)]
        for storage in (here, there, *ledgers):
            assert storage is not None
            opened.callback(storage.close)
        here.files.contents.store(FILE.id, BytesIO(b"abc"))
        here.files.add(FILE)
        assert there.files.find("acme", FILE.id) == FILE
        assert there.files.contents.read(FILE.id, 0, 9) == b"abc"
        for number, ledger in enumerate(ledgers):
            assert ledger is not None
            ledger.write(replace(ROW, request_id=f"{number}"))
    with closing(ledger_database(postgres_url)) as database:
        assert [row.requests for row in sums(database, since_s=0, until_s=10**11)] == [2]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_ledger_is_in_one_place() -> None:
    config = RouterConfig(model_path=Path("m"), model_name="m", database="postgresql://u:secret@h/x")
    assert "secret" not in repr(config)
    prices = LedgerConfig(prices="prices.toml")
    with pytest.raises(Misconfigured, match=r"router\.ledger\.path = 'a\.db' beside router\.database"):
        replace(config, ledger=LedgerConfig(path="a.db"))
    with pytest.raises(Misconfigured, match=r"without a ledger: set router\.ledger\.path, or router\.database"):
        replace(config, database="", ledger=prices)
    assert replace(config, ledger=prices).has_ledger


def test_time_limits_of_the_url_hold(postgres_url: str) -> None:
    options = {"connect_timeout": "3", "tcp_user_timeout": "4000", "application_name": "mine"}
    for url, expected in (
        (f"{postgres_url}&{urlencode(options)}", options),
        (postgres_url, {"connect_timeout": "10", "tcp_user_timeout": "10000", "application_name": "baton"}),
    ):
        with closing(PostgresDatabase(url, "batches", prepare)) as database:
            connection = database._connection
            assert connection is not None
            assert connection.info.get_parameters().items() >= expected.items()


def test_a_connection_that_could_not_be_prepared_is_not_used(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queries would not find the tables."""
    import psycopg

    database = PostgresDatabase(postgres_url, "batches", prepare)
    connection = database._connection
    assert connection is not None
    connection.close()
    execute = psycopg.Connection.execute
    refused = [psycopg.errors.QueryCanceled("canceled")]

    def refuse_once(self: Any, query: Any, *rest: Any) -> Any:
        if str(query).startswith("SET search_path") and refused:
            raise refused.pop()
        return execute(self, query, *rest)

    monkeypatch.setattr(psycopg.Connection, "execute", refuse_once)
    with closing(database):
        with pytest.raises(Unavailable, match="canceled"), database.reading():
            pass
        with database.reading() as transaction:
            assert transaction.run("SELECT count(*) AS found FROM files") == [{"found": 0}]
