"""The database of files and batches: the seam, and SQLite, which the gateway processes of a host share.

A query has `?` for each value. What another gateway must not see half-done is one transaction.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from protos.errors import Misconfigured, Unavailable

BUSY_S = 10.0
"""Another process may hold the database for so long."""
CACHE_KIB = 4096
Row = Mapping[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes BIGINT NOT NULL,
    created_s DOUBLE PRECISION NOT NULL, expires_s DOUBLE PRECISION, is_hidden INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, key_id TEXT NOT NULL, api TEXT NOT NULL, endpoint TEXT NOT NULL,
    model TEXT NOT NULL, input_file_id TEXT NOT NULL, window_text TEXT NOT NULL, metadata TEXT NOT NULL,
    output_expires_s DOUBLE PRECISION, created_s DOUBLE PRECISION NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
    status TEXT NOT NULL, ends_as TEXT NOT NULL, times TEXT NOT NULL, errors TEXT NOT NULL,
    output_file_id TEXT, error_file_id TEXT,
    total BIGINT NOT NULL, completed BIGINT NOT NULL, failed BIGINT NOT NULL,
    input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL, reasoning_tokens BIGINT NOT NULL,
    generation BIGINT NOT NULL, lease_until_s DOUBLE PRECISION NOT NULL
);
CREATE TABLE IF NOT EXISTS batch_results (
    batch_id TEXT NOT NULL, line BIGINT NOT NULL, is_error INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (batch_id, line)
);
CREATE INDEX IF NOT EXISTS files_by_time ON files (tenant, created_s, id);
CREATE INDEX IF NOT EXISTS batches_by_time ON batches (tenant, created_s, id);
CREATE INDEX IF NOT EXISTS batches_by_state ON batches (status, lease_until_s);
"""


class Transaction(Protocol):
    """Raises Unavailable."""

    def run(self, query: str, *values: Any) -> list[Row]:
        """The rows found, or returned by a change."""
        ...

    def run_many(self, query: str, values: list[tuple[Any, ...]]) -> None: ...


class Database(Protocol):
    """Called from threads."""

    def reading(self) -> AbstractContextManager[Transaction]: ...

    def writing(self) -> AbstractContextManager[Transaction]:
        """No other writes until it ends. An exception takes all of it back."""
        ...

    def close(self) -> None: ...


class _SqliteTransaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, query: str, *values: Any) -> list[Row]:
        return [dict(row) for row in self._connection.execute(query, values)]

    def run_many(self, query: str, values: list[tuple[Any, ...]]) -> None:
        self._connection.executemany(query, values)


class SqliteDatabase:
    """One connection, whose calls wait for each other. A commit survives the end of the process, and that of the
    machine."""

    def __init__(self, path: Path) -> None:
        """Makes the database if it is missing. Raises Misconfigured for a file that is none."""
        self._path = path
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            for pragma in ("journal_mode = WAL", "synchronous = FULL", f"cache_size = -{CACHE_KIB}"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._connection.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise Misconfigured(
                f"router.batch.folder: {path}: {error}: give a folder of this host that this process may write",
                param="router.batch.folder",
            ) from error

    def reading(self) -> AbstractContextManager[Transaction]:
        return self._transaction("BEGIN")

    def writing(self) -> AbstractContextManager[Transaction]:
        return self._transaction("BEGIN IMMEDIATE")

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Transaction]:
        try:
            with self._lock:
                self._connection.execute(begin)
                try:
                    yield _SqliteTransaction(self._connection)
                except BaseException:
                    self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise Unavailable(f"files and batches cannot be read or written now: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()
