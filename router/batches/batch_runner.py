"""Runs the batches of a gateway process: claims them, checks them, runs their lines, writes their files.

claim ─▶ validate ─▶ lines, while there is room ─▶ finalize ─▶ the next batch
  └── the lease is renewed until the batch ends; lost: everything about it stops, and another process goes on"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from protos.errors import BatonError, Internal, NotFound, NoWorkers, Overloaded, WorkerDraining
from router.auth.auth import acting_for
from router.auth.tenants import Tenant
from router.batches.line_run import InputLine, LineAnswer, answer_line, read_line, result_of, undone
from router.batches.lines import InputChecker, LineIndex
from router.files.batch_storage import BatchStorage
from router.files.batches import BatchStore, LeaseLost
from router.files.contents import spooled
from router.files.records import RESULTS, LineError, LineResult, StoredBatch, StoredFile
from router.gateway import Gateway
from router.jobs import FleetView

DEFAULT_RESULTS_S = 30 * 86_400.0
"""Files of results are kept for so long, unless the batch has another time."""


class ResultWriter:
    """Writes results, all that wait in one transaction."""

    def __init__(self, store: BatchStore, batch: StoredBatch) -> None:
        self._store = store
        self._batch = batch
        self._waiting: list[LineResult] = []
        self._turn = asyncio.Lock()

    async def put(self, result: LineResult) -> None:
        """Returns when the result is written. Raises as `flush` does, which writes what a cancelled `put` has not."""
        self._waiting.append(result)
        await self.flush()

    async def flush(self) -> None:
        """Raises LeaseLost, and Unavailable if the database cannot be written."""
        async with self._turn:
            if waiting := self._waiting[:]:
                await asyncio.to_thread(self._store.record, self._batch, waiting)
                del self._waiting[: len(waiting)]


def results_files(storage: BatchStorage, batch: StoredBatch) -> tuple[StoredFile | None, StoredFile | None]:
    """Writes the files of outputs and of errors; None for a file without lines. Writing again gives the same files and
    names. Blocks: call it in a thread."""
    if batch.api == "anthropic":
        both = (part for is_error in (False, True) for part in storage.batches.results(batch, is_error=is_error))
        return _written(storage, batch, "output", both), None
    output = _written(storage, batch, "output", storage.batches.results(batch, is_error=False))
    return output, _written(storage, batch, "error", storage.batches.results(batch, is_error=True))


def _written(storage: BatchStorage, batch: StoredBatch, kind: str, parts: Iterator[bytes]) -> StoredFile | None:
    file_id = "file-" + hashlib.blake2b(f"{batch.id} {kind}".encode(), digest_size=12).hexdigest()
    with spooled() as content:
        content.writelines(parts)
        if not (num_bytes := content.tell()):
            return None
        storage.files.contents.store(file_id, content)
    now = storage.clock()
    return StoredFile(
        id=file_id,
        tenant=batch.tenant,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=RESULTS,
        bytes=num_bytes,
        created_s=now,
        expires_s=now + (batch.output_expires_s or DEFAULT_RESULTS_S),
        is_hidden=batch.api != "openai",
    )


SERVED_LOOK_S = 0.5


class BatchRoom:
    """At most `max_running` lines in this process, and none while no request could be served."""

    def __init__(self, fleet: FleetView, max_running: int) -> None:
        self._fleet = fleet
        self._free = asyncio.Semaphore(max_running)

    async def enter(self) -> None:
        """Returns when another line may run. `leave` comes once after each."""
        await self._free.acquire()
        try:
            await self.served()
        except BaseException:
            self._free.release()
            raise

    def leave(self) -> None:
        self._free.release()

    async def served(self) -> None:
        while not self._fleet.ready():  # noqa: ASYNC110 - a fleet notifies the dispatcher alone
            await asyncio.sleep(SERVED_LOOK_S)


class BatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.batches = Counter("baton_batches", "Batches that have ended", ("status",), registry=registry)
        self._lines = Counter("baton_batch_requests", "Requests of batches answered", ("outcome",), registry=registry)
        self.failed_looks = Counter("baton_batch_failed_looks", "Failed looks for batches to run", registry=registry)
        self._tokens = Counter("baton_batch_tokens", "Tokens of requests of batches", ("kind",), registry=registry)

    def ended(self, answer: LineAnswer) -> None:
        self._lines.labels("ok" if answer.status < 300 else "error").inc()
        usage = answer.usage
        counts = {
            "input": usage.prompt_tokens - usage.cached_tokens,
            "cached": usage.cached_tokens,
            "output": usage.completion_tokens,
        }
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)


log = logging.getLogger("baton.batches")

MAX_BATCHES = 4
"""Batches that a process runs at the same time."""
LOOK_S = 1.0
"""A batch that another process was given, or lost, is found after so long."""
SWEEP_S = 60.0
MAX_ATTEMPTS = 8
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
RENEWALS_A_LEASE = 4
MAX_FAILURES = 3
"""Internal errors of a batch in one process: the last one fails the batch, and one is enough if it only had to end."""


class BatchRunner:
    """Runs batches. `gateway` is the clients' with the workers, limits and ledger of batches; `room` is the capacity
    that people leave."""

    def __init__(
        self, gateway: Gateway, storage: BatchStorage, room: BatchRoom, metrics: BatchMetrics, *, lease_s: float
    ) -> None:
        self._gateway = gateway
        self._storage = storage
        self._room = room
        self._metrics = metrics
        self._lease_s = lease_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._owned: dict[str, _OwnedBatch] = {}
        self._failures: dict[str, int] = {}

    async def run(self) -> None:
        """Runs batches until it is cancelled, which gives them back."""
        next_sweep_s, clock = 0.0, asyncio.get_running_loop().time
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._storage.changed.wait()
                self._storage.changed.clear()
                try:
                    await self._claim()
                    for owned in list(self._owned.values()):
                        await owned.refresh()
                    if clock() >= next_sweep_s:
                        next_sweep_s = clock() + SWEEP_S
                        await asyncio.to_thread(self._storage.files.sweep)
                except BatonError as error:
                    self._metrics.failed_looks.inc()
                    self._storage.failed(f"batches are not looked at: {error.message}")
                except Exception:
                    self._metrics.failed_looks.inc()
                    log.exception("batches are not looked at: internal error")
        finally:
            running = [*self._running.values()]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _claim(self) -> None:
        store, model = self._storage.batches, self._gateway.card.name
        while len(self._running) < MAX_BATCHES:
            batch = await asyncio.to_thread(store.claim, model, self._lease_s, list(self._running))
            if batch is None:
                return
            task = asyncio.create_task(self._own(batch), name=batch.id)
            self._running[batch.id] = task

    async def _own(self, batch: StoredBatch) -> None:
        store = self._storage.batches
        owned = _OwnedBatch(self._gateway, self._storage, self._room, self._metrics, batch)
        self._owned[batch.id] = owned
        work = asyncio.create_task(owned.run(), name=f"lines of {batch.id}")
        try:
            while not work.done():
                await asyncio.wait([work], timeout=self._lease_s / RENEWALS_A_LEASE)
                if not work.done():
                    owned.look(await asyncio.to_thread(store.renew, batch, self._lease_s))
            await work
            self._storage.failures.over()
        except LeaseLost:
            log.info("%s goes on in another gateway process", batch.id)
        except BatonError as error:
            self._storage.failed(f"{batch.id} stops until its lease ends: {error.message}")
        except Exception:
            log.exception("%s stops until its lease ends: internal error", batch.id)
            self._failures[batch.id] = self._failures.get(batch.id, 0) + 1
            if owned.is_stopped or self._failures[batch.id] >= MAX_FAILURES:
                del self._failures[batch.id]
                await self._fail(batch)
        finally:
            del self._owned[batch.id], self._running[batch.id]
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
                with suppress(BatonError):
                    await asyncio.to_thread(store.release, batch)

    async def _fail(self, batch: StoredBatch) -> None:
        """Ends a batch that cannot end otherwise, with the results that it has. Raises nothing."""
        wrong = LineError(code=Internal.code, message="An internal error, which the server's log has, ended this batch")
        files: tuple[StoredFile | None, StoredFile | None] = (None, None)
        try:
            with suppress(Exception):
                files = await asyncio.to_thread(results_files, self._storage, batch)
            await asyncio.to_thread(self._storage.batches.reject, batch, [wrong], *files)
        except Exception:
            log.exception("%s cannot be ended", batch.id)


class _OwnedBatch:
    """A batch that this process owns, until it ends."""

    def __init__(
        self, gateway: Gateway, storage: BatchStorage, room: BatchRoom, metrics: BatchMetrics, batch: StoredBatch
    ) -> None:
        self._gateway = gateway
        self._storage = storage
        self._room = room
        self._metrics = metrics
        self._batch = batch
        self._index = LineIndex()
        self._ends_as = batch.ends_as
        self._lines: asyncio.Task[None] | None = None
        self.is_stopped = False  # cancelled by its client, or expired

    async def refresh(self) -> None:
        """Raises Unavailable."""
        batch, store = self._batch, self._storage.batches
        self.look(await asyncio.to_thread(store.find, batch.tenant, batch.id, batch.api))

    def look(self, batch: StoredBatch) -> None:
        """`batch`: as it is in the database now."""
        if batch.ends_as:
            self._stop(batch.ends_as)
        elif self._storage.clock() >= batch.expires_s:
            self._stop("expired")

    def _stop(self, ends_as: str) -> None:
        if not self.is_stopped:
            self._ends_as = self._ends_as or ends_as
            self.is_stopped = True
            if self._lines is not None:
                self._lines.cancel()

    async def run(self) -> None:
        """Raises LeaseLost and other BatonErrors, after which the batch can continue from what is recorded."""
        self.look(self._batch)
        wrong = await self._check()
        store = self._storage.batches
        if wrong:
            log.info("%s is failed: %s", self._batch.id, wrong[0].message)
            files = await asyncio.to_thread(results_files, self._storage, self._batch)
            self._batch = await asyncio.to_thread(store.reject, self._batch, wrong, *files)
            return
        if not self._is_validated:
            self._batch = await asyncio.to_thread(store.validated, self._batch, len(self._index))
            self.look(self._batch)
        if (tenant := self._gateway.access.tenant(self._batch.tenant)) is None:
            self._stop("cancelled")
        elif not self.is_stopped:
            await self._run_lines(replace(tenant, requests_per_min=None, tokens_per_min=None, max_concurrent=None))
        await self._finish()

    @property
    def _is_validated(self) -> bool:
        return bool(self._batch.total) and self._batch.status != "validating"

    async def _check(self) -> list[LineError]:
        """Checks the lines. Lines that are only indexed: those that were valid at an earlier check, although an adapter
        or a limit may have changed; those that will not run; and those of Messages, which were checked before."""
        endpoint = self._batch.endpoint
        if self._is_validated or self.is_stopped or self._batch.api == "anthropic":
            checker = InputChecker(endpoint, lambda _: None, max_lines=sys.maxsize, max_line_bytes=sys.maxsize)
        else:
            checker = InputChecker(
                endpoint, self._gateway.check_batch_model, max_lines=self._storage.max_lines,
                max_line_bytes=self._gateway.http.max_body_bytes,
            )  # fmt: skip
        try:
            await asyncio.to_thread(checker.read, partial(self._storage.files.contents.read, self._batch.input_file_id))
        except NotFound as error:
            return [LineError(code="file_not_found", message=error.message, param="input_file_id")]
        self._index = checker.index
        return checker.errors

    # -- running -------------------------------------------------------------------------------------------------------

    async def _run_lines(self, tenant: Tenant) -> None:
        """Returns when each line has a result, or the batch is stopped. Raises LeaseLost and what a line raises."""
        writer = ResultWriter(self._storage.batches, self._batch)
        lines = self._lines = asyncio.create_task(self._begin_lines(tenant, writer))
        try:
            await asyncio.wait([lines])
        finally:
            lines.cancel()
            [failed] = await asyncio.gather(lines, return_exceptions=True)
            [unwritten] = await asyncio.gather(writer.flush(), return_exceptions=True)
        for error in (unwritten, failed):
            if isinstance(error, Exception):
                raise error

    async def _begin_lines(self, tenant: Tenant, writer: ResultWriter) -> None:
        done = await asyncio.to_thread(self._storage.batches.done, self._batch)
        try:
            async with asyncio.TaskGroup() as lines:
                for number in self._index.order():
                    if not done[number]:
                        await self._room.enter()
                        line = lines.create_task(self._line(number, tenant, writer))
                        line.add_done_callback(lambda _: self._room.leave())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _line(self, number: int, tenant: Tenant, writer: ResultWriter) -> None:
        """Runs a line. Raises an error that is not the request's: unreadable content, or a bug. The batch cannot end
        without this line's result."""
        try:
            line = await self._read(number)
            with acting_for(self._batch.key_id):
                answer = await self._answer(line, tenant)
        except Exception as error:
            error.add_note(f"line {number + 1} has no result")
            raise
        self._metrics.ended(answer)
        await writer.put(result_of(self._batch, line, answer))

    async def _answer(self, line: InputLine, tenant: Tenant) -> LineAnswer:
        """Answers one line. It never waits for a worker or for room; other failures end it after `MAX_ATTEMPTS`."""
        pause_s, num_failed = FIRST_PAUSE_S, 0
        while True:
            try:
                is_last = num_failed + 1 >= MAX_ATTEMPTS
                return await answer_line(
                    self._gateway, self._batch, tenant, line, is_last=is_last, is_stopped=lambda: self.is_stopped
                )
            except BatonError as error:
                log.info("%s is tried again: %s", line.name, error.message, extra={"request": line.name})
                num_failed += not isinstance(error, NoWorkers | Overloaded | WorkerDraining)
                await asyncio.sleep(max(pause_s, error.retry_after_s or 0.0))
                await self._room.served()
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _read(self, number: int) -> InputLine:
        start, size = self._index.starts[number], self._index.sizes[number]
        contents = self._storage.files.contents
        raw = await asyncio.to_thread(contents.read, self._batch.input_file_id, start, size)
        return read_line(self._batch, number, raw)

    # -- ending --------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        store, ends_as = self._storage.batches, self._ends_as or "completed"
        self._batch = await asyncio.to_thread(store.finalize, self._batch, ends_as)
        done = await asyncio.to_thread(store.done, self._batch)
        missing = [number for number in range(len(done)) if not done[number]]
        for at in range(0, len(missing), 64):
            lines = [await self._read(number) for number in missing[at : at + 64]]
            results = [undone(self._batch, line, self._batch.ends_as) for line in lines]
            await asyncio.to_thread(store.record, self._batch, results)
        output, errors = await asyncio.to_thread(results_files, self._storage, self._batch)
        self._batch = await asyncio.to_thread(store.finish, self._batch, output, errors)
        self._metrics.batches.labels(self._batch.status).inc()
        log.info("%s is %s", self._batch.id, self._batch.status)
