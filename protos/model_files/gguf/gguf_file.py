"""Headers of GGUF files, versions 2 and 3: metadata and the table of tensors, over all shards of a model."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.hints import lfs_pointer, unusable
from protos.model_files.gguf.metadata import DAMAGED, Cursor, Metadata
from protos.model_files.gguf.types import TENSOR_TYPES, UNSERVED_TYPES, BlockFormat
from protos.model_files.plain_files import open_plain

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 65_536  # keys, and tensors: the largest models have some thousand
_MAX_DIMS = 4
_MAX_ALIGNMENT = 2**20
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """`shape` is row-major, as Hugging Face's: the file has the dimensions in reverse."""

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    start: int  # byte of its shard
    shard: int = 0

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.format.num_values * self.format.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """One model: metadata of the first shard, tensors of all. Its files stay mapped while it is referenced."""

    def __init__(self, path: Path) -> None:
        """`path` may be any shard. Raises BadCheckpoint, or UnsupportedModel for a type of tensor that is not read."""
        self.path = first_shard(path)
        first = _Header(self.path)
        count = _num_shards(self.path, first.metadata)
        headers = [first, *(_Header(file) for file in _other_shards(self.path, count))]
        self.metadata: Mapping[str, object] = first.metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for number, header in enumerate(headers):
            _check_shard(header, number, count)
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    raise BadCheckpoint(f"{header.path}: tensor {tensor.name!r} is in two shards: download them again")
                self.tensors[tensor.name] = replace(tensor, shard=number)
        self.paths = tuple(header.path for header in headers)
        self._data = [header.data for header in headers]
        self._header_end = first.end

    def bytes_of(self, tensor: GGUFTensor) -> memoryview:
        """Mapped: pages are read when they are used. Read-only."""
        return memoryview(self._data[tensor.shard])[tensor.start : tensor.start + tensor.num_bytes]

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(memoryview(self._data[0])[: self._header_end], digest_size=6)
        for path, data in zip(self.paths, self._data, strict=True):
            digest.update(f"{path.name} {len(data)}".encode())
        return digest.hexdigest()


def first_shard(path: Path) -> Path:
    found = _SHARD.match(path.name)
    return path if found is None else path.with_name(f"{found[1]}-00001-of-{found[3]}.gguf")


