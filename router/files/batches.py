"""Batches, who owns each, and the results of their lines.

    claim ─▶ lease, generation + 1 ─▶ record ... ─▶ finish          lease over: another process claims it

A line's result is written once: its number in the batch is the key. An owner that has lost its lease writes nothing
more, for every write names its generation. So a batch whose owner is killed goes on with the lines that have no result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from protos.errors import InvalidRequest, NotFound, Unavailable
from router.database.database import Database, Row, Transaction
from router.files.file_store import page_of, put_file
from router.files.records import RUNNING, LineError, LineResult, PageAsked, StoredBatch, StoredFile

_JSON = ("metadata", "times", "errors")
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_STATES = ", ".join(f"'{state}'" for state in RUNNING)
_AT_ONCE = 64
"""Results read at a time."""


class LeaseLost(Unavailable):
    """Another process owns the batch, or it has ended."""


class BatchStore:
    """Called from threads. `clock`: seconds since 1970, the same for all processes that share the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    # -- for clients -------------------------------------------------------------------------------------------------

    def add(self, batch: StoredBatch) -> None:
        row = _row(batch) | {"lease_until_s": 0.0}
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        with self._database.writing() as transaction:
            transaction.run(f"INSERT INTO batches ({names}) VALUES ({marks})", *row.values())

    def find(self, tenant: str, batch_id: str, api: str) -> StoredBatch:
        """Raises NotFound, also for a batch of another tenant or another API."""
        with self._database.reading() as transaction:
            return _found(transaction, tenant, batch_id, api)

    def page(self, tenant: str, asked: PageAsked) -> tuple[list[StoredBatch], bool]:
        """Raises InvalidRequest."""
        rows, has_more = page_of(self._database, "batches", tenant, asked)
        return [_batch(row) for row in rows], has_more

    def cancel(self, tenant: str, batch_id: str, api: str) -> StoredBatch:
        """Marks the batch, which its owner ends. Raises NotFound, and InvalidRequest for a batch that has ended."""
        with self._database.writing() as transaction:
            batch = _found(transaction, tenant, batch_id, api)
            if batch.status in ("cancelling", "cancelled"):
                return batch
            if batch.status not in RUNNING or batch.status == "finalizing":
                raise InvalidRequest(f"Cannot cancel the batch {batch.id}: its status is '{batch.status}'")
            return self._enter(transaction, batch, "cancelling", ends_as="cancelled")

    def delete(self, tenant: str, batch_id: str, api: str) -> None:
        """Raises NotFound, and InvalidRequest for a batch that runs."""
        with self._database.writing() as transaction:
            batch = _found(transaction, tenant, batch_id, api)
            if batch.status in RUNNING:
                raise InvalidRequest(f"Cannot delete the batch {batch.id} while it runs: cancel it first")
            transaction.run("DELETE FROM batches WHERE id = ?", batch.id)

    # -- for owners --------------------------------------------------------------------------------------------------

    def claim(self, model: str, lease_s: float, besides: Sequence[str] = ()) -> StoredBatch | None:
        """Leases the oldest batch of the model without an owner, or one of any model that must only end. `besides`:
        batches that this process runs."""
        now = self._clock()
        unclaimed, values = _unclaimed(model, now, besides)
        with self._database.reading() as transaction:  # a look, before waiting for other writers
            if not transaction.run(f"SELECT id {unclaimed}", *values):
                return None
        with self._database.writing() as transaction:
            rows = transaction.run(f"SELECT * {unclaimed}", *values)
            if not rows:
                return None
            batch = replace(_batch(rows[0]), generation=rows[0]["generation"] + 1)
            transaction.run(
                "UPDATE batches SET generation = ?, lease_until_s = ? WHERE id = ?",
                batch.generation, now + lease_s, batch.id,
            )  # fmt: skip
            return batch

    def renew(self, batch: StoredBatch, lease_s: float) -> StoredBatch:
        """The batch as it is now. Raises LeaseLost."""
        with self._database.writing() as transaction:
            owned = _owned(transaction, batch)
            transaction.run("UPDATE batches SET lease_until_s = ? WHERE id = ?", self._clock() + lease_s, batch.id)
            return owned

    def release(self, batch: StoredBatch) -> None:
        """Another process may claim it at once."""
        with self._database.writing() as transaction:
            transaction.run(
                "UPDATE batches SET lease_until_s = 0 WHERE id = ? AND generation = ?", batch.id, batch.generation
            )

    def validated(self, batch: StoredBatch, total: int) -> StoredBatch:
        """Sets the number of lines; the batch runs from now on, unless it is being cancelled. Raises LeaseLost."""
        with self._database.writing() as transaction:
            owned = replace(_owned(transaction, batch), total=total)
            state = "in_progress" if owned.status == "validating" else owned.status
            return self._enter(transaction, owned, state)

    def reject(
        self,
        batch: StoredBatch,
        wrong: Sequence[LineError],
        output: StoredFile | None = None,
        errors: StoredFile | None = None,
    ) -> StoredBatch:
        """Ends a batch whose input is wrong or gone. The files have its results. Raises LeaseLost."""
        with self._database.writing() as transaction:
            owned = replace(_owned(transaction, batch), errors=tuple(wrong))
            return self._enter(transaction, _filed(transaction, owned, output, errors), "failed")

    def record(self, batch: StoredBatch, results: Sequence[LineResult]) -> None:
        """Writes results of lines, and drops those of lines that have one. Raises LeaseLost."""
        with self._database.writing() as transaction:
            owned = _owned(transaction, batch)
            known = {
                row["line"]
                for one in results
                for row in transaction.run(
                    "SELECT line FROM batch_results WHERE batch_id = ? AND line = ?", batch.id, one.line
                )
            }
            new = {one.line: one for one in results if one.line not in known}.values()
            transaction.run_many(
                "INSERT INTO batch_results VALUES (?, ?, ?, ?)",
                [(batch.id, one.line, int(one.is_error), one.content) for one in new],
            )
            num_failed = sum(one.is_error for one in new)
            sums = {name: getattr(owned, name) + sum(getattr(one, name) for one in new) for name in _TOKENS}
            sums |= {"failed": owned.failed + num_failed, "completed": owned.completed + len(new) - num_failed}
            columns = ", ".join(f"{name} = ?" for name in sums)
            transaction.run(f"UPDATE batches SET {columns} WHERE id = ?", *sums.values(), batch.id)

    def done(self, batch: StoredBatch) -> bytearray:
        """1 for each line that has a result, by its number."""
        flags = bytearray(batch.total)
        with self._database.reading() as transaction:
            for row in transaction.run("SELECT line FROM batch_results WHERE batch_id = ?", batch.id):
                flags[row["line"]] = 1
        return flags

    def finalize(self, batch: StoredBatch, ends_as: str) -> StoredBatch:
        """No line runs any more: its files are written next. Raises LeaseLost."""
        with self._database.writing() as transaction:
            owned = _owned(transaction, batch)
            if owned.ends_as:
                return owned
            return self._enter(transaction, owned, "finalizing", ends_as=ends_as)

    def results(self, batch: StoredBatch, *, is_error: bool) -> Iterator[bytes]:
        """Their lines, in the order of the input."""
        last = -1
        while True:
            with self._database.reading() as transaction:
                rows = transaction.run(
                    "SELECT line, content FROM batch_results WHERE batch_id = ? AND line > ? AND is_error = ? "
                    "ORDER BY line LIMIT ?",
                    batch.id, last, int(is_error), _AT_ONCE,
                )  # fmt: skip
            if not rows:
                return
            yield b"".join(row["content"] for row in rows)
            last = rows[-1]["line"]

    def finish(self, batch: StoredBatch, output: StoredFile | None, errors: StoredFile | None) -> StoredBatch:
        """Its files are there. Raises LeaseLost."""
        with self._database.writing() as transaction:
            owned = _owned(transaction, batch)
            return self._enter(transaction, _filed(transaction, owned, output, errors), owned.ends_as)

    def _enter(self, transaction: Transaction, batch: StoredBatch, status: str, *, ends_as: str = "") -> StoredBatch:
        """Writes the batch with a new status."""
        times = {status: self._clock()} | dict(batch.times)
        changed = replace(batch, status=status, ends_as=ends_as or batch.ends_as, times=times)
        row = _row(changed)
        columns = ", ".join(f"{name} = ?" for name in row)
        transaction.run(f"UPDATE batches SET {columns} WHERE id = ?", *row.values(), batch.id)
        return changed


