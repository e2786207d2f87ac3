"""How large a cache becomes on the memory there is, and what is said when there is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.errors import Misconfigured
from workers.free_memory import free_ram_bytes
from workers.kv.cache_size import MAX_RAM_BYTES, blocks_in_ram, check_weights_fit

GIB = 2**30


def machine(root: Path, *, available_kib: int, limit: str | None = None, used: int = 0) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable:   {available_kib} kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
    return root


def test_free_memory_is_the_kernels_available_memory(tmp_path: Path) -> None:
    assert free_ram_bytes(machine(tmp_path, available_kib=2048)) == 2 * 2**20


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", 10, 2**30), ("300000", 100_000, 200_000), ("100", 200, 0), (str(2**40), 0, 2**30)],
)
def test_a_container_has_its_own_limit(tmp_path: Path, limit: str, used: int, free: int) -> None:
    assert free_ram_bytes(machine(tmp_path, available_kib=2**20, limit=limit, used=used)) == free


def test_a_machine_that_says_nothing_still_has_memory(tmp_path: Path) -> None:
    assert free_ram_bytes(tmp_path) > 0


def test_the_default_cache_leaves_room_and_starts_at_once() -> None:
    assert blocks_in_ram(2**20, fraction=None, free_bytes=5 * GIB, max_useful=10**6) == 1024
    assert blocks_in_ram(2**20, fraction=None, free_bytes=500 * GIB, max_useful=10**6) == MAX_RAM_BYTES // 2**20
    assert blocks_in_ram(2**20, fraction=0.5, free_bytes=500 * GIB, max_useful=10**6) == 250 * 1024
    assert blocks_in_ram(2**20, fraction=0.5, free_bytes=500 * GIB, max_useful=77) == 77


def test_too_little_memory_is_reported_with_a_fix() -> None:
    with pytest.raises(Misconfigured, match=r"0\.20 GiB of RAM .* one block takes 0\.2500 GiB: raise memory_fraction"):
        blocks_in_ram(GIB // 4, fraction=0.2, free_bytes=GIB, max_useful=9)
    with pytest.raises(Misconfigured, match=r"2\.00 GiB on each rank, 1\.00 GiB are free on cpu: raise tp"):
        check_weights_fit(2 * GIB, GIB, "cpu")
    check_weights_fit(GIB, GIB, "cpu")
