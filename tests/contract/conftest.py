"""SQLite, a Postgres and a server of S3, which the tests of a process share and find empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    import psycopg  # the attention backends' contracts are kept on GPU machines, too, which lack it

    from router.database.postgres import SCHEMA

    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    return postgres.url


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Empty for SQLite."""
    url: str = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    return url


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a server of moto's."""
    server = pytest.importorskip("moto.server", reason="moto is not installed, which is in the extra dev")
    made = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty part of a bucket."""
    httpx.post(f"{s3_server}/moto-api/reset").raise_for_status()
    for name, value in {
        "AWS_ENDPOINT_URL_S3": s3_server, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    boto3 = pytest.importorskip("boto3")
    boto3.session.Session().client("s3").create_bucket(Bucket="files")
    return "s3://files/of/baton"


@pytest.fixture
def ledger_at(database_url: str, tmp_path: Path) -> Path | str:
    """Where a ledger is."""
    return database_url or tmp_path / "ledger.db"
