"""Parts of a model are read and packed by several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from protos.errors import BadCheckpoint
from workers.models.filling import LoadPart, PartLoader, ignore_progress, may_start
from workers.weights.slots import Slot
from workers.weights.source import StoredTensor

MIB = 1 << 20


class Tensors:
    """A checkpoint whose tensors have two numbers and are described as larger."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def names(self) -> Collection[str]:
        return self.sizes

    def describe(self, name: str) -> StoredTensor:
        return StoredTensor(shape=(2,), dtype="F32", num_bytes=self.sizes[name])

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        return torch.tensor([1.0, 2.0])


class Packed:
    """A part that records when it is packed, and how many bytes are read and not yet packed then."""

    def __init__(self, name: str, source: Tensors, log: list[str]) -> None:
        self.name, self._log, self._source = name, log, source
        self.target = torch.zeros(2)

    def slots(self) -> Iterator[Slot]:
        yield Slot(name=self.name, shape=(2,), target=self.target)

    def pack(self) -> None:
        assert self.target.tolist() == [1.0, 2.0], "packed before it was read"
        assert torch.get_num_threads() == 1
        self._log.append(self.name)


def parts_of(sizes: dict[str, int]) -> tuple[PartLoader, list[LoadPart], list[str]]:
    source, log = Tensors(sizes), list[str]()
    parts = [Packed(name, source, log) for name in sizes]
    return PartLoader(Path("m"), source), [LoadPart(slots=part.slots, pack=part.pack) for part in parts], log


def test_progress_ends_when_all_is_packed() -> None:
    loader, parts, packed = parts_of({f"p{index}": 8 * (index + 1) for index in range(20)})
    seen: list[tuple[int, int, int]] = []
    loader.load(parts, lambda done, total: seen.append((done, total, len(packed))), num_threads=3)
    total = sum(8 * (index + 1) for index in range(20))
    assert seen[0] == (0, total, 0)
    assert seen[-1] == (total, total, 20)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert all(num_packed >= place for place, (_, _, num_packed) in enumerate(seen))


def test_loading_threads_keep_torchs_number_of_threads() -> None:
    before, after = torch.get_num_threads(), list[int]()
    loader, parts, _ = parts_of({f"p{index}": 8 for index in range(8)})
    loader.load(parts, ignore_progress, num_threads=3)
    other = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert [torch.get_num_threads(), *after] == [before, before]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


@pytest.mark.parametrize(("num_loading", "num_left", "starts"), [(0, 0, True), (100, 300, True), (100, 0, False)])
def test_little_is_unpacked_at_the_end(num_loading: int, num_left: int, starts: bool) -> None:
    assert may_start(100 * MIB, num_loading * MIB, num_left * MIB) is starts


def test_tensors_of_inference_mode_are_filled_in_it() -> None:
    with torch.inference_mode():
        loader, parts, packed = parts_of({f"p{index}": 8 for index in range(3)})
        loader.load(parts, ignore_progress, num_threads=2)
    assert len(packed) == 3


def test_a_part_that_is_refused_ends_the_load() -> None:
    loader, parts, _ = parts_of({f"p{index}": 8 for index in range(8)})

    def refuse() -> None:
        raise BadCheckpoint("m: tensor 'p3' is damaged")

    parts[3] = LoadPart(slots=parts[3].slots, pack=refuse)
    with pytest.raises(BadCheckpoint, match="p3"):
        loader.load(parts, ignore_progress, num_threads=2)
