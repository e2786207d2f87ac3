"""Postgres, which the gateways of several hosts share. Its tables are in the schema `baton` of the database.

writing ─▶ BEGIN ─▶ advisory lock of the store ─▶ queries ─▶ COMMIT     one writer at a time, as with SQLite"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from protos.errors import Misconfigured, Unavailable
from protos.hints import extra_command
from router.database.database import BUSY_S, Dialect, Prepare, RejectedValue, Row, Transaction
from router.log_throttle import RareLog

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("baton.router")

SCHEMES = ("postgresql", "postgres")
SETTING = "router.database"
SCHEMA = "baton"
LEAST_VERSION = 14  # CREATE OR REPLACE TRIGGER
_BUSY_MS = int(1000 * BUSY_S)
_LIMITS: Mapping[str, Any] = {
    "connect_timeout": int(BUSY_S), "keepalives_idle": int(BUSY_S), "keepalives_interval": 2, "keepalives_count": 3,
    "tcp_user_timeout": _BUSY_MS, "application_name": "baton",
}  # fmt: skip
"""Parameters of the URL that its user may give otherwise."""
_BEGIN_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class _PostgresTransaction:
    dialect: Dialect = "postgres"

    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._connection = connection

    def run(self, query: str, *values: Any) -> list[Row]:
        with _rejections():
            cursor = self._connection.execute(query.replace("?", "%s"), values or None)
            return cursor.fetchall() if cursor.description is not None else []

    def run_many(self, query: str, values: list[tuple[Any, ...]]) -> None:
        if values:
            with _rejections(), self._connection.cursor() as cursor:
                cursor.executemany(query.replace("?", "%s"), values)

    def whole(self, number: str) -> str:
        return f"CAST(floor({number}) AS BIGINT)"

    def columns(self, table: str) -> set[str]:
        query = "SELECT column_name FROM information_schema.columns WHERE table_schema = ? AND table_name = ?"
        return {row["column_name"] for row in self.run(query, SCHEMA, table)}


class PostgresDatabase:
    """One connection, whose calls wait for each other. It is replaced when it breaks."""

    def __init__(self, url: str, store: str, prepare: Prepare) -> None:
        """Opens the database. Writers of the same `store` wait for each other. Raises Misconfigured."""
        self._url = checked(url)
        self._key = zlib.crc32(f"baton.{store}".encode())
        self._lock = threading.Lock()
        self._failures = RareLog(log)
        self._connection: psycopg.Connection[Row] | None = None
        self._ahead_s = 0.0
        try:
            with self.writing() as transaction:
                self._check_version(transaction)
                schemas = transaction.run("SELECT 1 AS there FROM pg_namespace WHERE nspname = ?", SCHEMA)
                if not schemas:
                    transaction.run(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
                prepare(transaction)
        except Misconfigured as error:
            self.close()
            raise Misconfigured(f"{SETTING}: {shown(url)}: {error}", param=SETTING) from error
        except (Unavailable, RejectedValue) as error:
            self.close()
            raise Misconfigured(
                f"{SETTING}: {shown(url)}: {error}: give a Postgres database that this host reaches, and in which its "
                f"user may make the schema {SCHEMA}",
                param=SETTING,
            ) from error

    def _check_version(self, transaction: Transaction) -> None:
        """Raises Misconfigured."""
        [server] = transaction.run("SELECT CAST(current_setting('server_version_num') AS BIGINT) / 10000 AS version")
        if server["version"] < LEAST_VERSION:
            raise Misconfigured(f"PostgreSQL {server['version']}: give {LEAST_VERSION} or later")

    def reading(self) -> AbstractContextManager[Transaction]:
        return self._transaction(is_writing=False)

    def writing(self) -> AbstractContextManager[Transaction]:
        return self._transaction(is_writing=True)

    @property
    def trouble(self) -> str:
        return self._failures.recent

    def now_s(self) -> float:
        """By the server's clock, as the last writing found it: hosts differ."""
        return time.time() + self._ahead_s

    @contextmanager
    def _transaction(self, *, is_writing: bool) -> Iterator[Transaction]:
        import psycopg

        with self._lock:
            try:
                connection = self._begun("BEGIN" if is_writing else _BEGIN_READING)
                try:
                    if is_writing:
                        self._await_others(connection)
                    yield _PostgresTransaction(connection)
                    connection.execute("COMMIT")
                    if is_writing:
                        self._failures.over()
                except BaseException:
                    self._roll_back(connection)
                    raise
            except psycopg.Error as error:
                why = f"the database cannot be read or written now: {_line(error)}"
                self._failures.note(f"{SETTING}: {why}")
                raise Unavailable(why) from error

    def _begun(self, begin: str) -> psycopg.Connection[Row]:
        """Begins a transaction, reconnecting if the server was restarted since the last one."""
        import psycopg

        connection = self._connected()
        try:
            connection.execute(begin)
        except psycopg.OperationalError:
            connection.close()
            connection = self._connected()
            connection.execute(begin)
        return connection

    def _await_others(self, connection: psycopg.Connection[Row]) -> None:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (self._key,))
        asked_s = time.time()
        row = connection.execute("SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION) AS now_s")
        clock = row.fetchone()
        assert clock is not None
        self._ahead_s = clock["now_s"] - (asked_s + time.time()) / 2

    def _connected(self) -> psycopg.Connection[Row]:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
        from psycopg.rows import dict_row

        if self._connection is None or self._connection.closed:
            own = conninfo_to_dict(self._url)
            limits = {name: value for name, value in _LIMITS.items() if name not in own}
            connection = psycopg.connect(self._url, autocommit=True, row_factory=dict_row, **limits)
            try:
                for name in ("lock_timeout", "idle_in_transaction_session_timeout"):
                    connection.execute(f"SET {name} = {_BUSY_MS}")
                connection.execute(f"SET search_path TO {SCHEMA}")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _roll_back(self, connection: psycopg.Connection[Row]) -> None:
        import psycopg

        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:
            connection.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()


def checked(url: str) -> str:
    """Raises Misconfigured."""
    wrong = f"{SETTING} is not the URL of a Postgres database: give postgresql://USER:PASSWORD@HOST:PORT/NAME"
    try:
        if urlsplit(url).scheme not in SCHEMES:
            raise Misconfigured(wrong, param=SETTING)
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ValueError as error:
        raise Misconfigured(wrong, param=SETTING) from error
    except ImportError as error:
        raise Misconfigured(
            f"{SETTING} needs the package psycopg: {extra_command('postgres')}", param=SETTING
        ) from error
    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        raise Misconfigured(wrong, param=SETTING) from None  # its text may have a part of the password
    return url


def shown(url: str) -> str:
    """Hides the password, and options, which may have one."""
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{user}{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def _rejections() -> Iterator[None]:
    import psycopg
    from psycopg.errors import DatatypeMismatch

    try:
        yield
    except (psycopg.IntegrityError, psycopg.DataError, DatatypeMismatch, ValueError, TypeError, OverflowError) as error:
        raise RejectedValue(f"the database cannot hold this: {_line(error)}") from error
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:  # a table or a permission that is missing, not a value
            raise
        raise RejectedValue(f"the database cannot hold this: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
