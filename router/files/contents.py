"""Contents of files: the seam, a folder, and rows of the database: with Postgres hosts need no folder that all of them
see."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Protocol

from protos.errors import Misconfigured, NotFound, Unavailable
from router.database.database import Database, Transaction

_PART = ".part"
_SPOOLED_BYTES = 1 << 20
ABANDONED_S = 86_400.0
"""A sweep removes what belongs to no file when it is this old."""


class FileContents(Protocol):
    """Called from threads. Raises Unavailable."""

    def store(self, file_id: str, content: IO[bytes]) -> None:
        """Copies all of `content`. A copy that fails leaves the file as it was."""
        ...

    def read(self, file_id: str, start: int, size: int) -> bytes:
        """Returns `size` bytes from `start` on, fewer at the end. Raises NotFound."""
        ...

    def delete(self, file_id: str) -> None:
        """Deletes the file if it exists."""
        ...

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        """Removes old files that are not known, and old copies that never ended."""
        ...


class FolderContents:
    """A file for each id; NAME.part until it is complete. Raises Misconfigured if the folder cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            for made in (folder.parent, folder):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Misconfigured(
                f"router.batch.folder: {folder}: {error.strerror}: give a folder that this process may write",
                param="router.batch.folder",
            ) from error

    def store(self, file_id: str, content: IO[bytes]) -> None:
        part = self._folder / f"{file_id}.{os.urandom(4).hex()}{_PART}"
        content.seek(0)
        try:
            with failing():
                part.touch(mode=0o600)
                with part.open("wb") as file:
                    shutil.copyfileobj(content, file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self._folder / file_id)
        finally:
            with suppress(OSError):
                part.unlink()

    def read(self, file_id: str, start: int, size: int) -> bytes:
        with failing(f"file {file_id} cannot be read"):
            try:
                with (self._folder / file_id).open("rb", buffering=0) as file:
                    file.seek(start)
                    return file.read(size) or b""
            except FileNotFoundError:
                raise NotFound(f"the content of file {file_id} has been deleted") from None

    def delete(self, file_id: str) -> None:
        with failing(f"file {file_id} cannot be deleted"):
            (self._folder / file_id).unlink(missing_ok=True)

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        oldest_s = time.time() - ABANDONED_S
        with failing("the folder of files cannot be swept"):
            for path in self._folder.iterdir():
                with suppress(FileNotFoundError):  # renamed or deleted since it was listed
                    is_old = path.stat().st_mtime < oldest_s
                    if is_old and (path.suffix == _PART or not is_known(path.name)):
                        path.unlink()


@contextmanager
def failing(problem: str = "the file cannot be stored now") -> Iterator[None]:
    """Raises Unavailable with the problem and the reason of an OSError."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{problem}: {error.strerror}") from error


@contextmanager
def spooled() -> Iterator[IO[bytes]]:
    """A content that is not stored yet: the first MiB in memory, more on the disk of TMPDIR. Raises Unavailable."""
    with failing(), SpooledTemporaryFile(_SPOOLED_BYTES) as content:
        yield content


PART_BYTES = 256 * 1024


class DatabaseContents:
    """A copy's parts are a row each. Its bytes are set with the last one; a crash leaves a copy without bytes to
    `sweep`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def store(self, file_id: str, content: IO[bytes]) -> None:
        upload_id, database = os.urandom(12).hex(), self._database
        content.seek(0)
        with database.writing() as transaction:
            transaction.run("INSERT INTO uploads VALUES (?, ?, NULL, ?)", upload_id, file_id, database.now_s())
        try:
            for number, part in enumerate(iter(lambda: content.read(PART_BYTES), b"")):
                with database.writing() as transaction:  # one transaction each, so that other writers can run
                    transaction.run("INSERT INTO upload_parts VALUES (?, ?, ?)", upload_id, number, part)
            with database.writing() as transaction:
                _drop(transaction, "file_id = ? AND bytes IS NOT NULL", file_id)
                transaction.run("UPDATE uploads SET bytes = ? WHERE upload_id = ?", content.tell(), upload_id)
        except BaseException:
            with suppress(Unavailable), database.writing() as transaction:
                _drop(transaction, "upload_id = ?", upload_id)
            raise

    def read(self, file_id: str, start: int, size: int) -> bytes:
        first, last = start // PART_BYTES, (start + size - 1) // PART_BYTES
        begin = start - first * PART_BYTES
        with self._database.reading() as transaction:
            found = transaction.run("SELECT upload_id FROM uploads WHERE file_id = ? AND bytes IS NOT NULL", file_id)
            if not found:
                raise NotFound(f"the content of file {file_id} has been deleted")
            rows = transaction.run(
                "SELECT CASE number WHEN ? THEN substr(content, CAST(? AS INTEGER), CAST(? AS INTEGER)) "
                "ELSE content END AS content FROM upload_parts "
                "WHERE upload_id = ? AND number BETWEEN ? AND ? ORDER BY number",
                first, begin + 1, size, found[0]["upload_id"], first, last,
            )  # fmt: skip
        return b"".join(row["content"] for row in rows)[:size]

    def delete(self, file_id: str) -> None:
        with self._database.writing() as transaction:
            _drop(transaction, "file_id = ?", file_id)

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        oldest_s = self._database.now_s() - ABANDONED_S
        with self._database.writing() as transaction:
            old = transaction.run("SELECT upload_id, file_id, bytes FROM uploads WHERE begun_s < ?", oldest_s)
            for row in old:
                if row["bytes"] is None or not is_known(row["file_id"]):
                    _drop(transaction, "upload_id = ?", row["upload_id"])


def _drop(transaction: Transaction, which: str, value: str) -> None:
    transaction.run(f"DELETE FROM upload_parts WHERE upload_id IN (SELECT upload_id FROM uploads WHERE {which})", value)
    transaction.run(f"DELETE FROM uploads WHERE {which}", value)
