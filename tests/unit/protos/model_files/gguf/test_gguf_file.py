"""Headers of GGUF files: what is read, and that damaged and hostile files do at most raise an error that names
them."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.fields import Fields
from protos.model_files.gguf.gguf_file import GGUFFile
from protos.model_files.gguf.metadata import GGUFArray
from protos.model_files.gguf.types import TENSOR_TYPES, UNSERVED_TYPES
from tests.gguf_writer import Stored, write_gguf, write_shards

ROOM_BYTES = 2**20
"""bytes beside twice the file: the reader's own modules and the interpreter"""


def test_types_have_the_names_and_sizes_of_llama_cpp() -> None:
    names = UNSERVED_TYPES | {number: served.name for number, served in TENSOR_TYPES.items()}
    assert names == {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    for number, served in TENSOR_TYPES.items():
        assert (served.num_values, served.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]


def floats(*values: float) -> Stored:
    return Stored((len(values),), "F32", struct.pack(f"<{len(values)}f", *values))


def blocks(rows: int, kind: str = "Q8_0", size: int = 34, fill: int = 1) -> Stored:
    return Stored((rows, 32), kind, bytes([fill]) * rows * size)


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "some.numbers": [1, -2, 3],
    "some.bytes": ("uint8", [0, 255]),
    "some.wide": ("uint64", 2**40),
    "some.double": ("float64", 0.1),
    "some.flag": True,
    "some.texts": ["a", "", "ü▁"],
}
TENSORS = {"norm": floats(1.0, 2.0, 3.0), "weight": blocks(2), "last": floats(4.0)}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 1])
def test_metadata_and_tensors_are_read_as_they_were_written(version: int, alignment: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, version=version, alignment=alignment)
    gguf = GGUFFile(path)
    values = {key: value.values() if isinstance(value, GGUFArray) else value for key, value in gguf.metadata.items()}
    values.pop("general.alignment", None)
    wanted = {key: value[1] if isinstance(value, tuple) else value for key, value in METADATA.items()}
    assert values == wanted
    assert [*gguf.tensors] == [*TENSORS]
    for name, stored in TENSORS.items():
        tensor = gguf.tensors[name]
        assert (tensor.shape, tensor.format.name, tensor.num_bytes) == (stored.shape, stored.kind, len(stored.data))
        assert bytes(gguf.bytes_of(tensor)) == stored.data
    assert Fields(gguf.metadata, str(path)).integer("llama.block_count") == 3


def test_shards_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "m", METADATA, TENSORS, 3)
    for path in paths:
        gguf = GGUFFile(path)
        assert gguf.path == paths[0]
        assert gguf.metadata["general.architecture"] == "llama"
        assert {name: bytes(gguf.bytes_of(tensor)) for name, tensor in gguf.tensors.items()} == {
            name: stored.data for name, stored in TENSORS.items()
        }
    assert GGUFFile(paths[0]).fingerprint() == GGUFFile(paths[2]).fingerprint()
    write_gguf(tmp_path / "renamed.gguf", {**METADATA, "split.count": 3, "split.no": 0}, TENSORS)
    with pytest.raises(BadCheckpoint, match=r"split\.count is 3.* 1"):
        GGUFFile(tmp_path / "renamed.gguf")
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(BadCheckpoint, match=r"00002-of-00003\.gguf: split\.no is 2, by its name 1"):
        GGUFFile(paths[0])
    paths[1].unlink()
    with pytest.raises(BadCheckpoint, match=r"m-00002-of-00003\.gguf is missing"):
        GGUFFile(paths[0])


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert data.count(old) == 1
        return data.replace(old, new)

    return change


def described(name: str, *dims: int, kind: int, start: int) -> bytes:
    return name.encode() + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, start)


