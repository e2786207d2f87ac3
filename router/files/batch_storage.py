"""All that is stored of files and batches: the tables, and what is opened from a gateway's settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from router.database.database import Database, Transaction, check_schema
from router.database.postgres import PostgresDatabase
from router.database.sqlite import SqliteDatabase
from router.files.batches import BatchStore
from router.files.contents import DatabaseContents, FileContents, FolderContents
from router.files.file_store import FileStore
from router.files.s3_contents import S3Contents
from router.log_throttle import RareLog

SCHEMA = 1

_TABLES = """
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
    batch_id TEXT NOT NULL, line BIGINT NOT NULL, is_error INTEGER NOT NULL, content {blob} NOT NULL,
    PRIMARY KEY (batch_id, line)
);
CREATE TABLE IF NOT EXISTS uploads (
    upload_id TEXT PRIMARY KEY, file_id TEXT NOT NULL, bytes BIGINT, begun_s DOUBLE PRECISION NOT NULL
);
CREATE TABLE IF NOT EXISTS upload_parts (
    upload_id TEXT NOT NULL, number BIGINT NOT NULL, content {blob} NOT NULL, PRIMARY KEY (upload_id, number)
);
CREATE INDEX IF NOT EXISTS uploads_by_file ON uploads (file_id);
CREATE INDEX IF NOT EXISTS files_by_time ON files (tenant, created_s, id);
CREATE INDEX IF NOT EXISTS batches_by_time ON batches (tenant, created_s, id);
CREATE INDEX IF NOT EXISTS batches_by_state ON batches (status, lease_until_s);
"""


def prepare(transaction: Transaction) -> None:
    """Makes the tables that are missing. Raises Misconfigured for those of a later Baton."""
    check_schema(transaction, "batches", SCHEMA)
    blob = "BLOB" if transaction.dialect == "sqlite" else "BYTEA"
    for statement in _TABLES.format(blob=blob).split(";"):
        if statement.strip():
            transaction.run(statement)


log = logging.getLogger("baton.batches")

DATABASE, CONTENTS = "batches.db", "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStorage:
    """`changed` is set when this process adds or cancels a batch. `failures`: of running batches."""

    database: Database
    files: FileStore
    batches: BatchStore
    max_file_bytes: int
    max_lines: int
    clock: Callable[[], float] = time.time
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failures: RareLog = field(default_factory=lambda: RareLog(log))

    @property
    def trouble(self) -> str:
        """Why batches were not run, or files not stored, lately; "" if they were."""
        return self.database.trouble or self.failures.recent

    def failed(self, message: str) -> None:
        """Logs a failure. The database logs its own."""
        if not self.database.trouble:
            self.failures.note(message)

    def close(self) -> None:
        self.database.close()


def open_storage(
    folder: Path | str | None,
    *,
    max_file_bytes: int,
    max_lines: int,
    max_tenant_bytes: int = 100 * 2**30,
    database_url: str = "",
    clock: Callable[[], float] | None = None,
) -> BatchStorage:
    """Opens the storage. Rows are in the database of `database_url`, else in a file of `folder`. Contents are in the
    folder, in the bucket whose URL it is, or in the database. Raises Misconfigured."""
    assert isinstance(folder, Path) or database_url
    contents = _contents(folder)
    database: Database
    if isinstance(folder, Path) and not database_url:
        database = SqliteDatabase(folder / DATABASE, prepare, setting="router.batch.folder", place="folder")
    else:
        database = PostgresDatabase(database_url, "batches", prepare)
    contents = contents or DatabaseContents(database)
    clock = clock or database.now_s
    return BatchStorage(
        database=database,
        files=FileStore(database, contents, clock, max_tenant_bytes=max_tenant_bytes),
        batches=BatchStore(database, clock),
        max_file_bytes=max_file_bytes,
        max_lines=max_lines,
        clock=clock,
    )


def _contents(folder: Path | str | None) -> FileContents | None:
    if isinstance(folder, Path):
        return FolderContents(folder / CONTENTS)
    return S3Contents(folder) if folder else None