def _unclaimed(model: str, now: float, besides: Sequence[str]) -> tuple[str, tuple[Any, ...]]:
    """Returns the end of a query, and its values."""
    others = f"AND id NOT IN ({', '.join('?' * len(besides))}) " if besides else ""
    where = (
        f"FROM batches WHERE status IN ({_STATES}) AND lease_until_s < ? "
        "AND (model = ? OR expires_s <= ? OR ends_as != '') "
    )
    return f"{where}{others}ORDER BY created_s, id LIMIT 1", (now, model, now, *besides)


def _filed(
    transaction: Transaction, batch: StoredBatch, output: StoredFile | None, errors: StoredFile | None
) -> StoredBatch:
    """Marks the batch's results as written to files."""
    for file in (output, errors):
        if file is not None:
            put_file(transaction, file)
    transaction.run("DELETE FROM batch_results WHERE batch_id = ?", batch.id)
    return replace(
        batch,
        output_file_id=output.id if output is not None else None,
        error_file_id=errors.id if errors is not None else None,
    )


def _found(transaction: Transaction, tenant: str, batch_id: str, api: str) -> StoredBatch:
    found = [_batch(row) for row in transaction.run("SELECT * FROM batches WHERE id = ?", batch_id)]
    if not found or found[0].tenant != tenant or found[0].api != api:
        raise NotFound(f"No batch found with id '{batch_id[:60]}'", param="batch_id")
    return found[0]


def _owned(transaction: Transaction, batch: StoredBatch) -> StoredBatch:
    rows = transaction.run(
        f"SELECT * FROM batches WHERE id = ? AND generation = ? AND status IN ({_STATES})", batch.id, batch.generation
    )
    if not rows:
        raise LeaseLost(f"batch {batch.id} has another owner, or has ended")
    return _batch(rows[0])


def _row(batch: StoredBatch) -> dict[str, Any]:
    values = {one.name: getattr(batch, one.name) for one in fields(StoredBatch)}
    values["errors"] = [asdict(one) for one in batch.errors]
    return {name: json.dumps(value) if name in _JSON else value for name, value in values.items()}


def _batch(row: Row) -> StoredBatch:
    values: dict[str, Any] = {one.name: row[one.name] for one in fields(StoredBatch)}
    values |= {name: json.loads(values[name]) for name in _JSON}
    return StoredBatch(**values | {"errors": tuple(LineError(**one) for one in values["errors"])})
