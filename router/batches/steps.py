"""Results of a batch's lines on their way to the database, and from there to its files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

from router.files.batch_storage import BatchStorage
from router.files.batches import BatchStore
from router.files.records import RESULTS, LineResult, StoredBatch, StoredFile

MAX_PENDING = 256
DEFAULT_RESULTS_S = 30 * 86_400.0
"""Files of results are kept for so long, unless the batch has another time."""


class ResultWriter:
    """Writes results, all that wait in one transaction. `put` waits while `MAX_PENDING` do."""

    def __init__(self, store: BatchStore, batch: StoredBatch) -> None:
        self._store = store
        self._batch = batch
        self._queue: asyncio.Queue[LineResult] = asyncio.Queue(MAX_PENDING)
        self._ending = asyncio.Event()

    async def put(self, result: LineResult) -> None:
        await self._queue.put(result)

    def end(self) -> None:
        """`run` returns when all results are written."""
        self._ending.set()

    async def run(self) -> None:
        """Raises LeaseLost, and Unavailable if the database cannot be written."""
        ending = asyncio.create_task(self._ending.wait())
        try:
            while True:
                if self._queue.empty():
                    if ending.done():
                        return
                    first = asyncio.ensure_future(self._queue.get())
                    await asyncio.wait([first, ending], return_when=asyncio.FIRST_COMPLETED)
                    if not first.done():
                        first.cancel()
                        continue
                    waiting = [first.result()]
                else:
                    waiting = []
                while not self._queue.empty():
                    waiting.append(self._queue.get_nowait())
                await asyncio.to_thread(self._store.record, self._batch, waiting)
        finally:
            ending.cancel()


def results_files(storage: BatchStorage, batch: StoredBatch) -> tuple[StoredFile | None, StoredFile | None]:
    """Writes the file of outputs and that of errors; None for one without a line. Written again they are the same,
    with the same names. Blocks: call it in a thread."""
    if batch.api == "anthropic":
        both = (part for is_error in (False, True) for part in storage.batches.results(batch, is_error=is_error))
        return _written(storage, batch, "output", both), None
    output = _written(storage, batch, "output", storage.batches.results(batch, is_error=False))
    return output, _written(storage, batch, "error", storage.batches.results(batch, is_error=True))


def _written(storage: BatchStorage, batch: StoredBatch, kind: str, parts: Iterator[bytes]) -> StoredFile | None:
    file_id = "file-" + hashlib.blake2b(f"{batch.id} {kind}".encode(), digest_size=12).hexdigest()
    first = next(parts, None)
    if first is None:
        return None
    with storage.files.contents.writer(file_id) as writer:
        writer.write(first)
        for part in parts:
            writer.write(part)
        num_bytes = writer.commit()
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
