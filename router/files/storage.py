"""All that is stored of files and batches, opened from a gateway's settings."""

from __future__ import annotations

import asyncio
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
from router.files.files import FileStore
from router.files.schema import prepare

DATABASE, CONTENTS = "batches.db", "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStorage:
    """`changed` is set when a batch was added or cancelled by this process. `close` it at the end."""

    database: Database
    files: FileStore
    batches: BatchStore
    max_file_bytes: int
    max_lines: int
    clock: Callable[[], float] = time.time
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        self.database.close()


def open_storage(
    folder: Path | None,
    *,
    max_file_bytes: int,
    max_lines: int,
    database_url: str = "",
    clock: Callable[[], float] | None = None,
) -> BatchStorage:
    """In a folder, which is made if it is missing, and a database in it. With `database_url` the rows are there, and
    without a folder the contents of files, too. `clock`: by default the database's. Raises Misconfigured."""
    assert folder is not None or database_url
    contents: FileContents | None = FolderContents(folder / CONTENTS) if folder is not None else None
    database: Database
    if database_url:
        database = PostgresDatabase(database_url, "batches", prepare)
    elif folder is not None:
        database = SqliteDatabase(folder / DATABASE, prepare, setting="router.batch.folder", place="folder")
    contents = contents or DatabaseContents(database)
    clock = clock or database.now_s
    return BatchStorage(
        database=database,
        files=FileStore(database, contents, clock),
        batches=BatchStore(database, clock),
        max_file_bytes=max_file_bytes,
        max_lines=max_lines,
        clock=clock,
    )
