"""Contents of files as rows of the database: with Postgres hosts need no folder that all of them see.

upload ─▶ parts, a row each ─▶ commit: its bytes are set, and an earlier upload of the file is gone
A crash leaves an upload without bytes, which `sweep` removes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

from protos.errors import NotFound
from router.database.database import Database, Transaction
from router.files.contents import ABANDONED_S, ContentWriter

PART_BYTES = 256 * 1024


class DatabaseContents:
    """Called from threads. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def writer(self, file_id: str) -> ContentWriter:
        return _DatabaseWriter(self._database, file_id)

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


class _DatabaseWriter:
    def __init__(self, database: Database, file_id: str) -> None:
        self._database, self._file_id = database, file_id
        self._upload_id = os.urandom(12).hex()
        self._waiting = bytearray()
        self._num_parts = self._num_bytes = 0
        self._is_committed = False
        with database.writing() as transaction:
            transaction.run("INSERT INTO uploads VALUES (?, ?, NULL, ?)", self._upload_id, file_id, database.now_s())

    def write(self, data: bytes) -> None:
        self._waiting += data
        self._num_bytes += len(data)
        while len(self._waiting) >= PART_BYTES:
            self._store_part()

    def commit(self) -> int:
        if self._waiting:
            self._store_part()
        with self._database.writing() as transaction:
            _drop(transaction, "file_id = ? AND bytes IS NOT NULL", self._file_id)
            transaction.run("UPDATE uploads SET bytes = ? WHERE upload_id = ?", self._num_bytes, self._upload_id)
        self._is_committed = True
        return self._num_bytes

    def _store_part(self) -> None:
        part = bytes(self._waiting[:PART_BYTES])
        del self._waiting[:PART_BYTES]
        with self._database.writing() as transaction:
            transaction.run("INSERT INTO upload_parts VALUES (?, ?, ?)", self._upload_id, self._num_parts, part)
        self._num_parts += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_committed:
            with self._database.writing() as transaction:
                _drop(transaction, "upload_id = ?", self._upload_id)


def _drop(transaction: Transaction, which: str, value: str) -> None:
    transaction.run(f"DELETE FROM upload_parts WHERE upload_id IN (SELECT upload_id FROM uploads WHERE {which})", value)
    transaction.run(f"DELETE FROM uploads WHERE {which}", value)
