"""Contents of files as rows of the database: with Postgres hosts need no folder that all of them see.

A copy's parts are a row each. Its bytes are set with the last one; a crash leaves a copy without bytes to `sweep`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from protos.errors import NotFound, Unavailable
from router.database.database import Database, Transaction
from router.files.contents import ABANDONED_S

PART_BYTES = 256 * 1024


class DatabaseContents:
    """Called from threads. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def store(self, file_id: str, content: IO[bytes]) -> None:
        upload_id, database = os.urandom(12).hex(), self._database
        content.seek(0)
        with database.writing() as transaction:
            transaction.run("INSERT INTO uploads VALUES (?, ?, NULL, ?)", upload_id, file_id, database.now_s())
        try:
            for number, part in enumerate(iter(lambda: content.read(PART_BYTES), b"")):
                with database.writing() as transaction:  # a transaction each: other writers wait for it
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
