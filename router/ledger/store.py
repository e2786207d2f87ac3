"""The database of the ledger: SQLite with a write-ahead log, which several processes of a host may share.

    request ends ─▶ queue ─▶ thread: of 0.25 s, in one transaction     ─▶ requests ─▶ days, hours: their sums
    again        ─▶ queue ─▶                                           ─▶ open_requests: what is being answered
    every minute ─▶ queue ─▶                                           ─▶ fleet_devices: devices that there were

A request is in it once: its id is the key. Requests that a process was answering when it was killed are found among the
open ones, and are counted as they were noted last. Rows that cannot be written are kept in memory, tried again,
and counted; beyond `MAX_QUEUED` they are dropped, and counted, too.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.errors import Misconfigured
from router.ledger.rows import FleetMinute, LedgerRow, OpenRequest, Written
from router.ledger.schema import INSERT_DEVICES, INSERT_ROW, RECOVER, REPLACE_OPEN, SEEN, SILENT, connect, prepare

log = logging.getLogger("baton.ledger")

columns_of = attrgetter(*(one.name for one in fields(LedgerRow)))
"""A row as `INSERT_ROW` has it; `astuple` takes 16 us."""
MAX_QUEUED = 65_536
GATHER_S = 0.25
"""Rows of so long are written in one transaction: one of its own would cost a row five times the CPU time."""
RETRY_S = 1.0
CLOSE_S = 10.0
_WRONG_ROW = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    ValueError,
    TypeError,
    OverflowError,
)
"""Errors that a row's values cause, however often it is tried: an integer of 65 bits, half a surrogate pair, NaN."""
LOST_S = 30.0
"""A process that has written nothing for so long, though it writes every minute, has ended or hangs."""


class LedgerStore(Collector):
    """Writes rows; `close` it at the end. Series: `baton_ledger_rows_total{outcome}`: `written`, `dropped`,
    `recovered`."""

    def __init__(self, path: Path) -> None:
        """Makes the database if it is missing. Raises Misconfigured for a file that is none."""
        self.path = path
        self.outcomes: Counter[str] = Counter(written=0, dropped=0, recovered=0)
        try:
            with closing(connect(path)) as database:
                prepare(database)
        except sqlite3.Error as error:
            raise Misconfigured(
                f"router.ledger.path: {path}: {error}: give a file of this host that this process may write",
                param="router.ledger.path",
            ) from error
        self._process = uuid.uuid4().hex
        self._noted: set[str] = set()  # this process's rows of open_requests; the thread's own
        self._queue: queue.Queue[Written | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, row: Written) -> None:
        """Never waits and never raises."""
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.outcomes["dropped"] += 1

    def close(self) -> None:
        """Returns when all rows are written, or, if they cannot be, after `CLOSE_S`."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def collect(self) -> Iterable[Metric]:
        rows = CounterMetricFamily("baton_ledger_rows", "Rows of the ledger", labels=("outcome",))
        for outcome, count in self.outcomes.items():
            rows.add_metric((outcome,), count)
        yield rows

    def _run(self) -> None:
        with closing(connect(self.path)) as database:
            while True:
                rows = [self._queue.get()]
                self._closing.wait(GATHER_S)
                while not self._queue.empty() and len(rows) < MAX_QUEUED:
                    rows.append(self._queue.get_nowait())
                self._commit(database, [row for row in rows if row is not None])
                if None in rows:
                    return

    def _commit(self, database: sqlite3.Connection, rows: Sequence[Written]) -> None:
        ended = [row for row in rows if isinstance(row, LedgerRow)]
        while rows:
            try:
                with database:
                    self._write_all(database, rows, ended)
            except _WRONG_ROW as error:
                if len(rows) > 1:  # the others are right
                    for row in rows:
                        self._commit(database, [row])
                    return
                log.error("a row that the ledger cannot hold is dropped: %s: %r", error, rows[0])
                self.outcomes["dropped"] += 1
                return
            except sqlite3.Error as error:
                log.error("%d rows are not in the ledger yet: %s: %s", len(rows), self.path, error)
                if self._closing.wait(RETRY_S):
                    self.outcomes["dropped"] += len(ended)
                    return
            else:
                self._noted.difference_update(row.request_id for row in ended)
                self.outcomes["written"] += len(ended)
                return

    def _write_all(self, database: sqlite3.Connection, rows: Sequence[Written], ended: Sequence[LedgerRow]) -> None:
        database.executemany(INSERT_ROW, [columns_of(row) for row in ended])
        minutes = [(one.minute, one.devices, one.model) for one in rows if isinstance(one, FleetMinute)]
        database.executemany(INSERT_DEVICES, minutes)
        running = [one.row for one in rows if isinstance(one, OpenRequest)]
        database.executemany(REPLACE_OPEN, [(self._process, *columns_of(row)) for row in running])
        self._noted.update(row.request_id for row in running)
        over = [row.request_id for row in ended if row.request_id in self._noted]
        database.executemany("DELETE FROM open_requests WHERE request_id = ?", [(one,) for one in over])
        if minutes or running:
            database.execute(SEEN, (self._process, time.time()))

    def recover(self) -> int:
        """Counts the requests that processes were answering which have been silent for `LOST_S`, as far as they had
        come. Returns how many. Blocks. Raises sqlite3.Error."""
        with closing(connect(self.path)) as database, database:
            database.execute("BEGIN IMMEDIATE")
            oldest_s = time.time() - LOST_S
            found = database.execute(RECOVER, (oldest_s,)).rowcount
            database.execute(f"DELETE FROM open_requests WHERE process IN ({SILENT})", (oldest_s,))
            database.execute("DELETE FROM gateways WHERE seen_s < ?", (oldest_s,))
        self.outcomes["recovered"] += found
        return found
