"""The ledger's tables.

requests        a row each, by its id
days, hours     their sums by time and group, kept by triggers: a month of a million requests is some thousand rows
open_requests   what processes are answering, as it was in their last second
gateways        when each process wrote last
model_devices   devices of each model's fleet by minute
worker_tokens   what each start of a worker has computed until a minute, and what it had when a gateway met it
retention       from when on there are requests: of earlier ones, sums (`router.observe.ledger.retention`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from router.database.database import Database, Transaction, check_schema
from router.database.postgres import PostgresDatabase
from router.database.sqlite import SqliteDatabase
from router.observe.ledger.rows import LedgerRow

SCHEMA = 1
GROUPS = ("tenant", "key_id", "model", "endpoint", "outcome", "batch")
SUMMED = (
    "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "prefill_device_s", "decode_device_s",
    "charged_usd", "accepted_tokens", "cache_saved_device_s", "speculation_saved_device_s",
    "drafted_tokens", "prefill_kv_byte_s", "decode_kv_byte_s",
)  # fmt: skip
CHARGED = ("charged_input_usd", "charged_cached_usd", "charged_output_usd")
"""Sums that few reports ask for."""
SUMS = {86_400: "days", 3600: "hours"}
"""Tables of sums by their seconds, the longest first. `at_s` is when the day or hour (UTC) began."""

_TYPES = {"str": "TEXT", "int": "BIGINT", "float": "DOUBLE PRECISION"}
_KINDS = {field.name: str(field.type) for field in fields(LedgerRow)}
WHOLE = frozenset(name for name, kind in _KINDS.items() if kind == "int")
_NAMES = ", ".join(_KINDS)
_MARKS = ", ".join("?" * len(_KINDS))
_REPLACED = ", ".join(f"{name} = excluded.{name}" for name in _KINDS)
_ADDED = (*SUMMED, *CHARGED)
_DEVICES = "minute, model, devices"
_KEY = ", ".join(("at_s", *GROUPS))
_KEY_PLACES = ", ".join(map(str, range(1, 2 + len(GROUPS))))


def ledger_database(where: Path | str) -> Database:
    """Raises Misconfigured."""
    if isinstance(where, Path):
        return SqliteDatabase(where, prepare, setting="router.ledger.path", place="file", synchronous="NORMAL")
    return PostgresDatabase(where, "ledger", prepare)


def prepare(transaction: Transaction) -> None:
    """Creates the tables, or migrates those of an earlier version. Raises Misconfigured for a later version."""
    check_schema(transaction, "ledger", SCHEMA)
    for table, columns in _tables(transaction).items():
        transaction.run(f"CREATE TABLE IF NOT EXISTS {table} ({columns}){_rowid(transaction)}")
    for table in ("requests", "open_requests"):
        existing = transaction.columns(table)
        for name, kind in _KINDS.items():
            if name not in existing:
                column = f"{name} {_TYPES[kind]} NOT NULL DEFAULT {_nothing(name)}"
                transaction.run(f"ALTER TABLE {table} ADD COLUMN {column}")
    transaction.run("CREATE INDEX IF NOT EXISTS by_time ON requests (at_s, tenant, model, endpoint)")
    transaction.run("CREATE INDEX IF NOT EXISTS worker_tokens_by_minute ON worker_tokens (minute)")
    if transaction.columns("fleet_devices"):
        transaction.run(f"INSERT INTO model_devices ({_DEVICES}) SELECT {_DEVICES} FROM fleet_devices")
        transaction.run("DROP TABLE fleet_devices")
    transaction.run(
        "INSERT INTO retention (number, rows_from_s, deleted_to_s) VALUES (0, 0, 0) ON CONFLICT (number) DO NOTHING"
    )
    for width_s, table in SUMS.items():
        _prepare_sums(transaction, table, width_s)


def _tables(transaction: Transaction) -> dict[str, str]:
    """The tables with the key's columns first: `integrity_check` of SQLite 3.40 finds NULL in later ones."""
    rows = ", ".join(_column(transaction, name) for name in _KINDS)
    return {
        "requests": f"{rows}, PRIMARY KEY (request_id)",
        "model_devices": "minute BIGINT NOT NULL, model TEXT NOT NULL, devices BIGINT NOT NULL, "
        "PRIMARY KEY (minute, model)",
        "worker_tokens": "worker TEXT NOT NULL, incarnation BIGINT NOT NULL, minute BIGINT NOT NULL, "
        "prompt_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, prompt_tokens_before BIGINT NOT NULL, "
        "output_tokens_before BIGINT NOT NULL, PRIMARY KEY (worker, incarnation, minute)",
        "open_requests": f"{rows}, process TEXT NOT NULL, PRIMARY KEY (request_id)",
        "gateways": "process TEXT PRIMARY KEY, seen_s DOUBLE PRECISION NOT NULL",
        "retention": "number BIGINT PRIMARY KEY, rows_from_s BIGINT NOT NULL, deleted_to_s BIGINT NOT NULL",
    }