def weight(*dims: int, kind: int = 8, start: int = 32) -> Callable[[bytes], bytes]:
    """Describes the tensor "weight" otherwise."""
    return replaced(described("weight", 32, 2, kind=8, start=32), described("weight", *dims, kind=kind, start=start))


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda _: b"", BadCheckpoint, "is empty"),
        (lambda data: b"PK" + data[2:], BadCheckpoint, r"begins with b'PKUF' and not with b'GGUF'"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid\n", BadCheckpoint, "run `git lfs pull`"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], UnsupportedModel, "is GGUF version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], UnsupportedModel, "is a big-endian GGUF file"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], BadCheckpoint, "claims .* tensors"),
        (lambda data: data[:16] + struct.pack("<Q", 2**62) + data[24:], BadCheckpoint, "claims .* keys"),
        (lambda data: data[:24] + struct.pack("<Q", 2**63) + data[32:], BadCheckpoint, "the name of key 0 has"),
        (lambda data: data[:60], BadCheckpoint, r"takes \d+ bytes .* of 60"),
        (lambda data: data[:-32], BadCheckpoint, r"tensor 'last' ends at"),
        (replaced(b"general.architecture", b"\xff" * 20), BadCheckpoint, "the name of key 0 is not UTF-8"),
        (replaced(b"some.flag\x07", b"some.flag\x63"), BadCheckpoint, "'some.flag' has the unknown type 99"),
        (
            replaced(*(b"some.numbers" + struct.pack("<IIQ", 9, 5, count) for count in (3, 2**61))),
            BadCheckpoint, r"the array 'some\.numbers' takes .* bytes",
        ),
        (
            replaced(*(b"some.numbers" + struct.pack("<II", 9, kind) for kind in (5, 9))),
            BadCheckpoint, r"the array 'some\.numbers' is of arrays",
        ),
        (
            replaced(*(b"some.texts" + struct.pack("<IIQ", 9, 8, count) for count in (3, 2**50))),
            BadCheckpoint, r"'some\.texts' has 1,125,899,906,842,624 .*4,000,000",
        ),
        (
            replaced(*(b"some.texts" + struct.pack("<IIQ", 9, 8, count) for count in (3, 999))),
            BadCheckpoint, r"string [\d,]+ of the array 'some\.texts' passes",
        ),
        (weight(32, 2, kind=8, start=0), BadCheckpoint, "'(norm|weight)' overlaps"),
        (weight(32, 2, kind=8, start=33), BadCheckpoint, "begins at 33, which is no mul"),
        (weight(32, 2, kind=8, start=2**63), BadCheckpoint, "'weight' ends at"),
        (weight(32, 2**58), BadCheckpoint, "'(last|weight)'"),
        (weight(31, 2), BadCheckpoint, r"\(2, 31\): rows of Q8_0"),
        (weight(32, 0), BadCheckpoint, r"\(0, 32\): rows of Q8_0"),
        (weight(32, 2, kind=16, start=32), UnsupportedModel, "'weight' is of type IQ2_XXS"),
        (weight(32, 2, kind=77, start=32), UnsupportedModel, "is of type number 77"),
        (replaced(b"weight\x02", b"weight\x05"), BadCheckpoint, "'weight' has 5 dimensions, 1 to 4 are allowed"),
        (replaced(b"\x04\0\0\0\0\0\0\0last", b"\x04\0\0\0\0\0\0\0norm"), BadCheckpoint, "'norm' is in two"),
    ],
)  # fmt: skip
def test_faults_of_a_file_are_named(
    spoil: Callable[[bytes], bytes], error: type[Exception], says: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, TENSORS)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(error, match=says) as caught:
        GGUFFile(path)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("alignment", [0, 3, 2**32 - 1, ("float32", 32.0), "32"])
def test_an_invalid_alignment_is_refused(alignment: object, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, TENSORS)
    with pytest.raises(BadCheckpoint, match=r"general\.alignment is .*: it must be a power of two"):
        GGUFFile(path)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"a.b": 1, "a.c": 2}, {})
    path.write_bytes(path.read_bytes().replace(b"a.c", b"a.b"))
    with pytest.raises(BadCheckpoint, match=r"key 'a\.b' is there twice"):
        GGUFFile(path)


SPOILED = st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", METADATA, TENSORS).read_bytes()


@settings(max_examples=400)
@given(spoiled=SPOILED, keep=st.one_of(st.none(), st.integers(0, 700)))
def test_no_spoiled_file_does_more_than_raise(
    spoiled: list[tuple[int, bytes]], keep: int | None, whole: bytes, tmp_path: Path
) -> None:
    data = bytearray(whole)
    for at, change in spoiled:
        at %= len(data)
        data[at : at + len(change)] = change[: len(data) - at]
    read_within_bounds(tmp_path / "m.gguf", bytes(data[:keep]))


@settings(max_examples=200)
@given(tail=st.binary(max_size=400), tensors=st.integers(0, 2**64 - 1), keys=st.integers(0, 2**64 - 1))
def test_no_made_up_header_does_more_than_raise(tail: bytes, tensors: int, keys: int, tmp_path: Path) -> None:
    read_within_bounds(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + tail)
    read_within_bounds(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, tensors % 4, keys % 4) + tail)


def test_a_file_of_entries_costs_at_most_twice_its_size(tmp_path: Path) -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdefgh ", k=12)) for _ in range(200_000)]
    path = write_gguf(tmp_path / "m.gguf", {"texts": texts, "numbers": ("int8", [1] * 500_000)}, {})
    read_within_bounds(path, path.read_bytes())


def read_within_bounds(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    said = path.name
    tracemalloc.start()
    try:
        gguf = GGUFFile(path)
        for tensor in gguf.tensors.values():
            assert len(gguf.bytes_of(tensor)) == tensor.num_bytes
    except (BadCheckpoint, UnsupportedModel) as error:
        said = error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert path.name in said
    assert peak < 2 * len(data) + ROOM_BYTES
