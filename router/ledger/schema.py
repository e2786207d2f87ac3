"""The ledger's tables: SQLite with a write-ahead log.

requests        a row each, by its id
hours           their sums by hour and group, kept by triggers: a month of a million requests is some thousand rows
open_requests   what processes are answering, as it was in their last second
gateways        when each process wrote last
fleet_devices   devices of each model's fleet by minute
"""

from __future__ import annotations

import sqlite3
from dataclasses import fields
from pathlib import Path

from router.ledger.rows import LedgerRow

BUSY_S = 10.0
"""Another process may hold the database for so long."""
GROUPS = ("tenant", "key_id", "model", "endpoint", "outcome", "batch")
SUMMED = (
    "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "prefill_device_s", "decode_device_s",
    "charged_usd", "accepted_tokens", "cache_saved_device_s", "speculation_saved_device_s",
)  # fmt: skip
SUMS = {86_400: "days", 3600: "hours"}
"""Tables of sums by their seconds, the longest first. `at_s` is when the day or hour (UTC) began."""

_TEXT = {"request_id", "tenant", "key_id", "model", "endpoint", "outcome"}
_COLUMNS = ", ".join(f"{one.name} {'TEXT' if one.name in _TEXT else 'NUMERIC'} NOT NULL" for one in fields(LedgerRow))
_ADDED = ("batch", "accepted_tokens", "cache_saved_device_s", "speculation_saved_device_s")
"""Columns that a database of an earlier version lacks."""
_NAMES = ", ".join(one.name for one in fields(LedgerRow))
_REPLACED = ", ".join(f"{one.name} = excluded.{one.name}" for one in fields(LedgerRow))
_KEY = ", ".join(("at_s", *GROUPS))
_TABLES = f"""
CREATE TABLE IF NOT EXISTS requests ({_COLUMNS}, PRIMARY KEY (request_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON requests (at_s, tenant, model, endpoint);
CREATE TABLE IF NOT EXISTS fleet_devices (
    minute INTEGER NOT NULL, devices INTEGER NOT NULL, model TEXT NOT NULL, PRIMARY KEY (minute, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS open_requests (process TEXT NOT NULL, {_COLUMNS}, PRIMARY KEY (request_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gateways (process TEXT PRIMARY KEY, seen_s REAL NOT NULL) WITHOUT ROWID;
"""


def _sums(table: str, width_s: int) -> str:
    """A table of sums, filled with what is there."""
    kinds = ", ".join(f"{name} {'TEXT' if name in _TEXT else 'NUMERIC'} NOT NULL" for name in GROUPS)
    begin, groups, sums = f"CAST(at_s / {width_s} AS INTEGER) * {width_s}", ", ".join(GROUPS), ", ".join(SUMMED)
    return f"""
CREATE TABLE {table} (
    at_s INTEGER NOT NULL, {kinds}, requests INTEGER NOT NULL,
    {", ".join(f"{name} NUMERIC NOT NULL" for name in SUMMED)}, PRIMARY KEY ({_KEY})
) WITHOUT ROWID;
INSERT INTO {table} SELECT {begin}, {groups}, count(*), {", ".join(f"sum({name})" for name in SUMMED)} FROM requests
    GROUP BY {", ".join(map(str, range(1, 2 + len(GROUPS))))};
CREATE TRIGGER count_{table} AFTER INSERT ON requests BEGIN
    INSERT INTO {table} (at_s, {groups}, requests, {sums}) VALUES (
        CAST(new.at_s / {width_s} AS INTEGER) * {width_s}, {", ".join(f"new.{name}" for name in GROUPS)}, 1,
        {", ".join(f"new.{name}" for name in SUMMED)}
    ) ON CONFLICT ({_KEY}) DO UPDATE SET requests = requests + 1,
        {", ".join(f"{name} = {name} + excluded.{name}" for name in SUMMED)};
END;
"""


def _moves(table: str, width_s: int) -> str:
    """A row that is replaced leaves its sums and enters those of its new group."""
    begin = f"CAST({{}}.at_s / {width_s} AS INTEGER) * {width_s}"
    left = " AND ".join([f"at_s = {begin.format('old')}", *(f"{name} = old.{name}" for name in GROUPS)])
    return f"""
CREATE TRIGGER IF NOT EXISTS move_{table} AFTER UPDATE ON requests BEGIN
    UPDATE {table} SET requests = requests - 1, {", ".join(f"{name} = {name} - old.{name}" for name in SUMMED)}
        WHERE {left};
    DELETE FROM {table} WHERE requests = 0 AND {left};
    INSERT INTO {table} (at_s, {", ".join(GROUPS)}, requests, {", ".join(SUMMED)}) VALUES (
        {begin.format("new")}, {", ".join(f"new.{name}" for name in GROUPS)}, 1,
        {", ".join(f"new.{name}" for name in SUMMED)}
    ) ON CONFLICT ({_KEY}) DO UPDATE SET requests = requests + 1,
        {", ".join(f"{name} = {name} + excluded.{name}" for name in SUMMED)};
END;
"""


LOST = "gateway_lost"
"""The outcome of a request whose gateway process was killed. One that was only frozen ends the request after all: that
row replaces it."""
INSERT_ROW = (
    f"INSERT INTO requests ({_NAMES}) VALUES ({', '.join('?' * len(fields(LedgerRow)))}) "
    f"ON CONFLICT (request_id) DO UPDATE SET {_REPLACED} "
    f"WHERE outcome = '{LOST}'"
)
INSERT_DEVICES = (
    "INSERT INTO fleet_devices VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET devices = max(devices, excluded.devices)"
)
REPLACE_OPEN = (
    f"INSERT OR REPLACE INTO open_requests (process, {_NAMES}) VALUES (?, {', '.join('?' * len(fields(LedgerRow)))})"
)
SEEN = "INSERT OR REPLACE INTO gateways VALUES (?, ?)"
SILENT = "SELECT process FROM gateways WHERE seen_s < ?"
RECOVER = (
    f"INSERT INTO requests ({_NAMES}) SELECT {_NAMES} FROM open_requests WHERE process IN ({SILENT}) "
    "ON CONFLICT (request_id) DO NOTHING"
)


def connect(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.Error. A commit survives the end of the process, not always that of the machine."""
    database = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def prepare(database: sqlite3.Connection) -> None:
    """Makes what is missing, also in a database of an earlier version. Raises sqlite3.Error."""
    database.executescript(_TABLES)
    database.execute("BEGIN IMMEDIATE")  # of several processes one changes it
    known = {row[1] for row in database.execute("PRAGMA table_info(requests)")}
    for name in _ADDED:
        if name not in known:
            database.execute(f"ALTER TABLE requests ADD COLUMN {name} NUMERIC NOT NULL DEFAULT 0")
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "fleet_minutes" in tables:
        database.execute("INSERT OR IGNORE INTO fleet_devices SELECT minute, devices, '' FROM fleet_minutes")
        database.execute("DROP TABLE fleet_minutes")
    for width_s, table in SUMS.items():
        if table not in tables:
            for statement in _statements(_sums(table, width_s)):
                database.execute(statement)
        database.execute(_moves(table, width_s))
    database.commit()


def _statements(script: str) -> list[str]:
    """`executescript` would end the transaction."""
    found, part = [], ""
    for line in script.splitlines(keepends=True):
        part += line
        if sqlite3.complete_statement(part):
            found.append(part)
            part = ""
    return found