def _column(transaction: Transaction, name: str) -> str:
    """Refuses NaN, which SQLite stores as NULL: Postgres would add it to the sums."""
    column = f"{name} {_TYPES[_KINDS[name]]} NOT NULL"
    is_checked = transaction.dialect == "postgres" and _KINDS[name] == "float"
    return f"{column} CHECK ({name} < 'Infinity')" if is_checked else column


def _rowid(transaction: Transaction) -> str:
    return " WITHOUT ROWID" if transaction.dialect == "sqlite" else ""


def _prepare_sums(transaction: Transaction, table: str, width_s: int) -> None:
    """Rebuilds a missing or outdated table of sums from its requests; sums of deleted requests are kept."""
    existing, needed = transaction.columns(table), {"at_s", *GROUPS, "requests", *_ADDED}
    if existing != needed:
        if existing:
            transaction.run(
                f"CREATE TEMPORARY TABLE kept_{table} AS SELECT * FROM {table} "
                "WHERE at_s < (SELECT rows_from_s FROM retention)"
            )
            _drop_sums(transaction, table)
        groups, sums = (
            ", ".join(f"{name} {_TYPES[_KINDS[name]]} NOT NULL" for name in names) for names in (GROUPS, _ADDED)
        )
        transaction.run(
            f"CREATE TABLE {table} (at_s BIGINT NOT NULL, {groups}, requests BIGINT NOT NULL, {sums}, "
            f"PRIMARY KEY ({_KEY})){_rowid(transaction)}"
        )
        transaction.run(
            f"INSERT INTO {table} ({_KEY}, requests, {', '.join(_ADDED)}) "
            f"SELECT {_begin(transaction, 'at_s', width_s)}, {', '.join(GROUPS)}, count(*), "
            f"{', '.join(f'sum({name})' for name in _ADDED)} FROM requests "
            f"{'WHERE at_s >= (SELECT rows_from_s FROM retention) ' if existing else ''}GROUP BY {_KEY_PLACES}"
        )
        if existing:
            _restore_sums(transaction, table, existing & needed)
    for statement in _triggers(transaction, table, width_s):
        transaction.run(statement)


def _restore_sums(transaction: Transaction, table: str, known: set[str]) -> None:
    """Restores the sums after a change of columns: new ones are zero, and groups that no longer exist are joined."""
    groups = [name if name in known else _nothing(name) for name in GROUPS]
    summed = [f"sum({name if name in known else _nothing(name)})" for name in ("requests", *_ADDED)]
    transaction.run(
        f"INSERT INTO {table} ({_KEY}, requests, {', '.join(_ADDED)}) SELECT at_s, {', '.join((*groups, *summed))} "
        f"FROM kept_{table} GROUP BY {_KEY_PLACES}"
    )
    transaction.run(f"DROP TABLE kept_{table}")


def _nothing(name: str) -> str:
    return "''" if _KINDS.get(name) == "str" else "0"


def _drop_sums(transaction: Transaction, table: str) -> None:
    on = " ON requests" if transaction.dialect == "postgres" else ""
    for trigger in (f"count_{table}", f"move_{table}"):
        transaction.run(f"DROP TRIGGER IF EXISTS {trigger}{on}")
    transaction.run(f"DROP TABLE {table}")


def _begin(transaction: Transaction, at_s: str, width_s: int) -> str:
    return f"{transaction.whole(f'{at_s} / {width_s}')} * {width_s}"


