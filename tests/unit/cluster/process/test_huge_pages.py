from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.process import gc_tuning
from cluster.process.huge_pages import HUGE, gather, private

MIB = 2**20


@contextmanager
def memory(num_bytes: int) -> Iterator[tuple[mmap.mmap, int]]:
    """With its address."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as found:
        held = ctypes.c_char.from_buffer(found)
        yield found, ctypes.addressof(held)
        del held


def test_what_is_gathered_stays_what_it_was_and_what_is_empty_is_left() -> None:
    with memory(4 * HUGE) as (full, at), memory(4 * HUGE) as (empty, elsewhere):
        full[:] = told = bytes(range(256)) * (4 * HUGE // 256)
        empty[2 * HUGE] = 1
        assert gather([(at, at + 4 * HUGE)]) in (0, 3 * HUGE, 4 * HUGE)  # 0 before Linux 6.1
        assert full[:] == told
        assert gather([(elsewhere, elsewhere + 4 * HUGE)]) == 0


def test_only_private_memory_of_no_file_is_looked_at(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "1000-2000 rw-p 00000000 00:00 0 \n"
        "3000-4000 rw-p 00000000 00:00 0                          [heap]\n"
        "5000-6000 rw-p 00000000 00:00 0                          [stack]\n"
        "7000-8000 rw-s 00000000 00:01 42                         /dev/zero (deleted)\n"
        "9000-a000 r-xp 00000000 fe:00 99                         /usr/lib/libc.so.6\n"
    )
    assert list(private(maps)) == [(0x1000, 0x2000), (0x3000, 0x4000)]
    assert list(private(tmp_path / "none")) == []


def test_a_long_computation_gathers_its_memory_whenever_that_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, gathered = [1000 * MIB], list[int]()
    monkeypatch.setattr(gc_tuning, "resident", lambda: resident[0])
    monkeypatch.setattr(gc_tuning, "gather", lambda: gathered.append(resident[0]))
    with gc_tuning.collecting_in_bulk():
        for size in (1100, 1300, 1400, 1600, 1700):
            resident[0] = size * MIB
            gc.collect()
    resident[0] = 9000 * MIB
    gc.collect()
    assert gathered == [1300 * MIB, 1700 * MIB], "by a quarter, and no more when it is over"


def test_what_a_process_has_is_what_it_has_now_and_not_its_peak(tmp_path: Path) -> None:
    """A second run in a process gathers its memory, too: below the first one's peak, it never did."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("nothing here says what a process has")
    before = gc_tuning.resident()
    with memory(64 * MIB) as (filled, _):
        for at in range(0, 64 * MIB, MIB):  # not all at once: what is freed may stay with the allocator
            filled[at : at + MIB] = b"x" * MIB
        assert gc_tuning.resident() > before + 60 * MIB
    assert gc_tuning.resident() < before + 30 * MIB
    assert gc_tuning.resident(tmp_path / "none") == 0
