"""Fills a model from a checkpoint, and packs each of its parts as soon as that part is read.

parts ─▶ threads, one core each, the largest part first: read its slots ─▶ pack it ─▶ free what was read"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.hints import counted
from workers.weights.slots import Slot, in_order
from workers.weights.source import WeightSource

log = logging.getLogger("baton.worker")

Progress = Callable[[int, int], None]

_UNPACKED_BYTES = 64 << 20  # read beside packed weights at the end of a load


def ignore_progress(done_bytes: int, total_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart:
    """Tensors that `pack` lays out once all are read. `slots` is called for each pass: a list would keep memory that
    `pack` frees."""

    slots: Callable[[], Iterator[Slot]]
    pack: Callable[[], None] = lambda: None  # the part stays as it was read


def check_slots(where: str | Path, slots: Collection[Slot], source: WeightSource, *, note: str = "") -> None:
    """Raises BadCheckpoint for a tensor that is missing (with `note`) or has another shape, and UnsupportedModel for a
    type that its slot does not take."""
    if missing := sorted({slot.name for slot in slots}.difference(source.names())):
        raise BadCheckpoint(
            f"{where} lacks {counted(len(missing), 'tensor')} of config.json, the first is {missing[0]!r}: a "
            f"shard is missing.{note}"
        )
    for slot in slots:
        stored = source.describe(slot.name)
        if stored.shape != slot.shape:
            raise BadCheckpoint(f"{where}: tensor {slot.name!r} is {stored.shape}, config.json makes it {slot.shape}")
        if stored.dtype not in slot.dtypes:
            raise UnsupportedModel(
                f"{where}: tensor {slot.name!r} is stored as {stored.dtype}: it must be one of "
                f"{', '.join(sorted(slot.dtypes))}"
            )


def log_unused(where: str | Path, names: Sequence[str]) -> None:
    if names:
        log.warning("%s: %d tensors are not used, such as %s", where, len(names), ", ".join(names[:5]))


class PartLoader:
    """Reads parts from one checkpoint; the name of `folder` is for errors."""

    def __init__(self, folder: Path, source: WeightSource) -> None:
        self._folder = folder
        self._source = source

    def load(self, parts: Sequence[LoadPart], on_progress: Progress, *, num_threads: int) -> None:
        """Tensors whose values may be refused are read before all others. `on_progress(done, total)` counts bytes of
        files, those of a part once it is packed, and is called from this thread. In one thread parts are loaded in
        order. Several are for CPUs, and sources that may be read at any time.

        Raises BadCheckpoint or UnsupportedModel.
        """
        sizes = [sum(map(self._num_bytes, part.slots())) for part in parts]
        done, total = 0, sum(sizes)
        on_progress(done, total)
        for part in parts:
            for slot in part.slots():
                if slot.check is not None:
                    self._read(slot)
        for size in self._loaded(list(zip(parts, sizes, strict=True)), num_threads):
            done += size
            on_progress(done, total)

    def _loaded(self, parts: Sequence[tuple[LoadPart, int]], num_threads: int) -> Iterator[int]:
        if num_threads == 1:
            for part, size in parts:
                self._load(part)
                yield size
            return
        waiting, running = sorted(parts, key=lambda pair: pair[1]), dict[Future[None], int]()
        is_inference = torch.is_inference_mode_enabled()  # of this thread, as the targets' are
        with threads_of_one_core(num_threads) as pool:
            while waiting or running:
                left = sum(size for _, size in waiting)
                while waiting and len(running) < num_threads:
                    part, size = waiting[-1]
                    left -= size
                    if not may_start(size, sum(running.values()), left):
                        break
                    waiting.pop()
                    running[pool.submit(self._load_in, is_inference, part)] = size
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    yield running.pop(future)

    def _load_in(self, is_inference: bool, part: LoadPart) -> None:
        with torch.inference_mode(is_inference):
            self._load(part)

    def _load(self, part: LoadPart) -> None:
        for slot in part.slots():
            if slot.check is None:
                self._read(slot)
        part.pack()

    def _read(self, slot: Slot) -> None:
        read = in_order(self._source.read(slot.name, slot.dim, slot.part), slot.order)
        if slot.consume is not None:
            slot.consume(read)
        else:
            slot.target.copy_(read)
        if slot.check is not None:
            slot.check(f"{self._folder}: tensor {slot.name!r}", slot.target)

    def _num_bytes(self, slot: Slot) -> int:
        return self._source.describe(slot.name).num_bytes * slot.target.numel() // math.prod(slot.shape)


def may_start(size: int, num_loading: int, num_left: int) -> bool:
    """Whether to read a part of `size` bytes while others of `num_loading` bytes are read and `num_left` bytes remain.
    Parts in work may take as much memory as the rest still will, and 64 MiB more."""
    return num_loading == 0 or num_loading + size <= num_left + _UNPACKED_BYTES


@contextmanager
def threads_of_one_core(count: int) -> Iterator[ThreadPoolExecutor]:
    """Starts threads in which torch starts no further threads, so that no operation waits for the slowest of them.
    Threads that start later are not affected: torch keeps one number for these, and one for each running thread."""
    before, all_started = torch.get_num_threads(), threading.Barrier(count)
    with ThreadPoolExecutor(count, "load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for started in [pool.submit(all_started.wait) for _ in range(count)]:
                started.result()
        finally:
            torch.set_num_threads(before)
        yield pool
