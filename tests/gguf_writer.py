"""Writes GGUF files from the rules of its specification, for tests. Nothing here is shared with the product."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {
    "uint8": (0, "B"), "int8": (1, "b"), "uint16": (2, "H"), "int16": (3, "h"), "uint32": (4, "I"), "int32": (5, "i"),
    "float32": (6, "f"), "bool": (7, "?"), "uint64": (10, "Q"), "int64": (11, "q"), "float64": (12, "d"),
}  # fmt: skip
TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30,
    "MXFP4": 39,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor as it is to be stored: row-major shape, the type's name, its bytes."""

    shape: tuple[int, ...]
    kind: str
    data: bytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Numbers are written as uint32, int32 or float32; (kind, value) names another type. Arrays hold one kind."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    start = 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPES[tensor.kind], start)
        start += -(-len(tensor.data) // alignment) * alignment
    with path.open("wb") as file:
        file.write(_padded(head, alignment))
        for tensor in tensors.values():
            file.write(_padded(tensor.data, alignment))
    return path


def write_shards(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], count: int) -> list[Path]:
    """`path` is the name without its number: "model" becomes model-00001-of-00003.gguf and so on."""
    names = list(tensors)
    written = []
    for number in range(count):
        own = {name: tensors[name] for name in names[number::count]}
        split = {"split.no": ("uint16", number), "split.count": ("uint16", count), "split.tensors.count": len(names)}
        file = path.with_name(f"{path.name}-{number + 1:05d}-of-{count:05d}.gguf")
        written.append(write_gguf(file, {**(metadata if number == 0 else {}), **split}, own))
    return written


def _padded(data: bytes, alignment: int) -> bytes:
    return data + b"\0" * (-len(data) % alignment)


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, tuple):
        kind, code = KINDS[value[0]]
        if isinstance(value[1], Sequence):
            return struct.pack("<IIQ", 9, kind, len(value[1])) + struct.pack(f"<{len(value[1])}{code}", *value[1])
        return struct.pack(f"<I{code}", kind, value[1])
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, Sequence):
        if value and isinstance(value[0], str | bytes):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        return _value(("float32" if any(isinstance(item, float) for item in value) else "int32", value))
    if isinstance(value, bool):
        return _value(("bool", value))
    if isinstance(value, float):
        return _value(("float32", value))
    return _value(("uint32" if value >= 0 else "int32", value))
