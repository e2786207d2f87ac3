"""Databases that a contract is tried on: SQLite, and a Postgres that the tests of a process share, empty for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from router.database.postgres import SCHEMA
from tests.contract.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    return postgres.url


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Empty for SQLite."""
    url: str = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    return url


@pytest.fixture
def ledger_at(database_url: str, tmp_path: Path) -> Path | str:
    """Where a ledger is."""
    return database_url or tmp_path / "ledger.db"
