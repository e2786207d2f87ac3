"""Pages of a table: newest first, by time and id, with an entry's id as the cursor."""

from __future__ import annotations

from typing import Any

from protos.errors import InvalidRequest
from router.database.database import Database, Row
from router.files.records import PageAsked


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
