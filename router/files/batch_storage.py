"""All that is stored of files and batches, opened from a gateway's settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from router.database.database import Database
from router.database.postgres import PostgresDatabase
from router.database.sqlite import SqliteDatabase
from router.files.batches import BatchStore
from router.files.contents import FileContents, FolderContents
from router.files.database_contents import DatabaseContents
from router.files.file_store import FileStore
from router.files.file_tables import prepare
from router.files.s3_contents import S3Contents
from router.log_throttle import RareLog

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
