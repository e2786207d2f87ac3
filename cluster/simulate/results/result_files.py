"""The files that a run writes. They are checked before the run and written at its end, before the table is printed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from os.path import realpath
from pathlib import Path
from typing import TextIO

from cluster.bench.bench_verb import check_writable
from protos.errors import Misconfigured
from protos.hints import unusable


def check(written: Mapping[str, Path | None], read: Collection[Path]) -> None:
    """`written` is by flag. Raises Misconfigured for a file that could not be written, or that has another use."""
    used = {realpath(path) for path in read}
    for flag, path in written.items():
        if path is None:
            continue
        check_writable(path, flag)
        if path.is_file() or not path.exists():  # not /dev/null
            if realpath(path) in used:
                raise Misconfigured(f"--{flag} {path}: that file is read or written already: give another", param=flag)
            used.add(realpath(path))


def write(path: Path, text: str, flag: str) -> None:
    """Raises Misconfigured."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _lost(flag, path, error) from error


@contextmanager
def event_log(path: Path | None) -> Iterator[Callable[[str], object] | None]:
    """A function that writes lines, or None without a path. It opens the file with the first line, so a run that never
    begins keeps the old file. If the file cannot be written, the run goes on without it, and Misconfigured is raised
    at its end."""
    if path is None:
        yield None
        return
    file: TextIO | None = None
    lost: OSError | None = None

    def put(line: str) -> None:
        nonlocal file, lost
        if lost is None:
            try:
                file = file or path.open("w", encoding="utf-8")
                file.write(line)
            except OSError as error:
                lost = error

    try:
        yield put
    finally:
        try:
            if file is not None:
                file.close()
        except OSError as error:
            lost = error
    if lost is not None:
        raise _lost("events", path, lost)


def _lost(flag: str, path: Path, error: OSError) -> Misconfigured:
    return Misconfigured(f"--{flag} {path}: {unusable(error, to_write=True)}", param=flag)
