"""Contents of files: the seam, and a folder."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Protocol

from protos.errors import Misconfigured, NotFound, Unavailable

_PART = ".part"
_SPOOLED_BYTES = 1 << 20
ABANDONED_S = 86_400.0
"""A sweep removes what belongs to no file when it is this old."""


class FileContents(Protocol):
    """Called from threads. Raises Unavailable."""

    def store(self, file_id: str, content: IO[bytes]) -> None:
        """Copies all of `content`. A copy that fails leaves the file as it was."""
        ...

    def read(self, file_id: str, start: int, size: int) -> bytes:
        """Returns `size` bytes from `start` on, fewer at the end. Raises NotFound."""
        ...

    def delete(self, file_id: str) -> None:
        """Deletes the file if it exists."""
        ...

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        """Removes old files that are not known, and old copies that never ended."""
        ...


class FolderContents:
    """Each file under its id; NAME.part until all of it is on disk. Raises Misconfigured for a folder that cannot be
    made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            for made in (folder.parent, folder):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Misconfigured(
                f"router.batch.folder: {folder}: {error.strerror}: give a folder that this process may write",
                param="router.batch.folder",
            ) from error

    def store(self, file_id: str, content: IO[bytes]) -> None:
        part = self._folder / f"{file_id}.{os.urandom(4).hex()}{_PART}"
        content.seek(0)
        try:
            with failing():
                part.touch(mode=0o600)
                with part.open("wb") as file:
                    shutil.copyfileobj(content, file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self._folder / file_id)
        finally:
            with suppress(OSError):
                part.unlink()

    def read(self, file_id: str, start: int, size: int) -> bytes:
        with failing(f"file {file_id} cannot be read"):
            try:
                with (self._folder / file_id).open("rb", buffering=0) as file:
                    file.seek(start)
                    return file.read(size) or b""
            except FileNotFoundError:
                raise NotFound(f"the content of file {file_id} has been deleted") from None

    def delete(self, file_id: str) -> None:
        with failing(f"file {file_id} cannot be deleted"):
            (self._folder / file_id).unlink(missing_ok=True)

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        oldest_s = time.time() - ABANDONED_S
        with failing("the folder of files cannot be swept"):
            for path in self._folder.iterdir():
                with suppress(FileNotFoundError):  # renamed or deleted since it was listed
                    is_old = path.stat().st_mtime < oldest_s
                    if is_old and (path.suffix == _PART or not is_known(path.name)):
                        path.unlink()


@contextmanager
def failing(problem: str = "the file cannot be stored now") -> Iterator[None]:
    """Raises Unavailable with the problem and the reason of an OSError."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{problem}: {error.strerror}") from error


@contextmanager
def spooled() -> Iterator[IO[bytes]]:
    """A content that is not stored yet: the first MiB in memory, more on the disk of TMPDIR. Raises Unavailable."""
    with failing(), SpooledTemporaryFile(_SPOOLED_BYTES) as content:
        yield content