class _Header:
    """One file's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _mapped(path)
        cursor = Cursor(path, self.data)
        _check_version(cursor)
        num_tensors, num_keys = (_counted(cursor, what) for what in ("tensors", "keys"))
        self.metadata = Metadata(cursor, num_keys)
        tensors = [_read_tensor(cursor, index) for index in range(num_tensors)]
        alignment = _alignment(path, self.metadata)
        self.end = cursor.at
        data_start = -(-cursor.at // alignment) * alignment
        self.tensors = list(self._placed(tensors, data_start, alignment))

    def _placed(self, tensors: list[GGUFTensor], data_start: int, alignment: int) -> Iterator[GGUFTensor]:
        """The tensors with offsets from the file's start, in the file's order. None overlaps another or passes the
        end."""
        last, end = "the header", data_start
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            start = data_start + tensor.start
            what = f"{self.path}: tensor {tensor.name!r}"
            if tensor.start % alignment:
                raise BadCheckpoint(f"{what} begins at {tensor.start:,}, which is no multiple of {alignment}")
            if start < end:
                raise BadCheckpoint(f"{what} overlaps {last!r}: {DAMAGED}")
            if start + tensor.num_bytes > len(self.data):
                raise BadCheckpoint(
                    f"{what} ends at byte {start + tensor.num_bytes:,} of {len(self.data):,}: {DAMAGED}"
                )
            last, end = tensor.name, start + tensor.num_bytes
            yield replace(tensor, start=start)


def _mapped(path: Path) -> mmap:
    try:
        with open_plain(path) as file:
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing: download the model's shard again") from None
    except ValueError:
        raise BadCheckpoint(f"{path} is empty: download it again") from None
    except OSError as error:
        raise BadCheckpoint(f"{path}: {unusable(error)}") from error


def _check_version(cursor: Cursor) -> None:
    path = cursor.path
    magic = bytes(cursor.data[: len(MAGIC)])
    if magic != MAGIC:
        raise BadCheckpoint(
            lfs_pointer(path) or f"{path} begins with {magic!r} and not with {MAGIC!r}: it is no GGUF file, or damaged"
        )
    cursor.skip(len(MAGIC), "the header")
    version = cursor.unpack("I", "the header")
    if version & 0xFFFF == 0:
        raise UnsupportedModel(f"{path} is a big-endian GGUF file: give --model the little-endian one")
    if version not in _VERSIONS:
        raise UnsupportedModel(f"{path} is GGUF version {version}: versions 2 and 3 are read, as llama.cpp writes them")


def _counted(cursor: Cursor, what: str) -> int:
    count: int = cursor.unpack("Q", f"the number of {what}")
    if count > _MAX_ENTRIES:
        raise BadCheckpoint(f"{cursor.path} claims {count:,} {what}, {_MAX_ENTRIES:,} are allowed: {DAMAGED}")
    return count


def _read_tensor(cursor: Cursor, index: int) -> GGUFTensor:
    name = cursor.name(f"the name of tensor {index}")
    what = f"the description of tensor {name!r}"
    num_dims = cursor.unpack("I", what)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise BadCheckpoint(f"{cursor.path}: tensor {name!r} has {num_dims} dimensions, 1 to {_MAX_DIMS} are allowed")
    shape = tuple(cursor.unpack("Q", what) for _ in range(num_dims))[::-1]
    number, start = cursor.unpack("I", what), cursor.unpack("Q", what)
    if (kind := TENSOR_TYPES.get(number)) is None:
        named = UNSERVED_TYPES.get(number, f"number {number}")
        raise UnsupportedModel(
            f"{cursor.path}: tensor {name!r} is of type {named}, which is not served: give a file of type "
            f"{', '.join(each.name for each in TENSOR_TYPES.values())}"
        )
    if not all(shape) or shape[-1] % kind.num_values:
        raise BadCheckpoint(
            f"{cursor.path}: tensor {name!r} is {shape}: rows of {kind.name} are multiples of {kind.num_values}"
        )
    return GGUFTensor(name=name, format=kind, shape=shape, start=start)


def _alignment(path: Path, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", 32)
    is_power = isinstance(alignment, int) and alignment > 0 and not alignment & (alignment - 1)
    if not is_power or alignment > _MAX_ALIGNMENT:
        raise BadCheckpoint(
            f"{path}: general.alignment is {alignment!r}: it must be a power of two up to {_MAX_ALIGNMENT:,}",
            param="general.alignment",
        )
    return int(alignment)


def _num_shards(path: Path, metadata: Metadata) -> int:
    count, found = metadata.get("split.count", 0), _SHARD.match(path.name)
    named = int(found[3]) if found else 1
    if count in (0, 1) and named == 1:
        return 1
    if count != named:
        raise BadCheckpoint(
            f"{path}: split.count is {count!r}, its name says {named}: keep the names NAME-00001-of-0000N.gguf",
            param="split.count",
        )
    return named


def _other_shards(path: Path, count: int) -> Iterator[Path]:
    found = _SHARD.match(path.name)
    for number in range(2, count + 1):
        assert found is not None, "shards are counted by name"
        yield path.with_name(f"{found[1]}-{number:05d}-of-{found[3]}.gguf")


def _check_shard(header: _Header, number: int, count: int) -> None:
    if count > 1 and header.metadata.get("split.no") != number:
        raise BadCheckpoint(
            f"{header.path}: split.no is {header.metadata.get('split.no')!r}, by its name {number}: rename it, or "
            "download it",
            param="split.no",
        )
