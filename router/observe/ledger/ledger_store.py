"""The ledger's rows in a database, which several gateway processes share.

request ends ─▶ queue ─▶ thread: of 0.25 s, in one transaction     ─▶ requests ─▶ days, hours: their sums
again        ─▶ queue ─▶                                           ─▶ open_requests: what is being answered
every minute ─▶ queue ─▶                                           ─▶ model_devices: devices that there were
every 5 s    ─▶ queue ─▶                                           ─▶ worker_tokens: what workers have computed
every 30 s                                                         ◀─ rows older than they are kept, some at a time"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.errors import Unavailable
from router.database.database import Database, RejectedValue, Transaction
from router.observe.ledger.journal import RowJournal
from router.observe.ledger.ledger_tables import (
    INSERT_COUNT,
    INSERT_DEVICES,
    INSERT_ROW,
    RECOVER,
    REPLACE_OPEN,
    SEEN,
    SILENT,
)
from router.observe.ledger.retention import DAY_S, delete_chunk
from router.observe.ledger.rows import FleetMinute, LedgerRow, OpenRequest, WorkerCount, Written

log = logging.getLogger("baton.ledger")

columns_of = attrgetter(*(field.name for field in fields(LedgerRow)))
"""A row as `INSERT_ROW` has it; `astuple` takes 16 us."""
floats_of = attrgetter(*(field.name for field in fields(LedgerRow) if field.type == "float"))
"""Databases differ in which of infinity and NaN they have, and a sum with one is lost."""
MAX_QUEUED = 65_536
GATHER_S = 0.25
"""Rows of so long are written in one transaction: one of its own would cost a row five times the CPU time."""
RETRY_S = 1.0
CLOSE_S = 10.0
MAX_CHUNKS = 10
"""Old rows deleted at a time: 20,000 in 30 s."""
LOST_S = 30.0
"""A process that has written nothing for so long, though it writes every minute, has ended or hangs."""


class LedgerStore(Collector):
    """Writes rows; `close` it at the end. Series: `baton_ledger_rows_total{outcome}`: `written`, `dropped`,
    `recovered`, `deleted` (they were older than they are kept)."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] | None = None,
        *,
        keep_days: int = 0,
        journal: RowJournal | None = None,
    ) -> None:
        """The store owns the database. `keep_days` 0 keeps requests forever; `journal` keeps unwritten rows if this
        process is killed."""
        self.database = database
        self.outcomes: Counter[str] = Counter(written=0, dropped=0, recovered=0, deleted=0)
        self._clock = clock or database.now_s
        self._keep_days = keep_days
        self._journal = journal
        self._lock = threading.Lock()  # a row is in the queue and in the journal's file of that time
        self._process = uuid.uuid4().hex
        self._noted: set[str] = set()  # this process's rows of open_requests; the thread's own
        self._queue: queue.Queue[Written | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._is_closed = False
        self._is_away = False  # the database, at the last try
        self._gave_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, row: Written) -> None:
        """Never waits and never raises."""
        if isinstance(row, OpenRequest) and self._is_away:
            return
        try:
            if self._is_closed:
                raise queue.Full
            with self._lock:
                self._queue.put_nowait(row)
                if self._journal is not None and isinstance(row, LedgerRow):
                    self._journal.write(row)
        except queue.Full:
            self.outcomes["dropped"] += isinstance(row, LedgerRow)

    @property
    def trouble(self) -> str:
        """Why rows are not written; "" while they are."""
        return self.database.trouble

    def close(self) -> None:
        """Waits for all rows for `CLOSE_S` at most. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._closing.set()
        until_s = time.monotonic() + CLOSE_S
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            self._gave_up.set()
            return
        self._thread.join(until_s - time.monotonic())
        self._gave_up.set()
        self.database.close()
        if self._journal is not None:
            self._journal.close(is_written=not self._thread.is_alive() and not self._is_away)

    def collect(self) -> Iterable[Metric]:
        rows = CounterMetricFamily("baton_ledger_rows", "Rows of the ledger", labels=("outcome",))
        for outcome, count in self.outcomes.items():
            rows.add_metric((outcome,), count)
        yield rows

    def _run(self) -> None:
        while True:
            rows = [self._queue.get()]
            self._closing.wait(GATHER_S)
            with self._lock:
                while not self._queue.empty():
                    rows.append(self._queue.get_nowait())
                if self._journal is not None:
                    self._journal.turn()
            try:
                self._commit([row for row in rows if row is not None])
            except Exception:  # a bug: the next rows are written
                log.exception("%d rows are lost to the ledger: internal error", len(rows))
                self.outcomes["dropped"] += sum(isinstance(row, LedgerRow) for row in rows)
            if self._journal is not None and not self._is_away:
                self._journal.done()
            if None in rows:
                return

    def _commit(self, rows: Sequence[Written]) -> None:
        ended = [row for row in rows if isinstance(row, LedgerRow)]
        while rows:
            try:
                with self.database.writing() as transaction:
                    self._write_all(transaction, rows, ended)
            except Unavailable as error:
                if not self._is_away:  # the database logs the others
                    log.error("%d rows are not in the ledger yet: %s", len(rows), error)
                self._is_away = True
                if self._gave_up.wait(RETRY_S):
                    log.error("%d rows of requests are not in the ledger: the gateway has ended", len(ended))
                    self.outcomes["dropped"] += len(ended)
                    return
            except Exception as error:
                if len(rows) > 1:  # the others are right
                    for row in rows:
                        self._commit([row])
                    return
                is_rejected = isinstance(error, RejectedValue)  # anything else is a bug of ours
                text = "a row that the ledger cannot hold is dropped: %s: %r"
                log.error(text, error, rows[0], exc_info=None if is_rejected else error)
                self.outcomes["dropped"] += len(ended)
                return
            else:
                self._is_away = False
                self._noted.difference_update(row.request_id for row in ended)
                self.outcomes["written"] += len(ended)
                return

    def _write_all(self, transaction: Transaction, rows: Sequence[Written], ended: Sequence[LedgerRow]) -> None:
        running = [row.row for row in rows if isinstance(row, OpenRequest)]
        if not all(math.isfinite(sum(floats_of(row))) for row in (*ended, *running)):
            raise RejectedValue("a number is infinite or none")
        transaction.run_many(INSERT_ROW, [columns_of(row) for row in ended])
        minutes = [(row.minute, row.devices, row.model) for row in rows if isinstance(row, FleetMinute)]
        transaction.run_many(INSERT_DEVICES, minutes)
        counts = [
            (row.worker, row.incarnation, row.minute, row.prompt_tokens, row.output_tokens, *row.before)
            for row in rows
            if isinstance(row, WorkerCount)
        ]
        transaction.run_many(INSERT_COUNT, counts)
        transaction.run_many(REPLACE_OPEN, [(self._process, *columns_of(row)) for row in running])
        self._noted.update(row.request_id for row in running)
        over = [row.request_id for row in ended if row.request_id in self._noted]
        transaction.run_many("DELETE FROM open_requests WHERE request_id = ?", [(request_id,) for request_id in over])
        if minutes or running:
            transaction.run(SEEN, self._process, self._clock())

    def recover(self) -> int:
        """Records the open requests of processes that were silent for `LOST_S`. Returns how many. Blocks. Raises
        Unavailable."""
        with self.database.writing() as transaction:
            oldest_s = self._clock() - LOST_S
            num_rows = len(transaction.run(RECOVER, oldest_s))
            transaction.run(f"DELETE FROM open_requests WHERE process IN ({SILENT})", oldest_s)
            transaction.run("DELETE FROM gateways WHERE seen_s < ?", oldest_s)
        if self._journal is not None:
            num_rows += self._journal.recover(self._put)
        self.outcomes["recovered"] += num_rows
        return num_rows

    def _put(self, rows: Sequence[LedgerRow]) -> int:
        """Writes missing rows of a lost process; they replace its notes. Raises Unavailable."""
        num_rows = 0
        for row in rows:
            try:
                with self.database.writing() as transaction:
                    num_rows += len(transaction.run(f"{INSERT_ROW} RETURNING request_id", *columns_of(row)))
                    transaction.run("DELETE FROM open_requests WHERE request_id = ?", row.request_id)
            except RejectedValue as error:
                log.error("a row of a lost gateway process is dropped: %s: %r", error, row)
                self.outcomes["dropped"] += 1
        return num_rows

    def delete_old(self) -> int:
        """Deletes some expired rows; their sums stay. Returns how many. Blocks. Raises Unavailable."""
        total, oldest_s = 0, (int(self._clock()) // DAY_S - self._keep_days) * DAY_S
        for _ in range(MAX_CHUNKS if self._keep_days else 0):
            with self.database.writing() as transaction:
                num_rows = delete_chunk(transaction, oldest_s)
            if not num_rows:
                break
            total += num_rows
        self.outcomes["deleted"] += total
        return total
