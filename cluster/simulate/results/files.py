"""The files that a run writes. They are checked before the run and written at its end, even if the table cannot be
printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import TextIO

from cluster.bench.verb import check_writable
from protos.errors import Misconfigured
from protos.hints import unusable


def check(written: Mapping[str, Path | None], read: Mapping[str, Sequence[Path | None]]) -> None:
    """Paths by flag. Raises Misconfigured for a file that could not be written, and for one path given to two flags."""
    whose = {realpath(path): f"--{flag} reads" for flag, paths in read.items() for path in paths if path is not None}
    for flag, path in written.items():
        if path is None:
            continue
        check_writable(path, flag)
        if not path.exists() or path.is_file():
            if (other := whose.get(realpath(path))) is not None:
                raise Misconfigured(f"--{flag} {path}: {other} that file: give another path", param=flag)
            whose[realpath(path)] = f"--{flag} writes"


def write(path: Path, text: str, flag: str) -> None:
    """Raises Misconfigured."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _lost(flag, path, error) from error


def keep(*writes: Callable[[], None]) -> list[str]:
    """Writes all files. Returns the errors, so that the caller can print them after the figures."""
    lost = []
    for one in writes:
        try:
            one()
        except Misconfigured as error:
            lost.append(error.message)
    return lost


def report_lost(lost: Sequence[str]) -> None:
    """Raises Misconfigured for files that could not be written."""
    if lost:
        raise Misconfigured("; ".join(lost))


class Log:
    """The file of the event log. It is opened with the first event, so a run that never begins keeps the old file. If
    writing fails, the log ends there and the run continues: `check` raises at its end."""

    write: Callable[[str], object] | None
    """None if no log is requested."""

    def __init__(self, path: Path | None) -> None:
        self.write = partial(self._write, path) if path is not None else None
        self._file: TextIO | None = None
        self._lost: Misconfigured | None = None

    def check(self) -> None:
        """Raises Misconfigured if lines were lost."""
        if self._lost is not None:
            raise self._lost

    def _write(self, path: Path, text: str) -> None:
        if self._lost is not None:
            return
        try:
            if self._file is None:
                self._file = path.open("w", encoding="utf-8")
            self._file.write(text)
        except OSError as error:
            self._lost = _lost("events", path, error)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self._lost = self._lost or _lost("events", self._file.name, error)


def _lost(flag: str, path: Path | str, error: OSError) -> Misconfigured:
    return Misconfigured(f"--{flag} {path}: {unusable(error, to_write=True)}", param=flag)
