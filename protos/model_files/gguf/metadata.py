"""The metadata of a mapped GGUF file: an index of keys is made at once, a value is decoded when it is read.

No count or length of the file is believed before it is compared with the bytes that are left, and nothing is allocated
by a count: a hostile header costs at most its own size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from protos.errors import BadCheckpoint

MAX_STRINGS = 4_000_000
"""In one array: the largest vocabularies have 300,000 tokens and 600,000 merges."""
DAMAGED = "the file is truncated or damaged, download it again"
_MAX_NAME_BYTES = 65_535
_SCALARS = {
    0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h"), 4: ("uint32", "I"), 5: ("int32", "i"),
    6: ("float32", "f"), 7: ("bool", "?"), 10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class Cursor:
    """Reads a mapped file in order. Raises BadCheckpoint where it would pass the end."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def skip(self, num_bytes: int, what: str) -> int:
        start = self.at
        if num_bytes > len(self.data) - start:
            raise BadCheckpoint(
                f"{self.path}: {what} takes {num_bytes:,} bytes from {start:,} on, of {len(self.data):,}: {DAMAGED}"
            )
        self.at = start + num_bytes
        return start

    def unpack(self, code: str, what: str) -> Any:
        start = self.skip(struct.calcsize(f"<{code}"), what)
        return struct.unpack_from(f"<{code}", self.data, start)[0]

    def name(self, what: str) -> str:
        length = self.unpack("Q", what)
        if length > _MAX_NAME_BYTES:
            raise BadCheckpoint(f"{self.path}: {what} has {length:,} bytes, {_MAX_NAME_BYTES:,} are allowed: {DAMAGED}")
        return text_at(self.path, self.data, self.skip(length, what), length, what)


def text_at(path: Path, data: mmap, start: int, length: int, what: str) -> str:
    try:
        return data[start : start + length].decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{path}: {what} is not UTF-8 ({error}): {DAMAGED}") from error


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array of one key, read only by `values`."""

    path: Path
    key: str
    kind: str  # "uint32", "string", ...
    count: int
    data: mmap
    start: int
    code: str  # of struct; "" for strings

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"an array of {self.count:,} {self.kind} values"

    def values(self) -> list[Any]:
        if self.code:
            return list(struct.unpack_from(f"<{self.count}{self.code}", self.data, self.start))
        return list(self._strings())

    def _strings(self) -> Iterator[str]:
        at = self.start
        for index in range(self.count):
            (length,) = struct.unpack_from("<Q", self.data, at)
            yield text_at(self.path, self.data, at + 8, length, f"{self.key}[{index}]")
            at += 8 + length


class Metadata(Mapping[str, Any]):
    """Numbers, bools and strings as Python's; arrays as `GGUFArray`."""

    def __init__(self, cursor: Cursor, num_keys: int) -> None:
        self._path = cursor.path
        self._data = cursor.data
        self._places: dict[str, tuple[int, int, int, int]] = {}  # kind, kind of an array's entries, start, count
        for index in range(num_keys):
            key = cursor.name(f"the name of key {index}")
            if key in self._places:
                raise BadCheckpoint(f"{self._path}: key {key!r} is there twice: {DAMAGED}", param=key)
            self._places[key] = _placed(cursor, cursor.unpack("I", f"the type of {key!r}"), key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> Any:
        kind, inner, start, count = self._places[key]
        if kind == _STRING:
            return text_at(self._path, self._data, start, count, f"{key!r}")
        if kind == _ARRAY:
            name, code = _SCALARS.get(inner, ("string", ""))
            return GGUFArray(self._path, key, name, count, self._data, start, code)
        return struct.unpack_from(f"<{_SCALARS[kind][1]}", self._data, start)[0]


def _placed(cursor: Cursor, kind: int, key: str) -> tuple[int, int, int, int]:
    what = f"the value of {key!r}"
    if kind == _STRING:
        length = cursor.unpack("Q", what)
        return kind, kind, cursor.skip(length, what), length
    if kind == _ARRAY:
        inner, count = cursor.unpack("I", what), cursor.unpack("Q", what)
        return kind, inner, _array_start(cursor, inner, count, key), count
    if kind not in _SCALARS:
        raise BadCheckpoint(f"{cursor.path}: {key!r} has the unknown type {kind}: the file is damaged or too new")
    return kind, kind, cursor.skip(struct.calcsize(f"<{_SCALARS[kind][1]}"), what), 1


def _array_start(cursor: Cursor, inner: int, count: int, key: str) -> int:
    what = f"the array {key!r}"
    if inner in _SCALARS:
        return cursor.skip(count * struct.calcsize(f"<{_SCALARS[inner][1]}"), what)
    if inner != _STRING:
        kind = "arrays" if inner == _ARRAY else f"the unknown type {inner}"
        raise BadCheckpoint(f"{cursor.path}: {what} is of {kind}: the file is damaged or too new", param=key)
    if count > MAX_STRINGS:
        raise BadCheckpoint(
            f"{cursor.path}: {what} has {count:,} strings of {MAX_STRINGS:,} allowed: {DAMAGED}", param=key
        )
    start, at, data, end = cursor.at, cursor.at, cursor.data, len(cursor.data)
    for index in range(count):
        if at + 8 > end or (length := struct.unpack_from("<Q", data, at)[0]) > end - at - 8:
            raise BadCheckpoint(
                f"{cursor.path}: string {index:,} of {what} passes the end of the file: {DAMAGED}", param=key
            )
        at += 8 + length
    cursor.at = at
    return start
