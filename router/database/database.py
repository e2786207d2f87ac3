"""A database behind a seam.

A query has `?` for each value, and is written for SQLite and Postgres alike; where the two differ, the transaction has
the words. What another gateway must not see half-done is one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from protos.errors import InvalidRequest, Misconfigured
from protos.release import VERSION

BUSY_S = 10.0
"""Another process may hold the database for so long."""
Row = Mapping[str, Any]
Dialect = Literal["sqlite", "postgres"]


class RejectedValue(InvalidRequest):
    """The database cannot hold a value, however often it is tried: 65 bits, half a surrogate pair, NaN."""


class Transaction(Protocol):
    """Raises Unavailable, and RejectedValue for a value that cannot be written."""

    dialect: Dialect

    def run(self, query: str, *values: Any) -> list[Row]:
        """The rows found, or returned by a change."""
        ...

    def run_many(self, query: str, values: list[tuple[Any, ...]]) -> None: ...

    def whole(self, number: str) -> str:
        """The SQL of a number that is not negative, rounded down."""
        ...

    def columns(self, table: str) -> set[str]:
        """Empty for a table that does not exist."""
        ...


Prepare = Callable[[Transaction], None]
"""Makes the tables that are missing. Of several processes one does at a time. Raises Misconfigured for tables of a
later Baton."""


def check_schema(transaction: Transaction, store: str, schema: int) -> None:
    """Records that the tables of a store have the number `schema`. Raises Misconfigured if the number was higher: a
    later Baton raises it for a change that this one would misread or undo."""
    table = f"{store}_schema"
    transaction.run(f"CREATE TABLE IF NOT EXISTS {table} (number BIGINT PRIMARY KEY)")
    highest = max((row["number"] for row in transaction.run(f"SELECT number FROM {table}")), default=0)
    if highest > schema:
        raise Misconfigured(
            f"a later Baton has opened it: its tables of the {store} have the schema {highest}, and Baton {VERSION} "
            f"has {schema}: start the later version, or restore a backup (docs/upgrading.md)"
        )
    if highest < schema:
        transaction.run(f"INSERT INTO {table} (number) VALUES (?)", schema)


class Database(Protocol):
    """Called from threads."""

    def reading(self) -> AbstractContextManager[Transaction]:
        """The transaction sees the database as it was at its first query."""
        ...

    def writing(self) -> AbstractContextManager[Transaction]:
        """Begins a transaction. No other one writes until it ends; an exception takes it back."""
        ...

    @property
    def trouble(self) -> str:
        """Why it could not be read or written lately; "" once something was written."""
        ...

    def now_s(self) -> float:
        """Seconds since 1970, the same for all processes that share the database."""
        ...

    def close(self) -> None: ...
