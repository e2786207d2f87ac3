"""Keeps rows that are not in the database yet in files, which outlive their process.

    row ─▶ segment A ┐                            ┌─▶ database ─▶ segment A is emptied
                     ├ 0.25 s: B takes the next ──┤
    row ─▶ segment B ┘                            └─ killed: another process writes what A and B have

A row is copied into mapped pages of a file, which do not survive the end of the host. A process that can lock another's
file knows that its owner is gone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from router.observe.ledger.rows import LedgerRow

log = logging.getLogger("baton.ledger")

FILE_BYTES = 8 << 20
_HEAD = struct.Struct("<II")  # bytes of the row, and their checksum
_NOTHING = bytes(_HEAD.size)  # behind the last row
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LedgerRow).decode


class RowJournal:
    """A journal in two files, beside those of other processes. The caller's lock excludes `write` and `turn` from each
    other."""

    def __init__(self, folder: Path) -> None:
        """Reserves the files' space: a full disk would end a process that writes into mapped pages. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user, who could read rows and write some")
        name = uuid.uuid4().hex
        self._folder = folder
        self._paths = [folder / f"{name}.{number}.rows" for number in range(2)]
        self._files = [_made(path) for path in self._paths]
        self._pages = [mmap.mmap(file, FILE_BYTES) for file in self._files]
        self._active = 0
        self._end = 0
        self._is_full = False

    def write(self, row: LedgerRow) -> None:
        """Rows beyond `FILE_BYTES` are only in memory."""
        data = _encode(row)
        end = self._end + _HEAD.size + len(data)
        if end + _HEAD.size > FILE_BYTES:
            if not self._is_full:
                log.error("further rows are only in memory until they are in the ledger: its journal is full")
            self._is_full = True
            return
        self._pages[self._active][self._end : end + _HEAD.size] = (
            _HEAD.pack(len(data), zlib.crc32(data)) + data + _NOTHING
        )
        self._end = end

    def turn(self) -> None:
        """The rows so far go into the database; the next ones go to the other file."""
        self._active, self._end, self._is_full = 1 - self._active, 0, False

    def done(self) -> None:
        """The rows before the last `turn` are in the database."""
        self._pages[1 - self._active][: _HEAD.size] = _NOTHING

    def recover(self, put: Callable[[Sequence[LedgerRow]], int]) -> int:
        """Passes the rows of dead processes to `put` and removes their files."""
        num_rows = 0
        for path in sorted(self._folder.glob("*.rows")):
            if path in self._paths:
                continue
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process was faster
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if rows := list(_rows_in(path.read_bytes())):
                    num_rows += put(rows)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                pass  # its process lives
            finally:
                os.close(file)
        return num_rows

    def close(self, *, is_written: bool) -> None:
        """Leaves the files to the next process unless all rows are written."""
        for path, file, pages in zip(self._paths, self._files, self._pages, strict=True):
            if is_written:
                path.unlink(missing_ok=True)
            pages.close()
            os.close(file)


def _made(path: Path) -> int:
    new = path.with_suffix(".new")
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.posix_fallocate(file, 0, FILE_BYTES)
        new.rename(path)
    except BaseException:
        os.close(file)
        new.unlink(missing_ok=True)
        raise
    return file


def _rows_in(data: bytes) -> Iterator[LedgerRow]:
    """Stops at a row that was half-written; logs and skips rows of another version."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, at)
        row = data[at + _HEAD.size : at + _HEAD.size + size]
        at += _HEAD.size + size
        if not size or len(row) < size or zlib.crc32(row) != checksum:
            return
        try:
            yield _decode(row)
        except msgspec.ValidationError as error:
            log.error("a row of a gateway process that was lost cannot be read: %s", error)
