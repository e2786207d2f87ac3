"""Files of tenants: rows in the database, content beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields
from typing import Any

from protos.errors import InvalidRequest, NotFound, PayloadTooLarge
from router.database.database import Database, Row, Transaction
from router.files.contents import FileContents
from router.files.records import RUNNING, PageAsked, StoredFile


def page_of(
    database: Database, table: str, tenant: str, asked: PageAsked, *, live_at_s: float | None = None
) -> tuple[list[Row], bool]:
    """Returns the page and whether more follow, without what has expired by `live_at_s`. Raises InvalidRequest for an
    unknown cursor."""
    where: list[str] = ["tenant = ?"]
    values: list[Any] = [tenant]
    if live_at_s is not None:
        where.append("(expires_s IS NULL OR expires_s > ?)")
        values.append(live_at_s)
    for name, value in asked.filters.items():
        where.append(f"{name} = ?")
        values.append(value)
    backwards = asked.before is not None
    up = asked.ascending != backwards
    cursor = asked.before if backwards else asked.after
    with database.reading() as transaction:
        if cursor is not None:
            found = transaction.run(f"SELECT created_s, id FROM {table} WHERE id = ? AND tenant = ?", cursor, tenant)
            if not found:
                name = asked.names[backwards]
                raise InvalidRequest(f"'{name}' is {cursor[:60]!r}: give the id of an entry of the list", param=name)
            where.append(f"(created_s, id) {'>' if up else '<'} (?, ?)")
            values += [found[0]["created_s"], found[0]["id"]]
        order = "ASC" if up else "DESC"
        query = f"SELECT * FROM {table} WHERE {' AND '.join(where)} ORDER BY created_s {order}, id {order} LIMIT ?"
        rows: list[Any] = transaction.run(query, *values, asked.limit + 1)
    page = rows[: asked.limit]
    return (page[::-1] if backwards else page), len(rows) > asked.limit


_PLACES = ", ".join("?" * len(fields(StoredFile)))
_COLUMNS = ", ".join(one.name for one in fields(StoredFile))


class FileStore:
    """Called from threads. `clock`: seconds since 1970. A file that has expired is there no more."""

    def __init__(
        self, database: Database, contents: FileContents, clock: Callable[[], float], *, max_tenant_bytes: int
    ) -> None:
        self._database = database
        self._clock = clock
        self._max_tenant_bytes = max_tenant_bytes
        self.contents = contents

    def add(self, file: StoredFile) -> None:
        """Raises PayloadTooLarge, and deletes the content, where a tenant's files have more than `max_tenant_bytes`."""
        with self._database.writing() as transaction:
            [row] = transaction.run(
                "SELECT COALESCE(SUM(bytes), 0) AS bytes FROM files "
                "WHERE tenant = ? AND (expires_s IS NULL OR expires_s > ?)",
                file.tenant, self._clock(),
            )  # fmt: skip
            if has_room := row["bytes"] + file.bytes <= self._max_tenant_bytes:
                put_file(transaction, file)
        if not has_room:
            self.contents.delete(file.id)
            raise PayloadTooLarge(
                f"The file has {file.bytes} bytes, and your files have {row['bytes']} of {self._max_tenant_bytes} that "
                "may be stored: delete some first",
                param="file",
            )

    def find(self, tenant: str, file_id: str) -> StoredFile:
        """Raises NotFound, also for another tenant's."""
        with self._database.reading() as transaction:
            return self._find(transaction, tenant, file_id)

    def page(self, tenant: str, asked: PageAsked) -> tuple[list[StoredFile], bool]:
        """Raises InvalidRequest."""
        rows, has_more = page_of(self._database, "files", tenant, asked, live_at_s=self._clock())
        return [_file(row) for row in rows], has_more

    def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFound, and InvalidRequest for the input of a batch that runs."""
        marks = ", ".join("?" * len(RUNNING))
        with self._database.writing() as transaction:
            self._find(transaction, tenant, file_id)
            used = transaction.run(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({marks})", file_id, *RUNNING
            )
            if used:
                raise InvalidRequest(
                    f"File {file_id} is the input of the batch {used[0]['id']}, which runs: cancel that first"
                )
            transaction.run("DELETE FROM files WHERE id = ?", file_id)
        self.contents.delete(file_id)

    def sweep(self) -> None:
        """Deletes what has expired, and what has no row."""
        marks = ", ".join("?" * len(RUNNING))
        with self._database.writing() as transaction:
            rows = transaction.run(
                "DELETE FROM files WHERE expires_s < ? AND id NOT IN "
                f"(SELECT input_file_id FROM batches WHERE status IN ({marks})) RETURNING id",
                self._clock(),
                *RUNNING,
            )
        for row in rows:
            self.contents.delete(row["id"])
        with self._database.reading() as transaction:
            known = {row["id"] for row in transaction.run("SELECT id FROM files")}
        self.contents.sweep(lambda name: name in known)

    def _find(self, transaction: Transaction, tenant: str, file_id: str) -> StoredFile:
        found = [_file(row) for row in transaction.run("SELECT * FROM files WHERE id = ?", file_id)]
        if not found or found[0].tenant != tenant or (found[0].expires_s or self._clock() + 1) <= self._clock():
            raise NotFound(f"No such file: {file_id[:60]}", param="file_id")
        return found[0]


def put_file(transaction: Transaction, file: StoredFile) -> None:
    """A file of the same id is replaced."""
    transaction.run("DELETE FROM files WHERE id = ?", file.id)
    values = [int(value) if isinstance(value, bool) else value for value in astuple(file)]
    transaction.run(f"INSERT INTO files ({_COLUMNS}) VALUES ({_PLACES})", *values)


def _file(row: Row) -> StoredFile:
    values: dict[str, Any] = {one.name: row[one.name] for one in fields(StoredFile)}
    return StoredFile(**values | {"is_hidden": bool(values["is_hidden"])})
