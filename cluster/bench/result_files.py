"""The files that a measurement writes. They are checked before it and written at its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from os.path import realpath
from pathlib import Path
from typing import Any

import orjson

from protos.errors import Misconfigured
from protos.hints import unusable


def check_files(written: Mapping[str, Path | None], read: Collection[Path] = ()) -> None:
    """`written` is by flag. Raises Misconfigured for a file that cannot be written or has another use. Leaves no new
    file."""
    used = {realpath(path) for path in read}
    for flag, path in written.items():
        if path is None:
            continue
        with writing(flag, path):
            was_there = path.exists()
            path.open("ab").close()
            if not was_there:
                Path(realpath(path)).unlink()  # the link pointed to no file: remove the one just created
        if path.is_file() or not path.exists():  # not /dev/null
            if realpath(path) in used:
                raise Misconfigured(f"--{flag} {path}: that file is read or written already: give another", param=flag)
            used.add(realpath(path))


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Raises Misconfigured for an OSError."""
    try:
        yield
    except OSError as error:
        raise Misconfigured(f"--{flag} {path}: {unusable(error, to_write=True)}", param=flag) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Raises Misconfigured."""
    with writing("json", path):
        path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


@contextmanager
def line_file(flag: str, path: Path | None) -> Iterator[Callable[[str], object] | None]:
    """Yields a function that writes lines; None without a path. Raises Misconfigured."""
    if path is None:
        yield None
        return
    with writing(flag, path), path.open("w", encoding="utf-8") as file:
        yield file.write
