"""Results of a batch's lines on their way to the database, and from there to its files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

from router.files.batch_storage import BatchStorage
from router.files.batches import BatchStore
from router.files.contents import spooled
from router.files.records import RESULTS, LineResult, StoredBatch, StoredFile

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
