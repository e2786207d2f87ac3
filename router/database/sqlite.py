"""SQLite with a write-ahead log, which the gateway processes of a host share."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from protos.errors import BatonError, Misconfigured, Unavailable
from router.database.database import BUSY_S, Dialect, Prepare, RejectedValue, Row, Transaction
from router.log_throttle import RareLog

log = logging.getLogger("baton.router")

CACHE_KIB = 4096
RETRY_S = 0.01
_REJECTED = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    ValueError,
    TypeError,
    OverflowError,
)


class _SqliteTransaction:
    dialect: Dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, query: str, *values: Any) -> list[Row]:
        with _rejections():
            return [dict(row) for row in self._connection.execute(query, values)]

    def run_many(self, query: str, values: list[tuple[Any, ...]]) -> None:
        with _rejections():
            self._connection.executemany(query, values)

    def whole(self, number: str) -> str:
        return f"CAST({number} AS INTEGER)"

    def columns(self, table: str) -> set[str]:
        return {row["name"] for row in self.run("SELECT name FROM pragma_table_info(?)", table)}


class SqliteDatabase:
    """One connection, whose calls wait for each other. A commit survives the end of the process, and with `synchronous`
    FULL that of the machine."""

    def __init__(
        self, path: Path, prepare: Prepare, *, setting: str, place: str, synchronous: Literal["FULL", "NORMAL"] = "FULL"
    ) -> None:
        """Creates the database if it is missing. Raises Misconfigured, which names `setting` and its kind of value,
        `place`."""
        self._setting, self._lock = setting, threading.Lock()
        self._failures = RareLog(log)
        refused = f"give a {place} of this host that this process may write"
        try:
            path.touch(mode=0o600)  # SQLite gives the files beside it the same mode
            self._connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
        except (sqlite3.Error, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise Misconfigured(f"{setting}: {path}: {why}: {refused}", param=setting) from error
        try:
            self._connection.row_factory = sqlite3.Row
            self._log_ahead()
            for pragma in (f"synchronous = {synchronous}", f"cache_size = -{CACHE_KIB}"):
                self._connection.execute(f"PRAGMA {pragma}")
            with self.writing() as transaction:
                prepare(transaction)
        except (sqlite3.Error, BatonError) as error:
            self.close()
            reason = str(error) if isinstance(error, Misconfigured) else f"{error.__cause__ or error}: {refused}"
            raise Misconfigured(f"{setting}: {path}: {reason}", param=setting) from error

    def _log_ahead(self) -> None:
        """Turns on the write-ahead log. SQLite itself does not wait for another process that writes in a file without a
        log."""
        until_s = time.monotonic() + BUSY_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_S)

    def reading(self) -> AbstractContextManager[Transaction]:
        return self._transaction("BEGIN")

    def writing(self) -> AbstractContextManager[Transaction]:
        return self._transaction("BEGIN IMMEDIATE")

    @property
    def trouble(self) -> str:
        return self._failures.recent

    def now_s(self) -> float:
        return time.time()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Transaction]:
        try:
            with self._lock:
                self._connection.execute(begin)
                before = self._connection.total_changes
                try:
                    yield _SqliteTransaction(self._connection)
                    self._connection.execute("COMMIT")
                    if self._connection.total_changes != before:
                        self._failures.over()
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            why = f"the database cannot be read or written now: {error}"
            self._failures.note(f"{self._setting}: {why}")
            raise Unavailable(why) from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()


@contextmanager
def _rejections() -> Iterator[None]:
    try:
        yield
    except _REJECTED as error:
        raise RejectedValue(f"the database cannot hold this: {error}") from error
