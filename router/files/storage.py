"""All that is stored of files and batches, opened from a gateway's settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from router.files.batches import BatchStore
from router.files.contents import FolderContents
from router.files.database import Database, SqliteDatabase
from router.files.files import FileStore

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
    folder: Path, *, max_file_bytes: int, max_lines: int, clock: Callable[[], float] = time.time
) -> BatchStorage:
    """Makes the folder, and a database in it, if they are missing. Raises Misconfigured."""
    contents = FolderContents(folder / CONTENTS)
    database = SqliteDatabase(folder / DATABASE)
    return BatchStorage(
        database=database,
        files=FileStore(database, contents, clock),
        batches=BatchStore(database, clock),
        max_file_bytes=max_file_bytes,
        max_lines=max_lines,
        clock=clock,
    )