def _triggers(transaction: Transaction, table: str, width_s: int) -> Iterator[str]:
    """A replaced row is subtracted from its old sums and added to its new group."""
    enters = (
        f"INSERT INTO {table} ({_KEY}, requests, {', '.join(_ADDED)}) VALUES ("
        f"{_begin(transaction, 'new.at_s', width_s)}, {', '.join(f'new.{name}' for name in GROUPS)}, 1, "
        f"{', '.join(f'new.{name}' for name in _ADDED)}) ON CONFLICT ({_KEY}) DO UPDATE SET "
        f"requests = {table}.requests + 1, "
        f"{', '.join(f'{name} = {table}.{name} + excluded.{name}' for name in _ADDED)};"
    )
    left = " AND ".join(
        [f"at_s = {_begin(transaction, 'old.at_s', width_s)}", *(f"{name} = old.{name}" for name in GROUPS)]
    )
    leaves = (
        f"UPDATE {table} SET requests = requests - 1, {', '.join(f'{name} = {name} - old.{name}' for name in _ADDED)} "
        f"WHERE {left}; DELETE FROM {table} WHERE requests = 0 AND {left};"
    )
    for name, event, body in (("count", "INSERT", enters), ("move", "UPDATE", f"{leaves} {enters}")):
        if transaction.dialect == "sqlite":
            yield f"CREATE TRIGGER IF NOT EXISTS {name}_{table} AFTER {event} ON requests BEGIN {body} END"
        else:
            yield (
                f"CREATE OR REPLACE FUNCTION {name}_{table}() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN {body} RETURN NULL; END $$"
            )
            yield (
                f"CREATE OR REPLACE TRIGGER {name}_{table} AFTER {event} ON requests FOR EACH ROW "
                f"EXECUTE FUNCTION {name}_{table}()"
            )


LOST = "gateway_lost"
"""The outcome of a request whose gateway process was killed. One that was only frozen ends the request after all: that
row replaces it."""
INSERT_ROW = (
    f"INSERT INTO requests ({_NAMES}) VALUES ({_MARKS}) ON CONFLICT (request_id) DO UPDATE SET {_REPLACED} "
    f"WHERE requests.outcome = '{LOST}'"
)
INSERT_DEVICES = (
    "INSERT INTO model_devices (minute, devices, model) VALUES (?, ?, ?) ON CONFLICT (minute, model) "
    "DO UPDATE SET devices = excluded.devices WHERE excluded.devices > model_devices.devices"
)
INSERT_COUNT = (
    "INSERT INTO worker_tokens (worker, incarnation, minute, prompt_tokens, output_tokens, prompt_tokens_before, "
    "output_tokens_before) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (worker, incarnation, minute) DO UPDATE SET "
    "prompt_tokens = excluded.prompt_tokens, output_tokens = excluded.output_tokens "
    "WHERE excluded.prompt_tokens + excluded.output_tokens > worker_tokens.prompt_tokens + worker_tokens.output_tokens"
)
_BEFORE = (
    "coalesce((SELECT {name} FROM worker_tokens AS earlier WHERE earlier.worker = seen.worker "
    "AND earlier.incarnation = seen.incarnation AND earlier.minute < ? ORDER BY minute DESC LIMIT 1), {name}_before)"
)
WORKER_TOKENS = (
    f"SELECT coalesce(sum(prompt_tokens - {_BEFORE.format(name='prompt_tokens')}), 0) AS prompt_tokens, "
    f"coalesce(sum(output_tokens - {_BEFORE.format(name='output_tokens')}), 0) AS output_tokens FROM ("
    "SELECT worker, incarnation, max(prompt_tokens) AS prompt_tokens, max(output_tokens) AS output_tokens, "
    "min(prompt_tokens_before) AS prompt_tokens_before, min(output_tokens_before) AS output_tokens_before "
    "FROM worker_tokens WHERE minute >= ? AND minute < ? GROUP BY worker, incarnation) AS seen"
)
"""Tokens that all workers computed in some minutes. Values: the first minute, three times, and the one after the
last."""
REPLACE_OPEN = (
    f"INSERT INTO open_requests (process, {_NAMES}) VALUES (?, {_MARKS}) ON CONFLICT (request_id) DO UPDATE SET "
    f"process = excluded.process, {_REPLACED}"
)
SEEN = (
    "INSERT INTO gateways (process, seen_s) VALUES (?, ?) ON CONFLICT (process) DO UPDATE SET seen_s = excluded.seen_s"
)
SILENT = "SELECT process FROM gateways WHERE seen_s < ?"
RECOVER = (
    f"INSERT INTO requests ({_NAMES}) SELECT {_NAMES} FROM open_requests WHERE process IN ({SILENT}) "
    f"ON CONFLICT (request_id) DO UPDATE SET {_REPLACED} WHERE requests.outcome = '{LOST}' "
    "AND excluded.output_tokens > requests.output_tokens RETURNING request_id"
)
"""A process that was only frozen, and was killed later, had come further."""
