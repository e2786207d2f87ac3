"""Contents of files: the seam, and a folder.

upload ─▶ NAME.part ─▶ commit: on disk, then NAME          a crash leaves a .part, which `sweep` removes
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from protos.errors import Misconfigured, NotFound, Unavailable

_PART = ".part"
ABANDONED_S = 86_400.0
"""A file without a row, or an upload without an end, is removed after so long."""


class ContentWriter(Protocol):
    """A file that is being written. A context manager: what was not committed is dropped. Called from threads."""

    def write(self, data: bytes) -> None: ...

    def commit(self) -> int:
        """The file exists from now on, and replaces one of the same name. Returns its bytes."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class FileContents(Protocol):
    """Called from threads. Raises Unavailable."""

    def writer(self, file_id: str) -> ContentWriter: ...

    def read(self, file_id: str, start: int, size: int) -> bytes:
        """`size` bytes from `start` on, fewer at the end. Raises NotFound."""
        ...

    def delete(self, file_id: str) -> None:
        """A file that does not exist is no error."""
        ...

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        """Removes old files that are not known, and uploads that never ended."""
        ...


class FolderContents:
    """Each file under its id. Raises Misconfigured for a folder that cannot be made."""

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

    def writer(self, file_id: str) -> ContentWriter:
        return _FolderWriter(self._folder / file_id)

    def read(self, file_id: str, start: int, size: int) -> bytes:
        try:
            with (self._folder / file_id).open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(size) or b""
        except FileNotFoundError:
            raise NotFound(f"the content of file {file_id} has been deleted") from None
        except OSError as error:
            raise Unavailable(f"file {file_id} cannot be read: {error.strerror}") from error

    def delete(self, file_id: str) -> None:
        try:
            (self._folder / file_id).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"file {file_id} cannot be deleted: {error.strerror}") from error

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        oldest_s = time.time() - ABANDONED_S
        try:
            for path in self._folder.iterdir():
                with suppress(FileNotFoundError):  # renamed or deleted since it was listed
                    is_old = path.stat().st_mtime < oldest_s
                    if is_old and (path.suffix == _PART or not is_known(path.name)):
                        path.unlink()
        except OSError as error:
            raise Unavailable(f"the folder of files cannot be swept: {error.strerror}") from error


class _FolderWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.{os.urandom(4).hex()}{_PART}")
        self._num_bytes = 0
        try:
            self._part.touch(mode=0o600)
            self._file = self._part.open("wb", buffering=0)
        except OSError as error:
            raise _unwritable(error) from error

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise _unwritable(error) from error
        self._num_bytes += len(data)

    def commit(self) -> int:
        try:
            os.fsync(self._file.fileno())
            self._part.replace(self._path)
        except OSError as error:
            raise _unwritable(error) from error
        return self._num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


def _unwritable(error: OSError) -> Unavailable:
    return Unavailable(f"the file cannot be stored now: {error.strerror}")
