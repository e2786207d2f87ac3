"""Rows that are older than they are kept are deleted; their sums stay, forever.

    requests        deleted; days and hours have their sums
    worker_tokens   the last count of each hour stays
    model_devices   minutes become hours: one row with the sum

Reports have whole hours before `rows_from_s`, the beginning of a day (UTC), which is written with the first deleted
row; `deleted_to_s` follows with the last.
"""

from __future__ import annotations

from router.database.database import Database, Transaction

DAY_S, HOUR_S = 86_400, 3600
CHUNK = 2000
"""Rows that a transaction deletes: others write between two."""

_OLD_REQUESTS = (
    "DELETE FROM requests WHERE request_id IN (SELECT request_id FROM requests WHERE at_s < ? LIMIT ?) "
    "RETURNING request_id"
)
_OLD_COUNTS = (
    "SELECT worker, incarnation, minute FROM worker_tokens AS early WHERE minute >= ? AND minute < ? AND EXISTS ("
    "SELECT 1 FROM worker_tokens AS late WHERE late.worker = early.worker AND late.incarnation = early.incarnation "
    "AND late.minute > early.minute AND late.minute < ({hour} + 1) * 60 "
    "AND late.prompt_tokens_before <= early.prompt_tokens_before "
    "AND late.output_tokens_before <= early.output_tokens_before) LIMIT ?"
)
"""Counts of which a later one of the hour says all of."""
_OLD_MINUTES = (
    "SELECT {hour} * 60 AS hour, model, CAST(sum(devices) AS BIGINT) AS devices FROM model_devices "
    "WHERE minute >= ? AND minute < ? GROUP BY 1, 2 HAVING count(*) > 1 OR min(minute) > {hour} * 60 LIMIT ?"
)


def delete_chunk(transaction: Transaction, rows_from_s: int) -> int:
    """Returns the number of deleted rows; 0 if nothing is left."""
    [done] = transaction.run("SELECT deleted_to_s FROM retention")
    if done["deleted_to_s"] >= rows_from_s:
        return 0
    since, until = done["deleted_to_s"] // 60, rows_from_s // 60
    num_requests = len(transaction.run(_OLD_REQUESTS, rows_from_s, CHUNK))
    hour = transaction.whole("early.minute / 60")
    counts = transaction.run(_OLD_COUNTS.format(hour=hour), since, until, CHUNK)
    transaction.run_many(
        "DELETE FROM worker_tokens WHERE worker = ? AND incarnation = ? AND minute = ?",
        [(row["worker"], row["incarnation"], row["minute"]) for row in counts],
    )
    hours = transaction.run(_OLD_MINUTES.format(hour=transaction.whole("minute / 60")), since, until, CHUNK // 60 + 1)
    transaction.run_many(
        "DELETE FROM model_devices WHERE minute >= ? AND minute < ? AND model = ?",
        [(row["hour"], row["hour"] + 60, row["model"]) for row in hours],
    )
    transaction.run_many(
        "INSERT INTO model_devices (minute, devices, model) VALUES (?, ?, ?)",
        [(row["hour"], row["devices"], row["model"]) for row in hours],
    )
    if not (num_rows := num_requests + len(counts) + len(hours)):
        transaction.run("UPDATE retention SET deleted_to_s = ?", rows_from_s)
        return 0
    transaction.run("UPDATE retention SET rows_from_s = ? WHERE rows_from_s < ?", rows_from_s, rows_from_s)
    return num_rows


def rows_from(transaction: Transaction) -> int:
    """Single requests are kept from this second on (since 1970); 0 if none was deleted."""
    return int(transaction.run("SELECT rows_from_s FROM retention")[0]["rows_from_s"])


def kept_times(database: Database, since_s: int, until_s: int) -> tuple[int, int, int]:
    """Widens the times of a report; also returns since when single requests are kept. Raises Unavailable."""
    with database.reading() as transaction:
        first_s = rows_from(transaction)
    return *whole_hours(since_s, until_s, first_s), first_s


def whole_hours(since_s: int, until_s: int, rows_from_s: int) -> tuple[int, int]:
    """Widens times before `rows_from_s` to the hours that have sums."""
    if since_s < rows_from_s:
        since_s = since_s // HOUR_S * HOUR_S
    if until_s < rows_from_s:
        until_s = -(-until_s // HOUR_S) * HOUR_S
    return since_s, until_s
